"""The folder in which kernels are compiled, in the temporary folder; those that killed builds left are removed.

A folder has a file on which its process holds a lock. What has the name, this user as owner, and that file without a
lock, is of a process that is no more.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dsv4c-kernels-"
LOCK = ".lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that goes with the block."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, _locked(Path(name)):
        yield Path(name)


def remove_abandoned(parent: Path) -> None:
    """Removes the folders in `parent` whose processes were killed. Of what cannot be removed nothing is said."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if folder.name.startswith(PREFIX):
                _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It follows no links.
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # Without locks in this file system the folder is one that nobody else removes.
        with contextlib.suppress(OSError):
            new = folder / f"{LOCK}.new"
            lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody sees it without its lock.
            new.rename(folder / LOCK)
        yield
