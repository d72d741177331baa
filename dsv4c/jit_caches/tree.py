"""Walking folders by their descriptors: no symbolic link is followed, no mount crossed, no path resolved twice."""

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dsv4c.jit_caches.usage import Usage, Use

# Deeper than any tool nests; every level holds a descriptor.
_MAX_DEPTH = 48
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# In 2106. File systems have later times, which 64 bits of nanoseconds have not.
_LATEST_NS = (1 << 32) * 10**9


class Refused(Exception):
    """Something that is not to be touched; the text says why, and where."""


@dataclass(frozen=True)
class Folder:
    """An open folder of a cache, and its path below the cache's own folder."""

    fd: int
    path: str  # empty for the cache's own folder
    root: "Root"

    @property
    def depth(self) -> int:
        return self.path.count("/") + 1 if self.path else 0

    def below(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def items(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.fd) as found:
            yield from found

    def facts(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def check(self, facts: os.stat_result, path: str) -> None:
        """Raises Refused for what belongs to somebody else or lies on another file system."""
        if facts.st_uid != self.root.owner:
            raise Refused(f"{path} belongs to user {facts.st_uid}")
        if facts.st_dev != self.root.device or path in self.root.mounts:
            raise Refused(f"{path} is a mount")

    @contextmanager
    def open(self, name: str) -> Iterator["Folder"]:
        """A folder in this one. Raises Refused, or OSError where it cannot be opened or is a link by now."""
        if self.depth >= _MAX_DEPTH:
            raise Refused(f"{self.below(name)} is nested too deeply")
        fd = os.open(name, _OPEN_FOLDER, dir_fd=self.fd)
        try:
            folder = Folder(fd, self.below(name), self.root)
            folder.check(os.fstat(fd), folder.path)
            yield folder
        finally:
            os.close(fd)

    def head(self, name: str) -> bytes:
        """The first megabyte of a file in this folder; none of what is no file. Reading it is no use of it."""
        try:
            fd = _open_quietly(name, self.fd)
        except OSError:
            return b""
        with open(fd, "rb") as file:
            return file.read(1 << 20) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


def _open_quietly(name: str, folder: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(name, flags | os.O_NOATIME, dir_fd=folder)
    except PermissionError:
        return os.open(name, flags, dir_fd=folder)


@dataclass(frozen=True)
class Root:
    """The cache's own folder: whose it is, on which file system, and the mounts below it."""

    path: str
    owner: int
    device: int
    mounts: frozenset[str]


@contextmanager
def open_root(path: str) -> Iterator[Folder]:
    """Raises OSError: ELOOP or ENOTDIR where it is a symbolic link or no folder."""
    fd = os.open(path, _OPEN_FOLDER)
    try:
        facts = os.fstat(fd)
        yield Folder(fd, "", Root(path, facts.st_uid, facts.st_dev, _mounts_below(path)))
    finally:
        os.close(fd)


def _mounts_below(path: str) -> frozenset[str]:
    """Mounts of the same file system as well, which have its device number."""
    prefix = os.path.realpath(path).rstrip("/") + "/"
    found = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            mount = _octal(line.split(" ")[4])
            if mount.startswith(prefix):
                found.add(mount.removeprefix(prefix))
    return frozenset(found)


def _octal(text: str) -> str:
    """mountinfo writes spaces, tabs, line feeds and backslashes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


@dataclass
class Totals:
    """What an entry holds. Bytes are those on disk; a file with several names counts once."""

    files: int = 0
    disk_bytes: int = 0
    apparent_bytes: int = 0
    newest_use_ns: int = 0  # the later of access and modification; access times may be a day late
    newest_write_ns: int = 0
    use: Use | None = None
    linked: set[int] = field(default_factory=set)

    def add(self, facts: os.stat_result, usage: Usage) -> None:
        self.files += 1
        self.newest_use_ns = max(self.newest_use_ns, min(facts.st_atime_ns, _LATEST_NS))
        self.add_time(facts.st_mtime_ns)
        self.note(facts, usage)
        if facts.st_nlink > 1:
            if facts.st_ino in self.linked:
                return
            self.linked.add(facts.st_ino)
        self.disk_bytes += facts.st_blocks * 512
        self.apparent_bytes += facts.st_size

    def add_time(self, write_ns: int) -> None:
        write_ns = min(write_ns, _LATEST_NS)
        self.newest_use_ns = max(self.newest_use_ns, write_ns)
        self.newest_write_ns = max(self.newest_write_ns, write_ns)

    def note(self, facts: os.stat_result, usage: Usage) -> None:
        use = usage.of(facts)
        if use is not None and (self.use is None or (use.writes and not self.use.writes)):
            self.use = use
