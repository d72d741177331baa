"""Removing entries, so that no tool ever finds half of one, and nothing else goes.

A folder entry is renamed first, to a name that no tool knows, and emptied through the descriptor it was looked at
through: a link that is put in its place meanwhile leads nowhere. A removal that is cut short leaves such a folder,
which the next one finishes.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dsv4c.jit_caches.entries import (
    Found,
    find_entries,
    first_of,
    is_partner,
    look_into,
    look_into_folder,
    problem_text,
    regular,
)
from dsv4c.jit_caches.layout import FileEntry, FolderEntry, Housekeeping, Layout
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.selection import Cut
from dsv4c.jit_caches.survey import Reasons, Tick, marker_missing, no_tick, writing_sign
from dsv4c.jit_caches.tree import Folder, Refused, Totals, open_root
from dsv4c.jit_caches.usage import Usage, usage_now

# Seconds after which open files are looked up again.
_USAGE_AGE_S = 5.0


class _BeingWritten(Exception):
    """Somebody began to write into the cache."""


class _Stopped(Exception):
    """The user interrupted."""


@dataclass
class Removal:
    """What really went, and why the rest did not. Bytes are freed when the last name of a file goes."""

    place: Place
    entries: int = 0
    files: int = 0
    freed_bytes: int = 0
    kept_in_use: int = 0
    refused: Reasons = field(default_factory=Reasons)
    failed: Reasons = field(default_factory=Reasons)
    skipped: str | None = None
    stopped: bool = False


def remove_entries(
    place: Place, cut: Cut, tick: Tick = no_tick, should_stop: Callable[[], bool] = lambda: False
) -> Removal:
    """Removes the entries of a place that `cut` selects, and then what belongs to none."""
    result = Removal(place)
    try:
        with open_root(place.path) as folder:
            if folder.root.owner != os.geteuid():
                result.skipped = f"belongs to user {folder.root.owner}"
            else:
                result.skipped = marker_missing(folder, place.layout)
            if result.skipped is None:
                with _locks(folder, place.layout):
                    _Remover(folder, result, cut, tick, should_stop).run()
    except _BeingWritten as error:
        result.skipped = f"being written: {error}"
    except _Stopped:
        result.stopped = True
    except FileNotFoundError:
        pass
    except OSError as error:
        result.failed.add(problem_text(error, place.path))
    return result


class _Remover:
    def __init__(self, folder: Folder, result: Removal, cut: Cut, tick: Tick, should_stop: Callable[[], bool]) -> None:
        self.folder, self.result, self.cut, self.tick, self.should_stop = folder, result, cut, tick, should_stop
        self.layout = result.place.layout
        self.usage_time = -_USAGE_AGE_S
        self.known_usage = Usage({})

    def run(self) -> None:
        for phase in self.layout.phases:
            for found in find_entries(self.folder, phase, leave=_drop_empty):
                self._handle(found)
        entries = [unit for phase in self.layout.phases for unit in phase]
        if next((found for found in find_entries(self.folder, entries) if found.unit or found.is_tombstone), None):
            return
        for found in find_entries(self.folder, self.layout.housekeeping, leave=_drop_empty):
            if isinstance(found.unit, Housekeeping) and not found.unit.stays:
                self._handle(found)

    def _usage(self) -> Usage:
        now = time.monotonic()
        if now - self.usage_time >= _USAGE_AGE_S:
            self.known_usage = usage_now([os.path.realpath(self.folder.root.path)])
            self.usage_time = time.monotonic()
        return self.known_usage

    def _handle(self, found: Found) -> None:
        if self.should_stop():
            raise _Stopped
        if found.problem is not None:
            self.result.refused.add(found.problem)
            return
        if found.unit is None and not found.is_tombstone:
            return
        if found.unit is not None and is_partner(found, self.layout.units):
            return
        try:
            if found.unit is None or isinstance(found.unit, FolderEntry):
                self._folder(found, found.unit)
            else:
                self._file(found, found.unit)
        except FileNotFoundError:
            return
        except Refused as error:
            self.result.refused.add(str(error))
        except OSError as error:
            self.result.failed.add(problem_text(error, found.path))

    def _is_selected(self, found: Found, totals: Totals) -> bool:
        sign = writing_sign(found.path, totals)
        if sign is not None:
            raise _BeingWritten(sign)
        if totals.use is not None:
            self.result.kept_in_use += 1
            return False
        return isinstance(found.unit, Housekeeping) or self.cut.selects(totals.newest_use_ns, totals.disk_bytes)

    def _file(self, found: Found, unit: FileEntry | Housekeeping) -> None:
        if not self._is_selected(found, look_into(found, self._usage())):
            return
        names = [found.name]
        if isinstance(unit, FileEntry) and unit.first is not None:
            names.insert(0, first_of(found.name, unit))
        with contextlib.ExitStack() as stack:
            if isinstance(unit, Housekeeping) and unit.is_lock and not _take(found, stack):
                self.result.kept_in_use += 1
                return
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._unlink(found.parent, name, regular(found.parent, name))
        self.result.entries += isinstance(unit, FileEntry)

    def _folder(self, found: Found, unit: FolderEntry | None) -> None:
        parent, name = found.parent, found.name
        with parent.open(name) as entry:
            totals = Totals()
            look_into_folder(entry, unit, self._usage(), totals)
            if unit is not None:
                if not self._is_selected(found, totals):
                    return
                name = _rename_away(parent, name, entry)
            self._empty(entry, unit is None or unit.has_links)
        os.rmdir(name, dir_fd=parent.fd)
        self.result.entries += unit is not None

    def _empty(self, folder: Folder, links: bool) -> None:
        for item in folder.items():
            if self.should_stop():
                raise _Stopped
            try:
                facts = folder.facts(item.name)
                folder.check(facts, folder.below(item.name))
                if stat.S_ISDIR(facts.st_mode):
                    with folder.open(item.name) as inner:
                        self._empty(inner, links)
                    os.rmdir(item.name, dir_fd=folder.fd)
                elif stat.S_ISREG(facts.st_mode):
                    self._unlink(folder, item.name, facts)
                elif stat.S_ISLNK(facts.st_mode) and links:
                    os.unlink(item.name, dir_fd=folder.fd)
                else:
                    raise Refused(f"{folder.below(item.name)} is a link or no regular file")
            except FileNotFoundError:
                continue
            except Refused as error:
                self.result.refused.add(str(error))

    def _unlink(self, folder: Folder, name: str, facts: os.stat_result) -> None:
        os.unlink(name, dir_fd=folder.fd)
        self.result.files += 1
        self.result.freed_bytes += facts.st_blocks * 512 if facts.st_nlink == 1 else 0
        self.tick(1)


def _rename_away(parent: Folder, name: str, entry: Folder) -> str:
    """Gives an entry a name that no tool looks for; raises Refused where it is another folder by now."""
    gone = f".dsv4c-removed-{secrets.token_hex(8)}"
    os.rename(name, gone, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
    if not os.path.samestat(parent.facts(gone), os.fstat(entry.fd)):
        with contextlib.suppress(OSError):
            os.rename(gone, name, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        raise Refused(f"{parent.below(name)} was replaced meanwhile")
    return gone


def _drop_empty(folder: Folder, name: str) -> None:
    """Folders above entries go with the last of them."""
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=folder.fd)


@contextmanager
def _locks(folder: Folder, layout: Layout) -> Iterator[None]:
    """Raises _BeingWritten where a tool holds a lock of the cache; keeps the lock of a whole cache meanwhile."""
    with contextlib.ExitStack() as stack:
        units = [unit for unit in layout.housekeeping if unit.is_lock]
        for found in find_entries(folder, units):
            if isinstance(found.unit, Housekeeping):
                with contextlib.ExitStack() as probe:
                    if not _take(found, probe):
                        raise _BeingWritten(f"{found.path} is locked")
                    if found.unit.stays:
                        stack.push(probe.pop_all())
        yield


def _take(found: Found, stack: contextlib.ExitStack) -> bool:
    """Takes a tool's lock until the stack ends; False where somebody has it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(found.name, flags, dir_fd=found.parent.fd)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        # It is gone, or the file system has no such locks: who holds one has the file open.
    return True
