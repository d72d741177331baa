"""Which files other processes have open, mapped or locked, from /proc."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

Inode = tuple[int, int]  # device, inode


@dataclass(frozen=True)
class Use:
    """`writes`: open for writing, or locked."""

    how: str
    writes: bool


@dataclass(frozen=True)
class Usage:
    """What was in use at one moment, as far as this user may see: files of other users' processes are not listed."""

    inodes: dict[Inode, Use]

    def of(self, facts: os.stat_result) -> Use | None:
        return self.inodes.get((facts.st_dev, facts.st_ino))


def usage_now(folders: Iterable[str], proc: Path = PROC) -> Usage:
    """Files and folders that are in use. Mappings are looked for below `folders` only, which must be real paths."""
    inodes: dict[Inode, Use] = {}
    below = tuple(f"{folder}/" for folder in folders)
    own = str(os.getpid())
    try:
        processes = [name for name in os.listdir(proc) if name.isdecimal() and name != own]
    except OSError:
        return Usage({})
    for process in processes:
        try:
            _add_process(inodes, proc / process, process, below)
        except OSError:
            continue  # another user's, or it ended meanwhile
    _add_locks(inodes, proc)
    return Usage(inodes)


def _add_process(inodes: dict[Inode, Use], folder: Path, process: str, below: tuple[str, ...]) -> None:
    who = f"process {process} ({_command(folder)})"
    for number in os.listdir(folder / "fd"):
        with contextlib.suppress(OSError):
            facts = os.stat(folder / "fd" / number)
            writes = _opened_for_writing(folder / "fdinfo" / number)
            _add(inodes, (facts.st_dev, facts.st_ino), Use(f"open in {who}", writes))
    with contextlib.suppress(OSError):
        facts = os.stat(folder / "cwd")
        _add(inodes, (facts.st_dev, facts.st_ino), Use(f"current folder of {who}", writes=False))
    with contextlib.suppress(OSError), open(folder / "maps", "rb") as maps:
        for path in {line.split(None, 5)[5].rstrip(b"\n") for line in maps if b"/" in line}:
            name = os.fsdecode(path)
            if name.startswith(below):
                with contextlib.suppress(OSError):
                    # The device in `maps` is not that of `stat` on some file systems.
                    facts = os.stat(_unescaped(name), follow_symlinks=False)
                    _add(inodes, (facts.st_dev, facts.st_ino), Use(f"mapped in {who}", writes=False))


def _add(inodes: dict[Inode, Use], inode: Inode, use: Use) -> None:
    if inode not in inodes or (use.writes and not inodes[inode].writes):
        inodes[inode] = use


def _command(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


def _opened_for_writing(path: Path) -> bool:
    found = re.search(r"^flags:\s*([0-7]+)$", path.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return found is not None and int(found[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _unescaped(path: str) -> str:
    """`maps` writes line feeds in octal."""
    return path.replace("\\012", "\n")


def _add_locks(inodes: dict[Inode, Use], proc: Path) -> None:
    try:
        text = (proc / "locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return
    own = str(os.getpid())
    for process, major, minor, inode in re.findall(
        r"^\d+: (?:FLOCK|POSIX|OFDLCK)\s+\S+\s+(?:READ|WRITE)\s+(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+)",
        text,
        re.MULTILINE,
    ):
        if process != own:
            device = os.makedev(int(major, 16), int(minor, 16))
            _add(inodes, (device, int(inode)), Use(f"locked by process {process}", writes=True))
