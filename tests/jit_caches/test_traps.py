"""What must not be touched: links, mounts, other people's things, things that change under the hand."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsv4c.jit_caches import removal, tree
from dsv4c.jit_caches.known_layouts import TRITON_LAYOUT
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import Removal, remove_entries
from dsv4c.jit_caches.report import path_text
from dsv4c.jit_caches.selection import make_cut
from dsv4c.jit_caches.survey import Survey, survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import B51, HEX64, KEY, TRITON_ENTRY, contents, make_cache, make_older, write_files

ALL = make_cut([], 0, None, None)
OTHER_KEY = "Z" * 52


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Somebody's home folder."""
    home = tmp_path / "precious"
    write_files(home, ["thesis.tex", f"{KEY}/k.json", f"ab/c{B51}.py", "k.json"])
    make_older(home, days=400)
    return home


@pytest.fixture
def place(tmp_path: Path) -> Place:
    root = tmp_path / "cache"
    write_files(root, [*TRITON_ENTRY, f"{OTHER_KEY}/k.json"])
    make_older(root, days=2)
    return Place("triton", str(root), "test", TRITON_LAYOUT, root.stat().st_uid)


def look(place: Place) -> Survey:
    return survey(place, Usage({}))


def clean(place: Place, **options: Any) -> Removal:
    return remove_entries(place, ALL, **options)


@pytest.mark.parametrize(
    "link",
    [
        f"{'L' * 52}",  # instead of an entry
        f"{KEY}/k.extra.json",  # instead of a file of an entry
        f"{KEY}/tmp.pid_12_01234567-89ab-cdef-0123-456789abcdef",  # instead of a folder of an entry
        "home",
    ],
)
def test_link_to_the_home_folder(link: str, place: Place, precious: Path) -> None:
    before = contents(precious)
    (Path(place.path) / link).symlink_to(precious)
    result = clean(place)
    assert contents(precious) == before and (Path(place.path) / link).is_symlink()
    assert result.entries == (1 if link.startswith(KEY) else 2)
    assert not (Path(place.path) / OTHER_KEY).exists()
    assert look(place).others + look(place).refused.count == 1


def test_link_instead_of_a_folder_above_entries(tmp_path: Path, precious: Path) -> None:
    place = make_cache("inductor", tmp_path)
    before = contents(precious)
    for name in ("ef", "fxgraph/ef"):
        (Path(place.path) / name).symlink_to(precious)
    (Path(place.path) / "triton/1").symlink_to(precious)
    assert clean(place).failed.count == 0 and contents(precious) == before


def test_links_of_an_entry_that_may_have_them_are_not_followed(tmp_path: Path, precious: Path) -> None:
    place = make_cache("hf_kernels", tmp_path)
    before = contents(precious)
    (Path(place.path) / "kernels--org--norm/blobs/home").symlink_to(precious)
    assert clean(place).entries == 2
    assert contents(precious) == before and not (Path(place.path) / "kernels--org--norm").exists()


def test_entry_replaced_by_a_link_between_look_and_removal(
    place: Place, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, before = Path(place.path), contents(precious)

    def replace(_: int) -> str:
        # Called just before the entry is renamed.
        if not (root / "aside").exists():
            (root / KEY).rename(root / "aside")
            (root / KEY).symlink_to(precious)
        return os.urandom(8).hex()

    monkeypatch.setattr(removal.secrets, "token_hex", replace)
    monkeypatch.setattr(removal, "find_entries", only(KEY))
    result = clean(place)
    assert contents(precious) == before and result.files == 0
    assert result.refused.examples == [f"{KEY} was replaced meanwhile"]
    assert (root / KEY).is_symlink() and len(contents(root / "aside")) == len(TRITON_ENTRY)


def test_entry_replaced_by_another_folder(place: Place, precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, before = Path(place.path), contents(precious)

    def replace(_: int) -> str:
        if precious.exists():
            (root / KEY).rename(root / "aside")
            precious.rename(root / KEY)
        return os.urandom(8).hex()

    monkeypatch.setattr(removal.secrets, "token_hex", replace)
    monkeypatch.setattr(removal, "find_entries", only(KEY))
    result = clean(place)
    assert result.files == 0 and contents(root / KEY) == before


def test_folder_inside_replaced_by_a_link_during_removal(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `stat` and opening: the folder is opened without following links."""
    place = make_cache("vllm", tmp_path)
    before, facts = contents(precious), tree.Folder.facts

    def swap(self: tree.Folder, name: str) -> os.stat_result:
        found = facts(self, name)
        if name == "rank_0_0" and "removed" in os.readlink(f"/proc/self/fd/{self.fd}"):
            os.rename(name, "aside", src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.symlink(precious, name, dir_fd=self.fd)
        return found

    monkeypatch.setattr(tree.Folder, "facts", swap)
    result = clean(place)
    assert contents(precious) == before and result.failed.count > 0


def only(name: str) -> Any:
    """`find_entries` that finds the entry of one name."""

    def find(*args: Any, **options: Any) -> Any:
        return (found for found in find_entries(*args, **options) if found.name == name)

    find_entries = removal.find_entries
    return find


def test_hard_links_are_counted_as_what_they_free(place: Place, tmp_path: Path) -> None:
    root = Path(place.path)
    big = root / KEY / "k.cubin"
    big.write_bytes(bytes(1 << 20))
    os.link(big, root / KEY / "k2.cubin")  # both names in the cache
    kept = root / OTHER_KEY / "k.so"
    kept.write_bytes(bytes(1 << 20))
    os.link(kept, tmp_path / "elsewhere.so")  # one name outside
    make_older(root, days=2)
    assert 2 << 20 <= look(place).disk_bytes < 3 << 20
    result = clean(place)
    assert result.files == len(TRITON_ENTRY) + 3
    assert 1 << 20 <= result.freed_bytes < 2 << 20
    assert (tmp_path / "elsewhere.so").stat().st_size == 1 << 20


def test_names_with_line_feeds(place: Place) -> None:
    root = Path(place.path)
    write_files(root, [f"{KEY}/a\nb.json", f"{OTHER_KEY}/\x1b[31m.txt", "new\nline"])
    os.close(os.open(os.fsencode(root) + b"/" + KEY.encode() + b"/\xff.json", os.O_CREAT | os.O_WRONLY))
    make_older(root, days=2)
    result = clean(place)
    assert result.entries == 1 and not (root / KEY).exists()
    assert path_text(result.refused.examples[0]) == f"{OTHER_KEY}/\\x1b[31m.txt is not part of an entry"
    assert path_text("a\nb\udcff") == "a\\nb\\xff" and path_text("ü /x") == "ü /x"


def test_entry_of_another_user(place: Place) -> None:
    root = Path(place.path)
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    os.chown(root / KEY / "k.json", 12345, 12345)
    os.chown(root / OTHER_KEY, 12345, 12345)
    result = clean(place)
    assert result.entries == 0 and result.refused.count == 2
    assert f"{KEY}/k.json belongs to user 12345" in result.refused.examples
    assert f"{OTHER_KEY} belongs to user 12345" in result.refused.examples


def test_cache_of_another_user(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(Path(place.path))
    monkeypatch.setattr("os.geteuid", lambda: place.owner + 1)
    assert look(place).skipped == clean(place).skipped == f"belongs to user {place.owner}"
    assert contents(Path(place.path)) == before and look(place).entries == 2


def test_entry_on_another_file_system(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_mounts_below", lambda _: frozenset({KEY, f"{OTHER_KEY}/k.json"}))
    result = clean(place)
    assert result.entries == 0
    assert sorted(result.refused.examples) == sorted([f"{KEY} is a mount", f"{OTHER_KEY}/k.json is a mount"])


@pytest.mark.parametrize("options", [["-t", "tmpfs", "none"], ["--bind", "{home}"]], ids=["tmpfs", "bind"])
def test_real_mounts(options: list[str], place: Place, precious: Path) -> None:
    """A bind mount has the device number of the file system around it."""
    target = Path(place.path) / KEY / "tmp.pid_12_01234567-89ab-cdef-0123-456789abcdef"
    target.mkdir()
    command = ["mount", *(option.format(home=precious) for option in options), str(target)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        before = contents(precious)
        result = clean(place)
        assert result.entries == 1 and "is a mount" in result.refused.examples[0]
        assert contents(precious) == before and (Path(place.path) / KEY / "k.json").exists()
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_mounts_are_read_from_the_kernel() -> None:
    assert "proc" in tree._mounts_below("/") and "fs" not in tree._mounts_below("/proc")
    assert tree._octal("/a\\040b\\012c\\134040") == "/a b\nc\\040"


def test_unreadable_folders(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == KEY:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *args, **options)

    monkeypatch.setattr("os.open", refuse)
    found = look(place)
    assert found.entries == 1 and found.refused.examples == [f"{KEY}: Permission denied"]
    result = clean(place)
    assert result.entries == 1 and result.failed.examples == [f"{KEY}: Permission denied"]


def test_file_that_cannot_be_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if path == "k.ptx":
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, **options)

    monkeypatch.setattr("os.unlink", refuse)
    result = clean(place)
    assert result.entries == 1 and result.failed.examples == [f"{KEY}: Operation not permitted"]
    assert not (Path(place.path) / KEY).exists(), "no tool sees half of the entry"
    monkeypatch.undo()
    assert look(place).leftovers == 1 and look(place).entries == 0
    assert clean(place).failed.count == 0 and contents(Path(place.path)) == set()


def test_files_that_vanish(place: Place) -> None:
    """Another process cleans at the same time."""
    root = Path(place.path)
    removed: list[str] = []

    def tick(_: int) -> None:
        for path in [*root.glob(".dsv4c-removed-*/*"), *root.glob("*/k.json")]:
            removed.append(path.name)
            path.unlink()

    result = clean(place, tick=tick)
    assert result.failed.count == 0 and contents(root) == set()
    assert result.files + len(removed) == len(TRITON_ENTRY) + 1


def test_cache_that_vanishes(place: Place) -> None:
    for path in sorted(Path(place.path).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    Path(place.path).rmdir()
    assert clean(place).failed.count == 0 and look(place).refusal == "No such file or directory"


def test_cache_replaced_by_a_link_after_it_was_found(place: Place, precious: Path) -> None:
    root, before = Path(place.path), contents(precious)
    root.rename(root.parent / "aside")
    root.symlink_to(precious)
    assert look(place).refusal == "Not a directory"
    result = clean(place)
    assert result.failed.count == 1 and result.files == 0 and contents(precious) == before


def test_deep_nesting(tmp_path: Path) -> None:
    place = make_cache("vllm", tmp_path)
    deep = next(Path(place.path).glob("torch_compile_cache/0*/rank_0_0"))
    (deep / Path(*["d"] * 100)).mkdir(parents=True)
    make_older(Path(place.path), days=2)
    result = clean(place)
    assert result.entries == 2 and "is nested too deeply" in result.refused.examples[-1]


def test_sockets_and_pipes(place: Place) -> None:
    os.mkfifo(Path(place.path) / KEY / "k.extra.json")
    os.mkfifo(Path(place.path) / f"{HEX64}.json")
    assert clean(place).refused.examples == [f"{KEY}/k.extra.json is a link or no regular file"]
