"""The folders of the kinds that are there."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsv4c.errors import CacheError
from dsv4c.jit_caches.kinds import KINDS, Candidate, Kind
from dsv4c.jit_caches.layout import Layout
from dsv4c.jit_caches.surroundings import Surroundings


@dataclass(frozen=True)
class Place:
    """A folder where a kind keeps its cache. `refusal` says why it is not looked into."""

    kind: str
    path: str
    source: str
    layout: Layout
    owner: int = -1
    refusal: str | None = None
    exists: bool = True


def chosen_kinds(names: Iterable[str]) -> list[Kind]:
    """The kinds of these names, or all; raises CacheError for others."""
    names = list(dict.fromkeys(names))
    unknown = next((name for name in names if name not in KINDS), None)
    if unknown is not None:
        raise CacheError(f"there is no kind of cache {unknown!r}", hint=f"the kinds are: {', '.join(KINDS)}")
    return [kind for kind in KINDS.values() if not names or kind.name in names]


def find_places(kinds: Iterable[Kind], here: Surroundings) -> Iterator[Place]:
    """Every place of the kinds: those that are there, and where a tool would write now. A folder comes once a kind."""
    for kind in kinds:
        seen: list[tuple[int, int, Layout]] = []
        for number, candidate in enumerate(kind.candidates(here)):
            try:
                facts = os.lstat(candidate.path)
            except (FileNotFoundError, NotADirectoryError):
                if number == 0:
                    yield Place(kind.name, candidate.path, candidate.source, candidate.layout, exists=False)
                continue
            except OSError as error:
                yield _refused(kind, candidate, -1, error.strerror or str(error))
                continue
            same = (facts.st_dev, facts.st_ino, candidate.layout)
            if same in seen:
                continue
            seen.append(same)
            if stat.S_ISDIR(facts.st_mode):
                yield Place(kind.name, candidate.path, candidate.source, candidate.layout, facts.st_uid)
            else:
                link = stat.S_ISLNK(facts.st_mode)
                yield _refused(
                    kind,
                    candidate,
                    facts.st_uid,
                    "is a symbolic link, which is not followed" if link else "is no folder",
                )


def _refused(kind: Kind, candidate: Candidate, owner: int, reason: str) -> Place:
    return Place(kind.name, candidate.path, candidate.source, candidate.layout, owner, reason)
