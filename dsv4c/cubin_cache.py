"""Compiled kernels kept between builds, by content: the key is a digest of all that decides the machine code.

The folder holds a marker, so that it is recognised before anything in it is removed, and for each key
`<2 hex>/<64 hex>.cubin` with `<64 hex>.json` beside it: the image's digest and what was recorded of the kernel. The
second is written last, and an image without it, or one that it does not describe, counts as absent. Temporaries
`.<64 hex>.<pid>.partial` are renamed into place. Writers share the lock on `.lock`, pruning has it alone.

A folder that cannot be used is no error: the cache then says so in `warning` and keeps nothing.
"""

import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsv4c.errors import Dsv4cError

MARKER = "DSV4C_CUBIN_CACHE"
MARKER_TEXT = "dsv4c cubin cache 1\n"
LOCK = ".lock"
# In every key: another number makes every earlier entry unused.
FORMAT = 1

_KEY = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(r"([0-9a-f]{64})\.(?:cubin|json)")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.\d+\.partial")
_SHARD = re.compile(r"[0-9a-f]{2}")

# A key has one temporary in a process; within one, threads take turns.
_writing = threading.Lock()


def cache_key(facts: Mapping[str, object]) -> str:
    """64 hex digits over `facts` (what JSON can say, types included) and the version of the format."""
    text = json.dumps({"cubin_cache": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def default_folder(environment: Mapping[str, str]) -> Path | None:
    """$DSV4C_CACHE_DIR, or `dsv4c/cubins` below $XDG_CACHE_HOME or ~/.cache; None where there is no home folder."""
    if chosen := environment.get("DSV4C_CACHE_DIR"):
        return Path(os.path.join(environment.get("HOME", "~"), chosen[2:]) if chosen.startswith("~/") else chosen)
    shared = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(shared):  # as its specification says: ignore a relative one
        home = environment.get("HOME", "")
        if not os.path.isabs(home):
            return None
        shared = os.path.join(home, ".cache")
    return Path(shared) / "dsv4c" / "cubins"


def default_cache() -> "CubinCache":
    """This user's."""
    return CubinCache(default_folder(os.environ))


@dataclass(frozen=True)
class CachedCubin:
    cubin: bytes
    facts: dict[str, object]


@dataclass(frozen=True)
class Usage:
    """What the cache holds, or what pruning removed."""

    entries: int
    files: int
    size_bytes: int


class CubinCache:
    """The store in `folder`; with None it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.warning: str | None = None
        self._writable = folder is not None

    def get(self, key: str) -> CachedCubin | None:
        """The entry, if it is whole. A damaged one is dropped."""
        if self.folder is None:
            return None
        cubin_path, json_path = self._paths(key)
        try:
            record = json_path.read_bytes()
        except OSError:
            return None
        found = _read_entry(cubin_path, record)
        try:
            if found is None:
                json_path.unlink()
                cubin_path.unlink()
            else:
                os.utime(json_path)  # pruning removes what was not used for longest
        except OSError:
            pass  # somebody else's folder, or gone meanwhile
        return found

    def put(self, key: str, cubin: bytes, facts: Mapping[str, object]) -> None:
        """Keeps an image. Where that fails, `warning` says why, and nothing more is tried."""
        if self.folder is None or not self._writable:
            return
        cubin_path, json_path = self._paths(key)
        record = {"sha256": _digest(cubin, facts), "size_bytes": len(cubin), "facts": dict(facts)}
        try:
            with _writing, self._locked(fcntl.LOCK_SH):
                cubin_path.parent.mkdir(exist_ok=True)
                _write(cubin_path, key, cubin)
                _write(json_path, key, json.dumps(record, sort_keys=True).encode())
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._give_up(f"{error.strerror or error}{where}")
        except _NotACacheError as error:
            self._give_up(str(error))

    def usage(self) -> Usage:
        return _sum(self._files())

    def prune(self, keep_bytes: int = 0, *, dry_run: bool = False) -> Usage:
        """Removes what was not used for longest until at most `keep_bytes` stay; returns what was removed.

        Removes only what the cache itself writes, leftovers of killed builds included, and follows no links. Raises
        Dsv4cError where the folder is not a cache.
        """
        if self.folder is None or not self.folder.is_dir():
            return Usage(0, 0, 0)
        removed: list[tuple[Path, int]] = []
        try:
            with self._locked(fcntl.LOCK_EX):
                ages: dict[str, tuple[float, list[tuple[Path, int]]]] = {}
                for path, stat in self._files():
                    matched = _ENTRY.fullmatch(path.name)
                    name = matched[1] if matched else path.name
                    # No build is writing now: a temporary belongs to none.
                    age, files = ages.get(name, (0.0, []))
                    ages[name] = max(age, stat.st_mtime if matched else 0.0), [*files, (path, stat.st_size)]
                left = sum(size for _, files in ages.values() for _, size in files)
                for age, files in sorted(ages.values(), key=lambda entry: entry[0]):
                    if left <= keep_bytes and age > 0:
                        break
                    for path, size in sorted(files, key=lambda file: file[0].suffix != ".json"):  # the json first
                        if not dry_run:
                            path.unlink()
                        removed.append((path, size))
                        left -= size
        except (_NotACacheError, OSError) as error:
            raise Dsv4cError(f"cannot prune the cubin cache {self.folder}: {error}") from error
        return Usage(
            len({path.stem for path, _ in removed if _ENTRY.fullmatch(path.name)}),
            len(removed),
            sum(size for _, size in removed),
        )

    def _paths(self, key: str) -> tuple[Path, Path]:
        assert self.folder is not None and _KEY.fullmatch(key)
        shard = self.folder / key[:2]
        return shard / f"{key}.cubin", shard / f"{key}.json"

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        """Holds `.lock` of a folder that has the marker, which an empty or new folder gets."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        marker = self.folder / MARKER
        if not marker.exists():
            # Nothing, not even a lock, is put beside somebody's files. (The marker may appear while this looks.)
            names = {child.name for child in self.folder.iterdir()}
            if any(name != LOCK and not _PARTIAL.fullmatch(name) for name in names):
                _require_marker(self.folder)
        descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not marker.exists():
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not marker.exists():
                    _write(marker, "0" * 64, MARKER_TEXT.encode())
            _require_marker(self.folder)
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The cache's own files below the folder, with lstat's answer."""
        if self.folder is None or not self.folder.is_dir():
            return []
        found = []
        for shard in sorted(self.folder.iterdir()):
            if not _SHARD.fullmatch(shard.name) or shard.is_symlink() or not shard.is_dir():
                continue
            for path in sorted(shard.iterdir()):
                entry = _ENTRY.fullmatch(path.name)
                ours = entry[1].startswith(shard.name) if entry else _PARTIAL.fullmatch(path.name)
                if ours and not path.is_symlink() and path.is_file():
                    found.append((path, path.lstat()))
        return found

    def _give_up(self, reason: str) -> None:
        self._writable = False
        self.warning = f"compiled kernels are not kept: the cubin cache {self.folder} cannot be written: {reason}"


class _NotACacheError(Exception):
    pass


def _require_marker(folder: Path) -> None:
    try:
        text = (folder / MARKER).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _NotACacheError("the folder holds other files") from None
    if text != MARKER_TEXT:
        raise _NotACacheError(f"its {MARKER} is of another version")


def _read_entry(cubin_path: Path, record: bytes) -> CachedCubin | None:
    try:
        cubin = cubin_path.read_bytes()
        described = json.loads(record)
        facts = described["facts"]
        whole = described["size_bytes"] == len(cubin) and described["sha256"] == _digest(cubin, facts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CachedCubin(cubin, facts) if whole else None


def _digest(cubin: bytes, facts: Mapping[str, object]) -> str:
    """Over the image and over what is said of it: an engine takes both."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode() + b"\0" + cubin).hexdigest()


def _write(path: Path, key: str, content: bytes) -> None:
    partial = path.with_name(f".{key}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _sum(files: list[tuple[Path, os.stat_result]]) -> Usage:
    entries = {path.stem for path, _ in files if path.suffix == ".json"}
    return Usage(len(entries), len(files), sum(stat.st_size for _, stat in files))
