"""Topologies: every unit exactly once, balanced, the same every time; tables read back."""

import random
import re
import shutil
import subprocess
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4c.errors import PlanError
from dsv4c.graph.topology import (
    ExpertShapes,
    Topology,
    TopologyKind,
    group_count,
    place,
    read_table,
    stretches,
    table_size,
)

STREAM_KERNEL = Path(__file__).parents[2] / "dsv4c/kernels/cuda/experts_stretch.cuh"

FLASH = ExpertShapes(experts=256, hidden=4096, inner=2048)
SMALL = ExpertShapes(experts=16, hidden=256, inner=128)
KINDS: tuple[TopologyKind, ...] = ("striped", "pinned", "traced")
H100, PCIE = 132, 114


def zipf(experts: int, seed: int) -> list[int]:
    """Counts as traces have them: few experts take most, some take none."""
    counts = [20000 // (rank + 1) if rank < experts * 3 // 4 else 0 for rank in range(experts)]
    random.Random(seed).shuffle(counts)
    return counts


def topology(shapes: ExpertShapes, sm_count: int, kind: TopologyKind, group_sms: int = 4, seed: int = 0) -> Topology:
    return place(shapes, sm_count, kind, group_sms, zipf(shapes.experts, seed) if kind == "traced" else None)


StepCase = tuple[Topology, list[tuple[int, int]], int, bool]


@st.composite
def steps(draw: st.DrawFn) -> StepCase:
    """A topology, the (expert, pairs) of a step, the pairs of a place, whether places are done in halves."""
    shapes = ExpertShapes(draw(st.integers(1, 40)), 128 * draw(st.integers(1, 3)), 128 * draw(st.integers(1, 3)))
    sm_count = draw(st.sampled_from((1, 2, 7, 16, PCIE, H100)))
    counts = draw(st.lists(st.integers(0, 50), min_size=shapes.experts, max_size=shapes.experts))
    found = place(shapes, sm_count, draw(st.sampled_from(KINDS)), draw(st.integers(1, min(sm_count, 9))), counts)
    hit = draw(st.dictionaries(st.integers(0, shapes.experts - 1), st.integers(0, 40), max_size=shapes.experts))
    return found, list(hit.items()), draw(st.sampled_from((1, 8, 16, 64))), draw(st.booleans())


@settings(deadline=None)
@given(steps())
def test_every_unit_is_done_once_in_the_expert_s_group(case: StepCase) -> None:
    found, hit, place_pairs, halves = case
    works = [found.work(sm, hit, place_pairs, halves) for sm in range(found.sm_count)]
    places = [(expert, index) for expert, pairs in hit for index in range(-(-pairs // place_pairs))]
    for phase, panels in (("up", found.shapes.up_panels), ("down", found.shapes.down_panels)):
        done = Counter(unit for work in works for unit in getattr(work, phase))
        assert done == Counter((*where, panel) for where in places for panel in range(panels))
        for sm, work in enumerate(works):
            assert {found.group_of[unit.expert] for unit in getattr(work, phase)} <= {found.seat(sm)[0]}
    assert [(len(work.up), len(work.down)) for work in works] == found.unit_counts(hit, place_pairs, halves)


@settings(deadline=None)
@given(steps())
def test_sms_of_a_group_have_as_much_to_read(case: StepCase) -> None:
    found, hit, place_pairs, halves = case
    counts, shapes = found.unit_counts(hit, place_pairs, halves), found.shapes
    for first, end in pairwise(found.first_sm):
        ups, downs = zip(*counts[first:end], strict=True)
        assert max(ups) - min(ups) <= 1
        slots = [up * shapes.up_slots + down * shapes.down_slots for up, down in counts[first:end]]
        assert max(slots) - min(slots) <= 2 * shapes.down_slots or (
            max(slots) - min(slots) <= shapes.up_slots + shapes.down_slots and max(downs) - min(downs) <= 1
        )


@settings(deadline=None)
@given(steps())
def test_an_sm_has_a_piece_of_the_places_in_rank_order(case: StepCase) -> None:
    found, hit, place_pairs, halves = case
    rank = {expert: number for number, expert in enumerate(found.order)}
    for group, (first, end) in enumerate(pairwise(found.first_sm)):
        places = list(found.places(group, hit, place_pairs))
        assert places == sorted(places, key=lambda where: (rank[where[0]], where[1]))
        shares = [stretches(found.shapes, len(places), index, end - first, halves) for index in range(end - first)]
        for phase in (0, 1):
            pieces = [share[phase] for share in shares]
            # The first half of the places, SM by SM, then the second.
            assert [unit for half in (0, 1) for piece in pieces for unit in piece[half]] == list(
                range(sum(map(len, (run for piece in pieces for run in piece))))
            )
            if not halves:
                assert not any(piece[0] for piece in pieces)


def test_halves_of_a_token_s_places() -> None:
    # Eight tokens, 48 places of 64 panels each: as much for every SM as without halves.
    for index in range(H100):
        whole, halved = (stretches(FLASH, 48, index, H100, halves) for halves in (False, True))
        for phase in (0, 1):
            first, second = halved[phase]
            assert len(first) in (11, 12) and first.stop <= 24 * 64 <= second.start
            assert sum(map(len, halved[phase])) == sum(map(len, whole[phase]))
    # A single place has no half.
    assert stretches(FLASH, 1, 5, H100, True) == stretches(FLASH, 1, 5, H100, False)


@pytest.mark.parametrize("halves", (False, True), ids=("whole", "halves"))
@pytest.mark.parametrize("shapes", (FLASH, SMALL, ExpertShapes(8, 7168, 3072)), ids=str)
def test_kernel_shares_by_the_same_rule(shapes: ExpertShapes, halves: bool, tmp_path: Path) -> None:
    """`stretch_of` of the kernel, compiled as it stands, against `stretches`."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    text = STREAM_KERNEL.read_text(encoding="utf-8")
    parts = (r"struct Run \{", r"struct Stretch \{", r"__device__ [^\n]* share\(", r"__device__ [^\n]* stretch_of\(")
    rule = [re.findall(rf"^{part}[^\n]*\}}$|^{part}.*?^\}};?$", text, re.M | re.S) for part in parts]
    assert [len(found) for found in rule] == [1] * len(parts)
    cases = [(places, sms) for places in (*range(0, 13), 46, 257, 1500) for sms in (1, 2, 4, 5, PCIE, H100)]
    calls = "".join(
        f"  for (int i = 0; i < {sms}; i++) show(stretch_of({places}, i, {sms}));\n" for places, sms in cases
    )
    source = tmp_path / "rule.cc"
    source.write_text(
        f"""#include <cstdio>
#include <initializer_list>
#define __device__
#define __forceinline__ inline
#define HALVES {int(halves)}
typedef long long i64;
constexpr int PANELS1 = {shapes.up_panels}, PANELS2 = {shapes.down_panels};
constexpr int SLOTS1 = {shapes.up_slots}, SLOTS2 = {shapes.down_slots};
{chr(10).join(found[0] for found in rule)}
void show(Stretch s) {{
  for (Run run : {{s.first[0], s.first[1], s.second[0], s.second[1]}}) std::printf("%d %d ", run.begin, run.end);
  std::printf("\\n");
}}
int main() {{
{calls}}}
""",
        encoding="utf-8",
    )
    subprocess.run([compiler, "-std=c++20", "-o", tmp_path / "rule", source], check=True)
    printed = subprocess.run([tmp_path / "rule"], check=True, capture_output=True, text=True).stdout.splitlines()
    expected = [stretches(shapes, places, sm, sms, halves) for places, sms in cases for sm in range(sms)]
    found = [list(map(int, line.split())) for line in printed]
    assert [((range(a, b), range(c, d)), (range(e, f), range(g, h))) for a, b, c, d, e, f, g, h in found] == expected


@pytest.mark.parametrize("sm_count", (H100, PCIE))
@pytest.mark.parametrize("kind", KINDS)
def test_flash_on_hopper(kind: TopologyKind, sm_count: int) -> None:
    found = topology(FLASH, sm_count, kind)
    assert found == topology(FLASH, sm_count, kind)
    assert sum(found.group_sms) == sm_count
    assert sorted(found.order) == list(range(256))
    assert all(found.first_rank[group] < found.first_rank[group + 1] for group in range(found.groups))
    # The group of an expert and its rank say the same.
    for group in range(found.groups):
        assert {found.group_of[expert] for expert in found.experts_of(group)} == {group}
    assert len(found.table()) == table_size(found.groups, 256, sm_count)
    assert found.groups == group_count(kind, 256, sm_count, 4)


def test_striped_gives_every_sm_a_stripe_of_every_expert() -> None:
    found = place(FLASH, H100, "striped", 4)
    assert found.group_sms == (H100,) and found.order == tuple(range(256))
    # One token: 6 experts, 64 units each and phase.
    hit = [(expert, 1) for expert in (3, 40, 41, 100, 200, 255)]
    counts = found.unit_counts(hit, 16)
    assert {up for up, _ in counts} == {2, 3}
    # Who has a panel less in the first phase has two more of half its size in the second.
    assert {8 * up + 4 * down for up, down in counts} <= {32, 36, 40}
    assert sum(up for up, _ in counts) == sum(down for _, down in counts) == 6 * 64
    assert found.work(0, hit, 16).up == ((3, 0, 0), (3, 0, 1))


def test_pinned_deals_experts_and_leftover_sms() -> None:
    found = place(FLASH, PCIE, "pinned", 4)
    assert found.group_sms == (5, 5, *[4] * 26)
    assert [found.seat(sm) for sm in (0, 4, 5, 10, 113)] == [(0, 0, 5), (0, 4, 5), (1, 0, 5), (2, 0, 4), (27, 3, 4)]
    assert found.group_of == tuple(expert % 28 for expert in range(256))
    assert found.experts_of(1)[:3] == (1, 29, 57)
    with pytest.raises(IndexError):
        found.seat(PCIE)
    assert place(FLASH, H100, "pinned", 4).group_sms == (4,) * 33
    # More leftover SMs than groups: as even as can be.
    assert place(FLASH, 11, "pinned", 6).group_sms == (11,)
    assert place(FLASH, 15, "pinned", 8).group_sms == (15,)


def test_no_more_groups_than_experts() -> None:
    found = place(SMALL, H100, "pinned", 4)
    assert found.groups == 16 and set(found.group_sms) == {8, 9}
    assert found.group_of == tuple(range(16))


def test_traced_balances_the_counts() -> None:
    counts = zipf(256, 1)
    found = place(FLASH, H100, "traced", 4, counts)
    loads = [sum(counts[expert] for expert in found.experts_of(group)) for group in range(found.groups)]
    fair = sum(counts) / found.groups
    # Longest first is within 4/3 of the best, which is no better than the heaviest expert or the mean.
    assert max(loads) <= 4 / 3 * max(fair, *counts)
    pinned = place(FLASH, H100, "pinned", 4)
    dealt = [sum(counts[expert] for expert in pinned.experts_of(group)) for group in range(pinned.groups)]
    assert max(loads) < max(dealt)
    # An expert that fills a group alone has it alone.
    heaviest = counts.index(max(counts))
    group = found.group_of[heaviest]
    assert [counts[expert] for expert in found.experts_of(group) if expert != heaviest and counts[expert]] == []


def test_traced_takes_larger_groups_into_account() -> None:
    # Groups of 5, 5, 4 SMs; 14 equal experts: as many as SMs.
    found = place(ExpertShapes(14, 256, 128), 14, "traced", 4, [100] * 14)
    assert [len(found.experts_of(group)) for group in range(3)] == [5, 5, 4]


def test_traced_deals_unseen_experts_by_number() -> None:
    found = place(FLASH, H100, "traced", 4, [0] * 256)
    assert {len(found.experts_of(group)) for group in range(33)} == {7, 8}
    one = [5000, *[0] * 255]
    found = place(FLASH, H100, "traced", 4, one)
    assert {len(found.experts_of(group)) for group in range(33)} == {7, 8}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 20))
def test_no_group_is_empty_while_another_has_two(counts: list[int], sm_count: int) -> None:
    found = place(ExpertShapes(len(counts), 128, 128), sm_count, "traced", 1, counts)
    held = [len(found.experts_of(group)) for group in range(found.groups)]
    assert min(held) > 0 or max(held) < 2


@pytest.mark.parametrize("sm_count", (H100, PCIE))
@pytest.mark.parametrize("kind", KINDS)
def test_table_reads_back(kind: TopologyKind, sm_count: int) -> None:
    for shapes in (FLASH, SMALL):
        found = topology(shapes, sm_count, kind)
        table = found.table()
        assert read_table(shapes, kind, sm_count, found.groups, table) == found
        assert read_table(shapes, kind, sm_count, found.groups, [*table, 0, 0, 0]) == found


@settings(deadline=None)
@given(st.integers(0, table_size(16, 16, H100) - 1), st.integers(-1, 200))
def test_damaged_tables_are_told(position: int, value: int) -> None:
    found = topology(SMALL, H100, "pinned")
    table = list(found.table())
    if table[position] == value:
        return
    table[position] = value
    with pytest.raises(ValueError, match=r"an expert is missing|ranks of the groups|do not ascend|seats of the SMs"):
        read_table(SMALL, "pinned", H100, found.groups, table)


def test_short_tables_are_told() -> None:
    table = topology(SMALL, H100, "pinned").table()
    for length in (0, 10, 20, len(table) - 1):
        with pytest.raises(ValueError, match="it is too short"):
            read_table(SMALL, "pinned", H100, 16, table[:length])


def test_refusals() -> None:
    with pytest.raises(PlanError, match="groups of 200 SMs on a card of 132"):
        place(FLASH, H100, "pinned", 200)
    with pytest.raises(PlanError, match="no counts"):
        place(FLASH, H100, "traced", 4)
    with pytest.raises(PlanError, match="counts of 16 experts, the layer 256"):
        place(FLASH, H100, "traced", 4, [1] * 16)


@pytest.mark.parametrize("shapes", [FLASH, ExpertShapes(experts=384, hidden=7168, inner=3072)])
@pytest.mark.parametrize(
    ("sm_count", "all_places", "most"),
    [
        # From 129 rows on a step has more places: up to 336, of V4-Pro 456.
        (H100, (6, 7, 8, 9, 12, 24, 47, 96, 131, 202, 256, 336, 456), 33),
        (PCIE, (6, 7, 8, 9, 12, 24, 47, 96, 131, 202, 256, 336, 456), 38),
        (H100, (2, 3, 4, 5), 66),
        (PCIE, (2, 3, 4, 5), 57),
    ],
)
def test_how_far_a_block_looks_ahead(
    shapes: ExpertShapes, sm_count: int, all_places: tuple[int, ...], most: int
) -> None:
    """The kernel's blocks need not all run at once: one waits for its neighbours alone (dsv4c/kernels/experts.md)."""
    for places, halves in product(all_places, (False, True)):
        own = [stretches(shapes, places, sm, sm_count, halves) for sm in range(sm_count)]
        last: dict[int, int] = {}  # the last SM that has panels of the place's first projection
        for sm, stretch in enumerate(own):
            last |= {panel // shapes.up_panels: sm for run in stretch.up for panel in run}
        for sm, stretch in enumerate(own):
            wanted = {panel // shapes.down_panels for run in stretch.down for panel in run}
            assert max((last[place] for place in wanted), default=0) - sm < most
