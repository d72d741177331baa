"""Writing and reading an engine file: layout, sealing, and what is left behind when it does not work."""

import fcntl
import hashlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4c.engine.format import CHUNK_BYTES, SECTION_ALIGN, SectionType
from dsv4c.engine.reader import is_engine, read_engine
from dsv4c.engine.writer import EngineParts, check_space, write_engine
from dsv4c.errors import EngineFormatError

WEIGHTS = b"".join(bytes([i % 251]) * 1000 for i in range(CHUNK_BYTES // 1000 * 2 + 777))


def parts(**changes: object) -> EngineParts:
    values: dict[str, object] = {
        "arch": "cpu",
        "manifest": {"model": "none"},
        "plan": b"p" * 5000,
        "tokenizer_files": {"tokenizer.json": "{}"},
        "goldens": None,
        "weight_bytes": len(WEIGHTS),
    }
    return EngineParts(**(values | changes))  # type: ignore[arg-type]


def blocks() -> Iterator[bytes]:
    for start in range(0, len(WEIGHTS), 700_001):
        yield WEIGHTS[start : start + 700_001]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "e.dsv4c"
    write_engine(path, parts(goldens={"steps": []}), blocks())
    reader = read_engine(path)
    reader.verify_sections()
    reader.verify_weights()
    assert reader.arch == "cpu" and is_engine(path)
    assert reader.manifest == {"model": "none"}
    assert reader.tokenizer_files == {"tokenizer.json": "{}"}
    assert reader.goldens == {"steps": []}
    weights = reader.sections[SectionType.WEIGHTS]
    assert path.read_bytes()[weights.offset : weights.offset + weights.size] == WEIGHTS
    assert all(entry.offset % SECTION_ALIGN == 0 for entry in reader.sections.values())
    assert reader.chunks.chunk_count == 3
    digests = reader.section(SectionType.CHUNKS)[-96:]
    assert digests[:32] == hashlib.sha256(WEIGHTS[:CHUNK_BYTES]).digest()


def test_goldens_lie_outside_the_digest(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    write_engine(a, parts(goldens={"steps": [1]}), blocks())
    write_engine(b, parts(goldens={"steps": [2]}), blocks())
    write_engine(c, parts(goldens={"steps": [1]}, manifest={"model": "other"}), blocks())
    assert read_engine(a).digest == read_engine(b).digest != read_engine(c).digest


def test_split_weights(tmp_path: Path) -> None:
    path = tmp_path / "e.dsv4c"
    write_engine(path, parts(), blocks(), split_weights=True)
    weights = read_engine(path).weights_path()
    assert weights.read_bytes() == WEIGHTS and weights.name.startswith("e.dsv4c.")
    read_engine(path).verify_weights()
    weights.write_bytes(WEIGHTS[:-1])
    with pytest.raises(EngineFormatError, match="ends within the weights"):
        read_engine(path).verify_weights()
    weights.unlink()
    with pytest.raises(EngineFormatError, match="is missing"):
        read_engine(path).verify_weights()


def test_split_weights_are_named_by_their_contents(tmp_path: Path) -> None:
    path = tmp_path / "e.dsv4c"
    write_engine(path, parts(), blocks(), split_weights=True)
    first = read_engine(path).weights_path()
    # Another plan over the same weights keeps the file; other weights never take its name.
    write_engine(path, parts(plan=b"q" * 5000), blocks(), split_weights=True)
    assert read_engine(path).weights_path() == first
    write_engine(tmp_path / "other", parts(weight_bytes=3), [b"abc"], split_weights=True)
    write_engine(path, parts(weight_bytes=3), [b"abd"], split_weights=True)
    assert len({read_engine(p).weights_path() for p in (path, tmp_path / "other")} | {first}) == 3


def test_weights_name_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="more than 63"):
        write_engine(tmp_path / ("e" * 60), parts(), blocks(), split_weights=True)
    assert list(tmp_path.iterdir()) == []


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="GB free; the engine needs"):
        check_space(tmp_path / "e.dsv4c", 1 << 60)


def in_child(function: object, *args: object) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=function, args=args)  # type: ignore[arg-type]
    child.start()
    return child


def write_with_a_file_size_limit(path: Path, split: bool) -> None:
    # Stands for a disk that fills up: writes past the limit fail.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
    try:
        write_engine(path, parts(), blocks(), split_weights=split)
    except EngineFormatError as error:
        os._exit(0 if "cannot write" in error.message else 1)
    os._exit(2)


@pytest.mark.parametrize("split", [False, True])
def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path, split: bool) -> None:
    child = in_child(write_with_a_file_size_limit, tmp_path / "e.dsv4c", split)
    child.join()
    assert child.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def write_slowly(path: Path) -> None:
    def slow() -> Iterator[bytes]:
        for block in blocks():
            time.sleep(0.2)
            yield block

    write_engine(path, parts(), slow())


def test_a_killed_build_leaves_no_engine_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "e.dsv4c"
    child = in_child(write_slowly, path)
    partial = tmp_path / ".e.dsv4c.partial"
    deadline = time.monotonic() + 20
    while not (partial.exists() and partial.stat().st_size > 1_000_000):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(EngineFormatError, match="another build is writing"):
        write_engine(path, parts(), blocks())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert not path.exists() and not is_engine(partial)
    write_engine(path, parts(), blocks())
    read_engine(path).verify_weights()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("split", [False, True])
def test_an_interrupt_leaves_nothing(tmp_path: Path, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any call of the system, also between making a file and having it."""
    for moment in range(100):
        calls = 0

        def interrupting(function: Any, moment: int = moment) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal calls
                result = function(*args, **named)
                calls += 1
                if calls == moment + 1:
                    raise KeyboardInterrupt
                return result

            return call

        with monkeypatch.context() as patched:
            for module, name in ((os, "open"), (os, "fdopen"), (os, "fstat"), (os, "fsync"), (fcntl, "flock")):
                patched.setattr(module, name, interrupting(getattr(module, name)))
            try:
                write_engine(tmp_path / "e.dsv4c", parts(), blocks(), split_weights=split)
            except KeyboardInterrupt:
                assert list(tmp_path.iterdir()) == [], moment
                continue
        break
    assert 4 <= moment <= 20
