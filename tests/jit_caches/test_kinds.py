"""Every kind: its entries are found and removed, and nothing beside them."""

import re
from pathlib import Path

import pytest

from dsv4c.jit_caches import kinds
from dsv4c.jit_caches.kinds import KINDS
from dsv4c.jit_caches.known_layouts import TORCH_EXTENSIONS_DIR_LAYOUT, TRITON_LAYOUT
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import remove_entries
from dsv4c.jit_caches.selection import Cut, make_cut
from dsv4c.jit_caches.survey import survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import (
    ENTRIES,
    EXTENSION,
    KEY,
    NEIGHBOURS,
    TRITON_ENTRY,
    contents,
    make_cache,
    make_older,
    names_of,
    write_files,
)

ALL = make_cut([], 0, None, None)


def test_every_kind_has_a_fake_tree() -> None:
    assert ENTRIES.keys() == KINDS.keys() == NEIGHBOURS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_found(kind: str, tmp_path: Path) -> None:
    entries, files, housekeeping = ENTRIES[kind]
    found = survey(make_cache(kind, tmp_path), Usage({}))
    assert found.entries == entries, found
    marks = 2 if kind == "dsv4c" else 0
    regular = [name for name in files if " -> " not in name]
    assert found.files == len(regular) + len(list(housekeeping)) + marks
    assert found.disk_bytes > 0 and found.skipped is None and found.is_recognised
    assert found.others + found.refused.count > 0


@pytest.mark.parametrize("kind", KINDS)
def test_entries_go_and_neighbours_stay(kind: str, tmp_path: Path) -> None:
    _, files, housekeeping = ENTRIES[kind]
    place = make_cache(kind, tmp_path)
    before = contents(Path(place.path))
    # What has the name of an entry and is none may be one of a newer version, which needs the index and the locks.
    expected = names_of(files) | (set() if survey(place, Usage({})).refused.count else set(housekeeping))
    result = remove_entries(place, ALL)
    assert result.failed.count == 0 and result.skipped is None and not result.stopped
    assert before - contents(Path(place.path)) == expected
    assert result.files == len(expected) - len([name for name in files if " -> " in name])
    assert result.entries == ENTRIES[kind][0]
    # Nothing to do is success.
    again = remove_entries(place, ALL)
    assert (again.files, again.freed_bytes, again.failed.count) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_above_entries_go_too(kind: str, tmp_path: Path) -> None:
    _, files, housekeeping = ENTRIES[kind]
    place = make_cache(kind, tmp_path)
    for name in sorted(contents(Path(place.path)) - names_of(files) - set(housekeeping)):
        if kind != "dsv4c" or name not in ("DSV4C_CUBIN_CACHE", ".lock"):
            (Path(place.path) / name).unlink()
    for folder in sorted((path for path in Path(place.path).rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    remove_entries(place, ALL)
    left = {path.name for path in Path(place.path).rglob("*")}
    assert left == ({"DSV4C_CUBIN_CACHE", ".lock"} if kind == "dsv4c" else set())


def test_housekeeping_stays_while_there_are_entries(tmp_path: Path) -> None:
    place = make_cache("cuda", tmp_path)
    root = Path(place.path)
    make_older(root / "0", days=9)
    cut = make_cut([survey(place, Usage({}))], (root / "9").stat().st_mtime_ns, 10**9, None)
    assert remove_entries(place, cut).entries == 1
    assert "index" in contents(root) and "9/a/478c92402697a8" in contents(root)


def test_somebody_s_own_file_called_index_stays(tmp_path: Path) -> None:
    place = make_cache("cuda", tmp_path)
    write_files(Path(place.path), {"index": "of my books"})
    make_older(Path(place.path), days=2)
    result = remove_entries(place, ALL)
    assert result.entries == 2 and "index" in contents(Path(place.path))
    assert result.refused.examples[-1] == "index lacks what such a file has"


def test_index_of_the_driver_goes(tmp_path: Path) -> None:
    place = make_cache("cuda", tmp_path)
    header = (0x41).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(8)
    (Path(place.path) / "index").write_bytes(header + bytes(32))
    make_older(Path(place.path), days=2)
    remove_entries(place, ALL)
    assert "index" not in contents(Path(place.path))


def test_dsv4c_needs_its_marker(tmp_path: Path) -> None:
    place = make_cache("dsv4c", tmp_path)
    write_files(Path(place.path), {"DSV4C_CUBIN_CACHE": "dsv4c cubin cache 2\n"})
    make_older(Path(place.path), days=2)
    before = contents(Path(place.path))
    assert survey(place, Usage({})).skipped == "has no file DSV4C_CUBIN_CACHE as this cache has"
    assert remove_entries(place, ALL).files == 0 and contents(Path(place.path)) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ext/mine.cpp", "my source, compiled in place"),
        ("ext/build.ninja", "rule cc\n"),
        ("ext/src/main.cpp", "mine"),
    ],
)
def test_extension_that_is_somebody_s_project(name: str, text: str, tmp_path: Path) -> None:
    root = tmp_path / "ext_dir"
    write_files(root, EXTENSION | {name: text})
    make_older(root, days=2)
    before = contents(root)
    place = Place("torch_extensions", str(root), "test", TORCH_EXTENSIONS_DIR_LAYOUT, root.stat().st_uid)
    assert remove_entries(place, ALL).refused.count == 1 and contents(root) == before


def test_variable_that_names_the_home_folder(tmp_path: Path) -> None:
    """TRITON_CACHE_DIR=~ puts entries between somebody's own folders."""
    write_files(tmp_path, [*TRITON_ENTRY, "Documents/thesis.tex", ".ssh/id", f"{KEY[::-1]}/thesis.tex"])
    make_older(tmp_path, days=2)
    place = Place("triton", str(tmp_path), "TRITON_CACHE_DIR", TRITON_LAYOUT, tmp_path.stat().st_uid)
    assert remove_entries(place, ALL).files == len(TRITON_ENTRY)
    assert contents(tmp_path) == {"Documents/thesis.tex", ".ssh/id", f"{KEY[::-1]}/thesis.tex"}


def test_cut_of_everything() -> None:
    assert Cut(1 << 62) == ALL and ALL.selects(2**61, 5)


def test_page_has_every_kind_and_variable() -> None:
    folder = Path(kinds.__file__).parent
    page = (folder / "README.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"| `{kind}` |" in page and f"\n### {kind}\n" in page
    for source in ("kinds.py", "surroundings.py"):
        for name in re.findall(r'"([A-Z][A-Z0-9]+_[A-Z_]+)"', (folder / source).read_text(encoding="utf-8")):
            assert f"{name}`" in page or f"{name}/" in page, f"{name} is not on the page"
