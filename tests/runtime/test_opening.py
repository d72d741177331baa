"""Opening an engine: what it reads, where it may lie, what it leaves behind."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4c.engine.reader import read_engine
from dsv4c.engine.writer import EngineParts, write_engine
from dsv4c.errors import EngineFormatError
from dsv4c.runtime.engine import Engine
from tests.runtime.hand_engine import hand_parts, plan_section
from tests.runtime.hand_engine import write_engine as write_hand_engine

ROOT = Path(__file__).parents[2]
STEP = """
import sys
from dsv4c.runtime import Engine
with Engine.open(sys.argv[1], threads=1) as engine:
    print(list(engine.generate([3, 1, 4], 6)))
"""


def zeros(size: int) -> Iterator[memoryview]:
    block = memoryview(bytes(1 << 20))
    for start in range(0, size, len(block)):
        yield block[: size - start]


def write_big_engine(path: Path, weight_bytes: int, *, split: bool = False) -> Path:
    """The hand-made plan in an engine with `weight_bytes` of weights, all zero."""
    parts = hand_parts()
    parts.plan_header["weight_bytes"] = weight_bytes
    engine = EngineParts("cpu", {}, plan_section(parts), {}, None, weight_bytes)
    write_engine(path, engine, zeros(weight_bytes), split_weights=split)
    return path


def io_counter(name: str) -> int:
    found = re.search(rf"^{name}: (\d+)", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    assert found
    return int(found[1])


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssFile:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc: what a process reads cannot be seen")
@pytest.mark.parametrize("split", [False, True], ids=["inside", "split"])
def test_opening_touches_no_weight(tmp_path: Path, split: bool) -> None:
    """Neither by reading nor by touching mapped pages; so the time of opening does not depend on the weights."""
    small = write_big_engine(tmp_path / "small.dsv4c", 1 << 20, split=split)
    big = write_big_engine(tmp_path / "big.dsv4c", 96 << 20, split=split)
    Engine.open(small).close()  # loads the library
    resident, read = resident_file_bytes(), io_counter("rchar")
    with Engine.open(big, threads=1) as engine:
        assert engine.info.weight_bytes == 96 << 20
        assert resident_file_bytes() - resident < 4 << 20
        assert io_counter("rchar") - read < 4 << 20
        engine.verify_weights()
        assert resident_file_bytes() - resident > 90 << 20


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below a folder with mode, size and time of change."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            status = os.lstat(Path(root) / name)
            found[str(Path(root) / name)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Takes the write permission of a folder and its files, until the test is over."""
    changed: list[Path] = []

    def forbid(folder: Path) -> None:
        for path in [*folder.rglob("*"), folder]:
            changed.append(path)
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))

    yield forbid
    for path in reversed(changed):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.mark.parametrize("split", [False, True], ids=["inside", "split"])
def test_nothing_is_written_anywhere(tmp_path: Path, read_only: Callable[[Path], None], split: bool) -> None:
    """Folders before and after a run in a process of its own, from a read-only folder."""
    folders = {name: tmp_path / name for name in ("engine", "cwd", "home", "tmp")}
    for folder in folders.values():
        folder.mkdir()
    path = folders["engine"] / "hand.dsv4c"
    parts = hand_parts()
    if split:
        parts.external_name = "hand.weights"
        (folders["engine"] / "hand.weights").write_bytes(parts.weights)
    write_hand_engine(path, parts)
    for folder in folders.values():
        read_only(folder)
    before = tree(tmp_path)
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    places = {name: str(folders["tmp" if name == "TMPDIR" else "home"]) for name in names}
    environment = {**os.environ, **places, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", STEP, str(path)]
    result = subprocess.run(
        command, cwd=folders["cwd"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)) == 6
    assert tree(tmp_path) == before


def test_sixteen_processes_at_once(tmp_path: Path) -> None:
    path = write_hand_engine(tmp_path / "hand.dsv4c")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEP, str(path)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 16
    assert len(set(printed)) == 1 and printed[0].startswith("[")
    assert os.listdir(tmp_path) == ["hand.dsv4c"]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="AddressSanitizer keeps freed memory for a while")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc: leaks cannot be seen")
def test_a_thousand_cycles_leak_nothing(tmp_path: Path) -> None:
    path = write_hand_engine(tmp_path / "hand.dsv4c")
    bad = tmp_path / "bad.dsv4c"
    bad.write_bytes(path.read_bytes()[:-1])

    def cycle(index: int) -> None:
        with Engine.open(path, threads=2) as engine, engine.session(slots=2) as session:
            session.step([1, 2, 3], [0, 0, 1], [0, 1, 0])
            session.restore(1, session.save(0))
        if index % 10 == 0:
            with pytest.raises(EngineFormatError, match="its header says"):
                Engine.open(bad)

    for index in range(100):  # pools of the allocators fill up
        cycle(index)
    files, maps, memory = open_files(), len(Path("/proc/self/maps").read_text().splitlines()), anonymous_bytes()
    for index in range(1000):
        cycle(index)
    assert open_files() == files
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 20
    # A kilobyte a cycle would be a megabyte.
    assert anonymous_bytes() - memory < 1 << 20


def test_a_path_that_would_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EngineFormatError, match="is not a regular file"):
        Engine.open(tmp_path / "pipe")
    with pytest.raises(EngineFormatError, match="is not a regular file"):
        read_engine(tmp_path / "pipe")
