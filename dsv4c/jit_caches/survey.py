"""What a cache holds: counted entry by entry, so that memory does not grow with the number of files."""

import os
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dsv4c.jit_caches.entries import Found, find_entries, is_partner, look_into, problem_text
from dsv4c.jit_caches.layout import FileEntry, FolderEntry, Layout
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.tree import Folder, Refused, Totals, open_root
from dsv4c.jit_caches.usage import Usage

# A cache in which something was written so shortly ago is taken to be in the middle of being written.
SETTLED_NS = 60 * 10**9
# A clock that is further ahead is wrong, and would keep a cache from ever being cleaned.
_CLOCK_ERROR_NS = 3600 * 10**9

# Called with the number of files counted since the last call.
Tick = Callable[[int], None]


def no_tick(_: int) -> None:
    """Where nobody watches."""


@dataclass
class Reasons:
    """Why things were left alone: all are counted, the first few are kept."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.examples) < 10:
            self.examples.append(reason)


@dataclass
class Ages:
    """Last use, bytes and files of every entry that could be removed; 24 bytes an entry."""

    use_ns: "array[int]" = field(default_factory=lambda: array("q"))
    disk_bytes: "array[int]" = field(default_factory=lambda: array("q"))
    files: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, totals: Totals) -> None:
        self.use_ns.append(totals.newest_use_ns)
        self.disk_bytes.append(totals.disk_bytes)
        self.files.append(totals.files)


@dataclass
class Survey:
    """`writing` says who writes into the cache now; `refused` is what has the name of an entry and is none."""

    place: Place
    entries: int = 0
    files: int = 0
    disk_bytes: int = 0
    apparent_bytes: int = 0
    newest_use_ns: int = 0
    entries_in_use: int = 0
    in_use: str | None = None
    writing: str | None = None
    others: int = 0
    refused: Reasons = field(default_factory=Reasons)
    refusal: str | None = None
    leftovers: int = 0
    leftover_bytes: int = 0
    ages: Ages = field(default_factory=Ages)

    @property
    def is_recognised(self) -> bool:
        """Whether the folder holds what this kind keeps, or nothing."""
        return self.refusal is None and (self.files > 0 or self.entries > 0 or self.leftovers > 0 or not self.others)

    @property
    def owner(self) -> int:
        return self.place.owner

    @property
    def is_ours(self) -> bool:
        return self.owner == os.geteuid()

    @property
    def skipped(self) -> str | None:
        """Why nothing here is removed; None where entries may be."""
        if self.refusal is not None:
            return self.refusal
        if not self.is_ours:
            return f"belongs to user {self.owner}"
        if not self.is_recognised:
            return "does not look like this cache"
        return None if self.writing is None else f"being written: {self.writing}"


def survey(place: Place, usage: Usage, tick: Tick = no_tick) -> Survey:
    """Counts the entries of a place."""
    result = Survey(place, refusal=place.refusal)
    if result.refusal is not None:
        return result
    try:
        with open_root(place.path) as folder:
            result.refusal = marker_missing(folder, place.layout)
            if result.refusal is not None:
                return result
            _count(folder, result, usage, tick)
    except OSError as error:
        result.refusal = error.strerror or str(error)
    return result


def marker_missing(folder: Folder, layout: Layout) -> str | None:
    """What says that the folder is not this cache; None where it is, or no file would say so."""
    if layout.marker is None or folder.head(layout.marker[0]).strip() == layout.marker[1]:
        return None
    return f"has no file {layout.marker[0]} as this cache has"


def _count(folder: Folder, result: Survey, usage: Usage, tick: Tick) -> None:
    linked: set[int] = set()
    units = result.place.layout.units
    for found in find_entries(folder, units):
        if found.problem is not None:
            result.refused.add(found.problem)
            continue
        if found.unit is None and not found.is_tombstone:
            result.others += 1
            continue
        if found.unit is not None and is_partner(found, units):
            continue
        try:
            totals = look_into(found, usage, linked)
        except FileNotFoundError:
            continue
        except (OSError, Refused) as error:
            result.refused.add(problem_text(error, found.path))
            continue
        tick(totals.files)
        _add(result, found, totals)


def _add(result: Survey, found: Found, totals: Totals) -> None:
    if found.is_tombstone:
        result.leftovers += 1
        result.leftover_bytes += totals.disk_bytes
        return
    result.files += totals.files
    result.disk_bytes += totals.disk_bytes
    result.apparent_bytes += totals.apparent_bytes
    if result.writing is None:
        result.writing = writing_sign(found.path, totals)
    if not isinstance(found.unit, FolderEntry | FileEntry):
        return
    result.entries += 1
    result.newest_use_ns = max(result.newest_use_ns, totals.newest_use_ns)
    if totals.use is None:
        result.ages.add(totals)
    else:
        result.entries_in_use += 1
        result.in_use = result.in_use or f"{found.path} is {totals.use.how}"


def writing_sign(path: str, totals: Totals) -> str | None:
    """Who writes at a path now, or None."""
    if totals.use is not None and totals.use.writes:
        return f"{path} is {totals.use.how}"
    age_ns = time.time_ns() - totals.newest_write_ns
    if -_CLOCK_ERROR_NS < age_ns < SETTLED_NS:
        return f"{path} was written {max(0, age_ns) // 10**9} seconds ago"
    return None


def real_paths(places: Iterable[Place]) -> list[str]:
    """Where mappings are looked for."""
    return [os.path.realpath(place.path) for place in places if place.exists and place.refusal is None]
