"""The cubin cache: keys, damage, other processes, folders of no use, and pruning that touches nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4c.cubin_cache import LOCK, MARKER, MARKER_TEXT, CachedCubin, CubinCache, Usage, cache_key, default_folder
from dsv4c.errors import Dsv4cError

KEY = cache_key({"source": "a"})
OTHER = cache_key({"source": "b"})
FACTS = {"symbol": "rms_norm", "registers": 40}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_key_tells_types_apart() -> None:
    values: list[object] = [1, 1.0, "1", None, [1], ["1"]]
    assert len({cache_key({"constants": value}) for value in values}) == len(values)
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})
    # Kept between versions: an accidental change of the key would be a silent cold build.
    assert KEY == "869aedc48c1b6b13c8b511d878726c4d28ed56ca63fcf72806315675ee33792f"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"DSV4C_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"DSV4C_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/dsv4c/cubins"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/dsv4c/cubins"),
        ({"HOME": "/c"}, "/c/.cache/dsv4c/cubins"),
        ({}, None),
    ],
)
def test_folder(environment: dict[str, str], folder: str | None) -> None:
    assert default_folder(environment) == (folder and Path(folder))


def test_what_is_put_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cubins"
    cache = CubinCache(folder)
    assert cache.get(KEY) is None and not folder.exists()
    cache.put(KEY, b"machine code", FACTS)
    assert CubinCache(folder).get(KEY) == CachedCubin(b"machine code", FACTS)
    assert cache.get(OTHER) is None and cache.warning is None
    assert files(folder) == {MARKER, LOCK, f"{KEY[:2]}/{KEY}.cubin", f"{KEY[:2]}/{KEY}.json"}
    assert (folder / MARKER).read_text() == MARKER_TEXT == "dsv4c cubin cache 1\n"
    assert cache.usage().entries == 1


def test_no_folder_keeps_nothing() -> None:
    cache = CubinCache(None)
    cache.put(KEY, b"machine code", FACTS)
    assert cache.get(KEY) is None and cache.warning is None
    assert cache.usage() == cache.prune() == Usage(0, 0, 0)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("cubin", b"machine cod"),
        ("cubin", b"machine c0de"),
        ("cubin", None),
        ("json", b""),
        ("json", b'{"sha256": "'),
        ("json", b"[]"),
        ("json", b"{}"),
        ("json", b"\xff"),
        ("json", None),
    ],
)
def test_damaged_entry_is_dropped(tmp_path: Path, suffix: str, content: bytes | None) -> None:
    cache = CubinCache(tmp_path)
    cache.put(KEY, b"machine code", FACTS)
    cache.put(OTHER, b"other code", FACTS)
    path = tmp_path / KEY[:2] / f"{KEY}.{suffix}"
    path.unlink() if content is None else path.write_bytes(content)
    assert cache.get(KEY) is None
    assert not (tmp_path / KEY[:2] / f"{KEY}.json").exists()
    cache.put(KEY, b"machine code", FACTS)
    assert cache.get(KEY) == CachedCubin(b"machine code", FACTS) and cache.get(OTHER) is not None


def test_truncated_record_with_whole_image(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path)
    cache.put(KEY, b"machine code", FACTS)
    path = tmp_path / KEY[:2] / f"{KEY}.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert cache.get(KEY) is None
        cache.put(KEY, b"machine code", FACTS)


@pytest.mark.parametrize("obstacle", ["file", "foreign", "newer", "read-only"])
def test_folder_that_cannot_be_used(tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cubins"
    if obstacle == "file":
        folder.write_text("not a folder")
    else:
        folder.mkdir()
        if obstacle == "foreign":
            (folder / "thesis.txt").write_text("mine")
        elif obstacle == "newer":
            (folder / MARKER).write_text("dsv4c cubin cache 2\n")
        else:
            CubinCache(folder).put(OTHER, b"other code", FACTS)
            # As root, file modes stop nothing.
            monkeypatch.setattr(Path, "write_bytes", _read_only)
    before = files(tmp_path)
    cache = CubinCache(folder)
    cache.put(KEY, b"machine code", FACTS)
    cache.put(KEY, b"machine code", FACTS)
    assert cache.get(KEY) is None
    assert cache.warning is not None and str(folder) in cache.warning
    assert files(tmp_path) - before <= {f"cubins/{LOCK}"} and (obstacle != "foreign" or files(tmp_path) == before)
    assert (cache.get(OTHER) is not None) == (obstacle == "read-only")
    if obstacle in ("foreign", "newer"):
        with pytest.raises(Dsv4cError, match="cannot prune"):
            cache.prune()
        assert before <= files(tmp_path)


def _read_only(path: Path, content: bytes) -> int:
    raise OSError(30, "Read-only file system", str(path))


WRITER = """
import sys
from pathlib import Path
from dsv4c.cubin_cache import CubinCache, cache_key
cache = CubinCache(Path(sys.argv[1]))
sys.stdin.readline()
for round in range(40):
    for number in range(8):
        key = cache_key({"number": number})
        found = cache.get(key)
        assert found is None or found.cubin == bytes([number]) * 5000, key
        cache.put(key, bytes([number]) * 5000, {"number": number})
assert cache.warning is None, cache.warning
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    """They even make the folder together."""
    folder = tmp_path / "cubins"
    command = [sys.executable, "-c", WRITER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(2)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    cache = CubinCache(folder)
    assert cache.usage() == Usage(8, 16, cache.usage().size_bytes)
    for number in range(8):
        assert cache.get(cache_key({"number": number})) is not None


def test_prune_takes_the_oldest_and_only_its_own(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{OTHER}.cubin").write_bytes(b"not ours")
    folder = tmp_path / "cubins"
    cache = CubinCache(folder)
    keys = [cache_key({"number": number}) for number in range(3)]
    for age, key in enumerate(keys):
        cache.put(key, bytes(1000), {})
        for suffix in ("json", "cubin"):
            os.utime(folder / key[:2] / f"{key}.{suffix}", (100 + age, 100 + age))
    foreign = {"notes.txt", f"{keys[0][:2]}/notes.txt", "zz/" + KEY + ".cubin", f"ff/{'0' * 64}.cubin"}
    for name in foreign:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / OTHER[:2]).symlink_to(outside)
    partial = folder / keys[0][:2] / f".{keys[0]}.123.partial"
    partial.write_bytes(bytes(10))

    assert cache.get(keys[0]) is not None  # used now: the youngest
    whole = cache.usage()
    assert whole.entries == 3 and whole.files == 7
    planned = cache.prune(1500, dry_run=True)
    assert cache.usage() == whole and partial.exists()
    removed = cache.prune(1500)
    assert removed == planned and (removed.entries, removed.files) == (2, 5)
    assert [cache.get(key) is not None for key in keys] == [True, False, False]
    assert cache.prune() == Usage(1, 2, whole.size_bytes - removed.size_bytes)
    assert cache.usage() == Usage(0, 0, 0)
    assert files(folder) == {MARKER, LOCK, *foreign}
    assert files(outside) == {f"{OTHER}.cubin"}


def test_altered_facts_are_a_miss(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.put(KEY, b"image", {"symbol": "kernel"})
    (record,) = tmp_path.rglob(f"{KEY}.json")
    whole = record.read_text()
    for altered in (whole.replace('"kernel"', '"other"'), "[" * 200_000, "{}", ""):
        record.write_text(altered)
        assert cache.get(KEY) is None
        cache.put(KEY, b"image", {"symbol": "kernel"})
    assert cache.get(KEY) is not None


def test_the_home_folder_in_the_variable() -> None:
    assert default_folder({"DSV4C_CACHE_DIR": "~/x", "HOME": "/home/me"}) == Path("/home/me/x")
