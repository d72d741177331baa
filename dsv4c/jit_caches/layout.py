"""How a cache lies on disk, as data: what one entry is, and how it is told from anything else."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class FolderEntry:
    """An entry that is a folder. It is renamed before it is emptied, so that no tool ever sees half of it.

    `path` has one pattern a component, from the cache's folder down to the entry. Everything in the entry, by its path
    from there, must match `only`, and something must match each of `needs`, unless the entry is empty.
    """

    path: tuple[str, ...]
    only: str
    needs: tuple[str, ...] = ()
    # (file, text) that it must have, where names alone could be those of somebody's own folder.
    proof: tuple[str, bytes] | None = None
    # Tools that put symbolic links into entries; in all others a link makes the entry unknown.
    has_links: bool = False
    # A file that exists while the tool writes the entry.
    baton: str | None = None

    @cached_property
    def components(self) -> tuple[re.Pattern[str], ...]:
        return _compiled(self.path)

    @cached_property
    def only_pattern(self) -> re.Pattern[str]:
        return re.compile(self.only)

    @cached_property
    def needs_patterns(self) -> tuple[re.Pattern[str], ...]:
        return _compiled(self.needs)


@dataclass(frozen=True)
class FileEntry:
    """An entry that is one file, or two: `first` has (suffix, suffix of the file beside it that makes it trusted).

    The second is removed first, and is no entry where the file itself exists.
    """

    path: tuple[str, ...]
    first: tuple[str, str] | None = None
    # Text that it must have, where its name alone could be that of another tool's file.
    proof: bytes | None = None

    @cached_property
    def components(self) -> tuple[re.Pattern[str], ...]:
        return _compiled(self.path)


@dataclass(frozen=True)
class Housekeeping:
    """A file that belongs to the cache as a whole: an index, a log, a lock file. It goes when no entry is left.

    `is_lock`: tools hold a `flock` on it while they write. `stays`: it is never removed. `check` is given its first
    bytes and its size, and says whether it is one.
    """

    path: tuple[str, ...]
    check: Callable[[bytes, int], bool] | None = None
    is_lock: bool = False
    stays: bool = False

    @cached_property
    def components(self) -> tuple[re.Pattern[str], ...]:
        return _compiled(self.path)


Unit = FolderEntry | FileEntry | Housekeeping


@dataclass(frozen=True)
class Layout:
    """`phases` in the order of removal: what refers to other entries comes before them."""

    phases: tuple[tuple[FolderEntry | FileEntry, ...], ...]
    housekeeping: tuple[Housekeeping, ...] = ()
    # (file, content) without which the folder is not this cache.
    marker: tuple[str, bytes] | None = None
    # The folder has other things as well, so that one without entries is nothing to mention.
    is_shared: bool = False

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        return (*(unit for phase in self.phases for unit in phase), *self.housekeeping)


def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)
