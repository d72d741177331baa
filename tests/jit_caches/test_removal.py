"""The order of removal, and what is left when it is cut short."""

import os
from pathlib import Path
from typing import Any

import pytest

from dsv4c.jit_caches.entries import TOMBSTONE
from dsv4c.jit_caches.kinds import KINDS
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import remove_entries
from dsv4c.jit_caches.selection import make_cut
from dsv4c.jit_caches.survey import survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import B51, ENTRIES, HEX64, KEY, NEIGHBOURS, contents, make_cache, make_older

ALL = make_cut([], 0, None, None)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of files as they went, by the name that their folder had then."""
    paths: list[str] = []
    unlink = os.unlink

    def note(path: Any, *, dir_fd: int | None = None) -> None:
        paths.append(os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr("os.unlink", note)
    return paths


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_a_folder_entry_goes_under_its_name(kind: str, tmp_path: Path, removed: list[str]) -> None:
    place = make_cache(kind, tmp_path)
    single = {
        name
        for unit in place.layout.units
        if not hasattr(unit, "only")
        for name in contents(Path(place.path))
        if len(unit.components) == name.count("/") + 1
        and all(p.fullmatch(part) for p, part in zip(unit.components, name.split("/"), strict=True))
    }
    assert remove_entries(place, ALL).entries > 0
    for path in removed:
        below = os.path.relpath(path, place.path)
        assert below in single or any(TOMBSTONE.fullmatch(part) for part in below.split("/")), below


def test_what_refers_goes_before_what_is_referred_to(tmp_path: Path, removed: list[str]) -> None:
    place = make_cache("inductor", tmp_path)
    remove_entries(place, ALL)
    order = [os.path.relpath(path, place.path).split("/")[0] for path in removed]
    assert order[0] == "aotautograd" and order[1:3] == ["fxgraph"] * 2
    assert not {"aotautograd", "fxgraph"} & set(order[3:])


def test_dsv4c_entry_is_not_trusted_before_it_is_gone(tmp_path: Path, removed: list[str]) -> None:
    place = make_cache("dsv4c", tmp_path)
    remove_entries(place, ALL)
    names = [os.path.basename(path) for path in removed]
    assert names.index(f"{HEX64}.json") + 1 == names.index(f"{HEX64}.cubin")


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_every_file(kind: str, tmp_path: Path) -> None:
    """After any number of files every entry is whole or gone, and the next run finishes."""
    for stop_after in range(20):
        place = make_cache(kind, tmp_path / str(stop_after))
        whole = entries_of(place)
        done: list[int] = []
        result = remove_entries(place, ALL, done.append, lambda done=done, limit=stop_after: len(done) >= limit)
        assert result.files == len(done) and result.failed.count == 0
        for path, files in entries_of(place).items():
            assert whole[path] == files, f"{path} is half gone"
        if not result.stopped:
            break
        assert len(done) == stop_after or kind == "dsv4c"
        final = remove_entries(place, ALL)
        assert not final.stopped and survey(place, Usage({})).entries == survey(place, Usage({})).leftovers == 0
        neighbours = set(NEIGHBOURS[kind]) | set(ENTRIES[kind][2]) | {"DSV4C_CUBIN_CACHE", ".lock"}
        assert contents(Path(place.path)) <= neighbours
    else:
        pytest.fail("never came to an end")


def test_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cleared up at a kill; the entry has lost its name before its first file."""

    class Kill(BaseException):
        pass

    place = make_cache("deep_gemm", tmp_path)
    unlink = os.unlink

    def kill(path: Any, **options: Any) -> None:
        unlink(path, **options)
        raise Kill

    monkeypatch.setattr("os.unlink", kill)
    with pytest.raises(Kill):
        remove_entries(place, ALL)
    monkeypatch.undo()
    for folder in (Path(place.path) / "cache").glob("kernel.gemm.*"):
        assert contents(folder) in ({"kernel.cu", "kernel.cubin"}, {"kernel.so"})
    assert survey(place, Usage({})).leftovers == 1
    remove_entries(place, ALL)
    assert survey(place, Usage({})).leftovers == survey(place, Usage({})).entries == 0


def entries_of(place: Place) -> dict[str, set[str]]:
    """Folder entries that have their own name, with their files."""
    root = Path(place.path)
    found = {}
    for unit in place.layout.units:
        if hasattr(unit, "only"):
            for folder in root.glob("/".join(["*"] * len(unit.components))):
                parts = str(folder.relative_to(root)).split("/")
                if (
                    folder.is_dir()
                    and not TOMBSTONE.fullmatch(parts[-1])
                    and all(pattern.fullmatch(part) for pattern, part in zip(unit.components, parts, strict=True))
                ):
                    found[str(folder)] = contents(folder)
    return found


def test_leftovers_are_shown_and_finished(tmp_path: Path) -> None:
    place = make_cache("triton", tmp_path)
    left = Path(place.path) / ".dsv4c-removed-0123456789abcdef"
    (Path(place.path) / KEY).rename(left)
    found = survey(place, Usage({}))
    assert (found.leftovers, found.entries) == (1, 2) and found.leftover_bytes > 0
    young = make_cut([found], 10**18, 10**18, None)  # no entry is old enough
    assert remove_entries(place, young).entries == 0 and not left.exists()


def test_folder_with_the_name_of_a_leftover_where_none_can_be(tmp_path: Path) -> None:
    place = make_cache("cuda", tmp_path)
    mine = Path(place.path) / ".dsv4c-removed-0123456789abcdef"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    make_older(mine, days=9)
    remove_entries(place, ALL)
    assert (mine / "thesis.tex").exists()


def test_partner_without_its_file(tmp_path: Path) -> None:
    place = make_cache("dsv4c", tmp_path)
    assert survey(place, Usage({})).entries == 4
    (Path(place.path) / "0f" / f"{HEX64}.cubin").unlink()
    assert survey(place, Usage({})).entries == 4


def test_two_at_once(tmp_path: Path) -> None:
    place = make_cache("inductor", tmp_path)
    inner: list[int] = []

    def tick(_: int) -> None:
        if not inner:
            inner.append(0)
            inner.append(remove_entries(place, ALL).files)

    outer = remove_entries(place, ALL, tick)
    assert outer.failed.count == 0
    assert outer.files + sum(inner) == len(ENTRIES["inductor"][1])
    assert f"ab/c{B51}.py" not in contents(Path(place.path))
