"""Which entries go: by age, and by what is kept."""

import os
import time
from pathlib import Path

import pytest

from dsv4c.jit_caches.known_layouts import TRITON_LAYOUT
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import remove_entries
from dsv4c.jit_caches.selection import Cut, count_selected, make_cut
from dsv4c.jit_caches.survey import Survey, survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import DAY_NS, write_files

NOW_NS = time.time_ns()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Ten entries of 8192 bytes, 1 to 10 days old: AAA is the youngest."""
    for days, letter in enumerate("ABCDEFGHIJ", start=1):
        write_files(tmp_path, {f"{letter * 52}/k.json": "x" * 8192})
        age(tmp_path / (letter * 52), days)
    return Place("triton", str(tmp_path), "test", TRITON_LAYOUT, tmp_path.stat().st_uid)


def age(entry: Path, days: float) -> None:
    for path in [entry, *entry.iterdir()]:
        os.utime(path, ns=(NOW_NS - int(days * DAY_NS),) * 2)


def left(place: Place) -> str:
    return "".join(sorted(path.name[0] for path in Path(place.path).iterdir()))


def clean(place: Place, older_than_ns: int | None = None, keep_bytes: int | None = None) -> int:
    """Cleans, and checks that what was announced is what went."""
    surveys = [look(place)]
    cut = make_cut(surveys, NOW_NS, older_than_ns, keep_bytes)
    selected = count_selected(surveys[0], cut.copy())
    result = remove_entries(place, cut)
    assert (selected.entries, selected.files, selected.disk_bytes) == (result.entries, result.files, result.freed_bytes)
    return result.entries


def look(place: Place) -> Survey:
    return survey(place, Usage({}))


def test_by_age(place: Place) -> None:
    assert clean(place, older_than_ns=int(3.5 * DAY_NS)) == 7 and left(place) == "ABC"


def test_newest_use_of_any_file_counts(place: Place) -> None:
    entry = Path(place.path) / ("J" * 52)
    write_files(entry, ["k.ptx"])
    age(entry, 10)
    os.utime(entry / "k.ptx", ns=(NOW_NS - DAY_NS, NOW_NS - 10 * DAY_NS))  # read a day ago
    clean(place, older_than_ns=int(1.5 * DAY_NS))
    assert left(place) == "AJ"


@pytest.mark.parametrize(
    ("keep_bytes", "expected"),
    [(10 * 8192, "ABCDEFGHIJ"), (10 * 8192 - 1, "ABCDEFGHI"), (3 * 8192, "ABC"), (3 * 8192 + 8191, "ABC"), (0, "")],
)
def test_by_size(keep_bytes: int, expected: str, place: Place) -> None:
    clean(place, keep_bytes=keep_bytes)
    assert left(place) == expected


def test_by_size_where_all_were_used_at_once(place: Place) -> None:
    for entry in Path(place.path).iterdir():
        age(entry, 5)
    assert clean(place, keep_bytes=4 * 8192) == 6


def test_both_limits_let_go(place: Place) -> None:
    clean(place, older_than_ns=int(8.5 * DAY_NS), keep_bytes=5 * 8192)
    assert left(place) == "ABCDE"
    clean(place, older_than_ns=int(2.5 * DAY_NS), keep_bytes=5 * 8192)
    assert left(place) == "AB"


def test_what_is_in_use_counts_as_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(place)
    found.disk_bytes += 2 * 8192  # two more that are in use
    cut = make_cut([found], NOW_NS, None, 5 * 8192)
    assert count_selected(found, cut).entries == 7


def test_caches_that_are_skipped(place: Place) -> None:
    found = look(place)
    found.writing = "somebody"
    cut = make_cut([found], NOW_NS, None, 0)
    assert count_selected(found, cut).entries == 0 and not cut.selects(1, 1)


def test_over_two_caches_the_oldest_go_first(place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_files(other, {f"{'Q' * 52}/k.json": "x" * 8192})
    age(other / ("Q" * 52), 4.5)
    second = Place("triton", str(other), "test", TRITON_LAYOUT, other.stat().st_uid)
    surveys = [look(place), look(second)]
    cut = make_cut(surveys, NOW_NS, None, 5 * 8192)
    assert [count_selected(found, cut).entries for found in surveys] == [6, 0]


def test_cut_uses_up_its_ties() -> None:
    cut = Cut(5, ties_bytes=10)
    assert [cut.selects(4, 9), cut.selects(5, 6), cut.selects(5, 6), cut.selects(5, 6), cut.selects(6, 0)] == [
        True,
        True,
        True,
        False,
        False,
    ]
