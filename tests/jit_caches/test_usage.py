"""What other processes do with a cache keeps it: open, mapped and locked files, and fresh ones."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import Removal, remove_entries
from dsv4c.jit_caches.report import survey_dict, survey_row
from dsv4c.jit_caches.selection import make_cut
from dsv4c.jit_caches.survey import Survey, survey
from dsv4c.jit_caches.usage import Usage, usage_now
from tests.jit_caches.fake_trees import B51, HEX64, KEY, contents, make_cache, make_older

ALL = make_cut([], 0, None, None)
# As a loaded library: without a descriptor, which Python's own mmap would keep.
MAP = """
import ctypes
libc, fd = ctypes.CDLL(None), os.open(sys.argv[1], os.O_RDONLY)
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mmap(None, 4096, 1, 2, fd, 0)
os.close(fd)
"""


@pytest.fixture
def process() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs Python code in another process, which says that it is ready and then waits."""
    started = []

    def start(code: str, *arguments: str, **options: str) -> "subprocess.Popen[str]":
        text = f"import sys, os, time, fcntl\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=options.get("cwd"),
        )
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in started:
        child.communicate("")


def look(place: Place) -> Survey:
    return survey(place, usage_now([os.path.realpath(place.path)]))


def clean(place: Place) -> Removal:
    return remove_entries(place, ALL)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("held = open(sys.argv[1])", "open"),
        (MAP, "mapped"),
        ("held = os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY)", "open"),
        ("os.chdir(os.path.dirname(sys.argv[1]))", "current folder"),
    ],
    ids=["open", "mapped", "folder", "current folder"],
)
def test_entry_in_use(code: str, how: str, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]) -> None:
    place = make_cache("triton", tmp_path)
    child = process(code, f"{place.path}/{KEY}/k.ptx")
    found = look(place)
    assert found.entries_in_use == 1 and found.in_use is not None and found.in_use.startswith(f"{KEY} is {how}")
    assert f"process {child.pid} (python" in found.in_use
    result = clean(place)
    assert result.kept_in_use == 1 and result.entries == 2 and result.skipped is None
    assert (Path(place.path) / KEY / "k.ptx").exists()
    child.communicate("")
    assert clean(place).entries == 1


@pytest.mark.parametrize(
    "code", ["held = open(sys.argv[1], 'r+')", "held = open(sys.argv[1]); fcntl.flock(held, fcntl.LOCK_SH)"]
)
def test_cache_that_is_being_written(
    code: str, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
) -> None:
    place = make_cache("triton", tmp_path)
    before = contents(Path(place.path))
    child = process(code, f"{place.path}/{KEY}/k.ptx")
    assert (look(place).skipped or "").startswith(f"being written: {KEY} is ")
    child.communicate("")
    assert look(place).skipped is None
    # As `clean` sees it, not only `list`.
    process(code, f"{place.path}/{KEY}/k.ptx")
    kept = clean(place)
    assert kept.skipped is not None and kept.skipped.startswith(f"being written: {KEY} is ")
    assert (Path(place.path) / KEY).exists() and contents(Path(place.path)) <= before


@pytest.mark.parametrize(
    ("kind", "lock"),
    [
        ("inductor", f"locks/c{B51}.lock"),
        ("flashinfer", "0.6.9/90a/cached_ops/tmp/norm.lock"),
        ("deep_gemm", "locks/GROUPED_n4096_k7168_g8.lock"),
        ("sglang", f"cute_aot/{HEX64}/{HEX64}.lock"),
        ("dsv4c", ".lock"),
        ("hf_kernels", f".locks/kernels--org--norm/{HEX64}.lock"),
    ],
)
def test_lock_that_is_held(
    kind: str, lock: str, tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]
) -> None:
    place = make_cache(kind, tmp_path)
    before = contents(Path(place.path))
    child = process("held = open(sys.argv[1]); fcntl.flock(held, fcntl.LOCK_EX)", f"{place.path}/{lock}")
    assert clean(place).skipped == f"being written: {lock} is locked"
    assert contents(Path(place.path)) == before
    child.communicate("")
    assert clean(place).entries > 0


def test_lock_of_dsv4c_is_held_during_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_cache("dsv4c", tmp_path)
    code = "import fcntl, sys\ntry:\n fcntl.flock(open(sys.argv[1]), 6)\nexcept BlockingIOError:\n sys.exit(9)"
    codes = []

    def tick(_: int) -> None:
        codes.append(subprocess.run([sys.executable, "-c", code, f"{place.path}/.lock"], check=False).returncode)

    result = remove_entries(place, ALL, tick)
    assert result.files == 5 and codes == [9] * 5
    assert subprocess.run([sys.executable, "-c", code, f"{place.path}/.lock"], check=False).returncode == 0


def test_fresh_files(tmp_path: Path) -> None:
    place = make_cache("triton", tmp_path)
    path = Path(place.path) / KEY / "k.json"
    path.write_text("new")
    before = contents(Path(place.path))
    assert (look(place).skipped or "").startswith(f"being written: {KEY} was written 0 seconds ago")
    result = clean(place)
    assert result.skipped is not None and (Path(place.path) / KEY).exists()
    assert before - contents(Path(place.path)) <= {name for name in before if not name.startswith(KEY)}
    # A clock that is far ahead is no writer.
    os.utime(path, (time.time() + 86400 * 365,) * 2)
    assert look(place).skipped is None and clean(place).skipped is None


@pytest.mark.parametrize("year", [1900, 2400])
def test_times_far_away(year: int, tmp_path: Path) -> None:
    place = make_cache("triton", tmp_path)
    seconds = (year - 1970) * 31_556_952
    os.utime(Path(place.path) / KEY / "k.json", (seconds, seconds))
    found = look(place)
    assert found.skipped is None and found.entries == 3 and survey_row(found) and survey_dict(found)
    assert clean(place).entries == 3


def test_new_empty_entry(tmp_path: Path) -> None:
    """A tool makes the folder first."""
    place = make_cache("triton", tmp_path)
    (Path(place.path) / ("N" * 52)).mkdir()
    assert "being written" in (look(place).skipped or "")


def test_process_that_writes_while_we_clean(tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]) -> None:
    """A thousand entries come in while the cache is cleaned; all of them are whole in the end."""
    place = make_cache("triton", tmp_path)
    code = """
import threading, itertools
def write():
    for number in itertools.count():
        entry = f"{sys.argv[1]}/{''.join('ABCDEFGHIJ'[int(d)] for d in str(number)):A>52}"
        os.makedirs(entry, exist_ok=True)
        for name in ("k.ptx", "k.json", "__grp__k.json"):
            with open(f"{entry}/{name}.tmp.so", "w") as file:
                file.write("x")
            os.replace(f"{entry}/{name}.tmp.so", f"{entry}/{name}")
        time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
time.sleep(0.3)
"""
    child = process(code, place.path)
    results = [clean(place) for _ in range(20)]
    assert all(result.skipped is not None for result in results)
    assert child.poll() is None, "the writer was not disturbed"
    child.communicate("")


@pytest.mark.parametrize(("minutes", "kept"), [(5, True), (90, False)])
def test_baton_of_a_build(minutes: int, kept: bool, tmp_path: Path) -> None:
    """torch's lock is a file that is there: fresh it means a build, old it is what a crash left."""
    place = make_cache("torch_extensions", tmp_path)
    lock = Path(place.path) / "py311_cu128/ext/lock"
    lock.touch()
    os.utime(lock, (time.time() - 60 * minutes,) * 2)
    assert (look(place).entries_in_use == 1) == kept
    assert (clean(place).kept_in_use == 1) == kept == lock.exists()


def test_ninja_in_the_folder_of_a_stale_baton(tmp_path: Path, process: Callable[..., "subprocess.Popen[str]"]) -> None:
    place = make_cache("torch_extensions", tmp_path)
    folder = Path(place.path) / "py311_cu128/ext"
    (folder / "lock").touch()
    make_older(folder, days=1)
    process("", cwd=str(folder))
    assert clean(place).kept_in_use == 1


def test_processes_that_cannot_be_seen(tmp_path: Path) -> None:
    """Other users' processes, one that ended, and files that are no processes."""
    proc = tmp_path / "proc"
    for name in ("12/fd", "13", "self"):
        (proc / name).mkdir(parents=True)
    (proc / "locks").write_text(
        "1: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 4712 fd:01:99 0 EOF\n"
        f"2: POSIX  ADVISORY  READ {os.getpid()} fd:01:5678 0 EOF\nnonsense\n"
    )
    usage = usage_now([], proc)
    assert list(usage.inodes) == [(os.makedev(0xFD, 1), 1234)]
    assert usage_now([], tmp_path / "absent") == Usage({})


def test_own_files_are_no_use(tmp_path: Path) -> None:
    place = make_cache("triton", tmp_path)
    with open(f"{place.path}/{KEY}/k.ptx"):
        assert look(place).entries_in_use == 0


def test_looking_is_no_use(tmp_path: Path) -> None:
    """`list` must not make entries younger."""
    for kind in ("triton", "inductor", "torch_extensions", "dsv4c", "cuda"):
        place = make_cache(kind, tmp_path)
        before = look(place).newest_use_ns
        assert before == look(place).newest_use_ns and before < time.time_ns() - 86400 * 10**9
