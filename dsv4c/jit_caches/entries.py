"""Finding the entries of a cache, and looking into one."""

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dsv4c.jit_caches.layout import FileEntry, FolderEntry, Housekeeping, Unit
from dsv4c.jit_caches.tree import Folder, Refused, Totals
from dsv4c.jit_caches.usage import Usage, Use

# An entry that is being removed has this name, in the folder it was in.
TOMBSTONE = re.compile(r"\.dsv4c-removed-[0-9a-f]{16}")


@dataclass(frozen=True)
class Found:
    """Something in a cache. `unit` is None where the kind does not know it; `problem` says what hid the rest."""

    parent: Folder  # open while the iterator stands here
    name: str
    unit: Unit | None
    is_tombstone: bool = False
    problem: str | None = None

    @property
    def path(self) -> str:
        return self.parent.below(self.name)


def find_entries(
    folder: Folder, units: Sequence[Unit], leave: Callable[[Folder, str], None] | None = None
) -> Iterator[Found]:
    """Everything of `units` below a folder, one at a time. `leave` is called after each folder above entries."""
    yield from _find(folder, tuple(units), 0, leave)


def _find(
    folder: Folder, units: tuple[Unit, ...], depth: int, leave: Callable[[Folder, str], None] | None
) -> Iterator[Found]:
    holds_folders = any(isinstance(unit, FolderEntry) and len(unit.components) == depth + 1 for unit in units)
    for item in folder.items():
        name = item.name
        if holds_folders and TOMBSTONE.fullmatch(name) and item.is_dir(follow_symlinks=False):
            yield Found(folder, name, None, is_tombstone=True)
            continue
        matching = tuple(unit for unit in units if unit.components[depth].fullmatch(name))
        is_folder = item.is_dir(follow_symlinks=False)
        entry = next((unit for unit in matching if len(unit.components) == depth + 1 and _fits(unit, item)), None)
        if entry is not None:
            yield Found(folder, name, entry)
            continue
        deeper = tuple(unit for unit in matching if len(unit.components) > depth + 1) if is_folder else ()
        if not deeper:
            yield Found(folder, name, None)
            continue
        try:
            with folder.open(name) as inner:
                yield from _find(inner, deeper, depth + 1, leave)
        except (OSError, Refused) as error:
            yield Found(folder, name, None, problem=problem_text(error, folder.below(name)))
            continue
        if leave is not None:
            leave(folder, name)


def _fits(unit: Unit, item: os.DirEntry[str]) -> bool:
    if isinstance(unit, FolderEntry):
        return item.is_dir(follow_symlinks=False)
    return item.is_file(follow_symlinks=False)


def look_into(found: Found, usage: Usage, linked: set[int] | None = None) -> Totals:
    """Counts an entry. Raises Refused where it holds what the kind does not know, OSError where it is gone.

    `linked` has the files with several names that were counted before.
    """
    totals = Totals(linked=set() if linked is None else linked)
    unit = found.unit
    if unit is None or isinstance(unit, FolderEntry):
        with found.parent.open(found.name) as entry:
            look_into_folder(entry, unit, usage, totals)
        return totals
    facts = regular(found.parent, found.name)
    totals.add(facts, usage)
    if not _is_proven(found, unit, facts.st_size):
        raise Refused(f"{found.path} lacks what such a file has")
    if isinstance(unit, FileEntry) and unit.first is not None:
        with contextlib.suppress(FileNotFoundError):
            totals.add(regular(found.parent, first_of(found.name, unit)), usage)
    return totals


def _is_proven(found: Found, unit: FileEntry | Housekeeping, size: int) -> bool:
    if isinstance(unit, FileEntry):
        return unit.proof is None or unit.proof in found.parent.head(found.name)
    return unit.check is None or unit.check(found.parent.head(found.name)[:16], size)


def is_partner(found: Found, units: Sequence[Unit]) -> bool:
    """Whether a file is the `first` of another one that exists."""
    for unit in units:
        if isinstance(unit, FileEntry) and unit.first is not None and found.name.endswith(unit.first[1]):
            owner = found.name.removesuffix(unit.first[1]) + unit.first[0]
            if unit.components[-1].fullmatch(owner):
                try:
                    regular(found.parent, owner)
                except (OSError, Refused):
                    return False
                return True
    return False


def first_of(name: str, unit: FileEntry) -> str:
    """The file that goes before `name`."""
    assert unit.first is not None
    return name.removesuffix(unit.first[0]) + unit.first[1]


def regular(folder: Folder, name: str) -> os.stat_result:
    """A file of ours. Raises Refused for anything else."""
    facts = folder.facts(name)
    if not stat.S_ISREG(facts.st_mode):
        raise Refused(f"{folder.below(name)} is not a regular file")
    folder.check(facts, folder.below(name))
    return facts


def look_into_folder(entry: Folder, unit: FolderEntry | None, usage: Usage, totals: Totals) -> None:
    """As `look_into`, of an open entry. `unit` is None for the rest of one whose removal was cut short."""
    facts = os.fstat(entry.fd)
    totals.note(facts, usage)
    missing = set() if unit is None else set(unit.needs_patterns)
    _look(entry, "", unit, usage, totals, missing)
    if not totals.files:
        # A tool makes the folder before the first file in it.
        totals.add_time(facts.st_mtime_ns)
    elif missing:
        raise Refused(f"{entry.path} lacks what an entry has")
    if unit is not None and unit.proof is not None and totals.files and unit.proof[1] not in entry.head(unit.proof[0]):
        raise Refused(f"{entry.path} lacks what an entry has")


def _look(
    folder: Folder, above: str, unit: FolderEntry | None, usage: Usage, totals: Totals, missing: set[re.Pattern[str]]
) -> None:
    for item in folder.items():
        path = above + item.name
        facts = item.stat(follow_symlinks=False)
        folder.check(facts, folder.below(item.name))
        if unit is not None:
            if unit.only_pattern.fullmatch(path) is None:
                raise Refused(f"{folder.below(item.name)} is not part of an entry")
            missing -= {pattern for pattern in missing if pattern.fullmatch(path)}
        if stat.S_ISDIR(facts.st_mode):
            totals.note(facts, usage)
            with folder.open(item.name) as inner:
                _look(inner, f"{path}/", unit, usage, totals, missing)
        elif stat.S_ISREG(facts.st_mode):
            totals.add(facts, usage)
            if unit is not None and path == unit.baton:
                _note_baton(facts, totals)
        elif not (stat.S_ISLNK(facts.st_mode) and (unit is None or unit.has_links)):
            raise Refused(f"{folder.below(item.name)} is a link or no regular file")


# A build of an hour has a compiler running in its folder, which is seen otherwise; without one the file is stale.
_BATON_NS = 3600 * 10**9


def _note_baton(facts: os.stat_result, totals: Totals) -> None:
    if totals.use is None and facts.st_mtime_ns > time.time_ns() - _BATON_NS:
        totals.use = Use("being built: its lock file is there", writes=False)


def problem_text(error: OSError | Refused, path: str) -> str:
    """Why something was left alone."""
    if isinstance(error, Refused):
        return str(error)
    return f"{path}: {error.strerror or error}"
