"""The folder of the kernel compilers: gone with its block, and after a kill with the next build."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dsv4c.kernels.scratch import LOCK, PREFIX, remove_abandoned, scratch_folder

HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from dsv4c.kernels.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "0").mkdir()
    (folder / "0" / "file").write_text("text")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", HOLDER, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_gone_with_its_block(parent: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == parent and folder.name.startswith(PREFIX) and (folder / LOCK).is_file()
        (folder / "file").touch()
    assert not list(parent.iterdir())


def test_what_a_killed_build_left_goes_with_the_next_one(parent: Path) -> None:
    killed, left = holder(parent)
    alive, used = holder(parent)
    with killed, alive:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir()
        with scratch_folder() as folder:
            assert set(parent.iterdir()) == {used, folder}
        assert (used / "0" / "file").is_file()
        alive.communicate()
    assert not list(parent.iterdir())


def test_what_is_not_known_to_be_abandoned_stays(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK).touch()
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").touch()
    (parent / f"{PREFIX}young").mkdir()  # has not got its lock yet
    (parent / f"{PREFIX}linked").mkdir()
    (parent / f"{PREFIX}linked" / LOCK).symlink_to(elsewhere / LOCK)
    (parent / "other").mkdir()
    (parent / "other" / LOCK).touch()
    before = set(parent.iterdir())
    remove_abandoned(parent)
    assert set(parent.iterdir()) == before and (elsewhere / LOCK).is_file()
    remove_abandoned(parent / "absent")


def test_links_in_an_abandoned_folder_are_not_followed(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    folder = parent / f"{PREFIX}dead"
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "link").symlink_to(elsewhere)
    remove_abandoned(parent)
    assert not folder.exists() and (elsewhere / "file").is_file()


def test_somebody_elses_folder_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parent / f"{PREFIX}dead"
    folder.mkdir()
    (folder / LOCK).touch()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    remove_abandoned(parent)
    assert folder.is_dir()
