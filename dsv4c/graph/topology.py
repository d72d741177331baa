"""Which SM computes which part of which expert: plain data, decided when the engine is built.

A topology deals the SMs into groups of neighbours, and the experts to the groups. What a step does in a group follows
by rule from the tokens that its experts got: the pairs (token, choice) of an expert make places of a few pairs each,
the places of a group are taken in rank order, and the panels of all of them are split over the group's SMs, one piece
an SM. In steps of few rows that is done for each half of the places, so that an SM has two pieces. A panel of a place
is a unit: 64 rows of the first matrices (32 of gate, 32 of up) in the first phase, 64 rows of the second matrix in the
second. `stretches` here and `stretch_of` in kernels/cuda/experts_stretch.cuh are the same rule.

    striped   one group of all SMs: every SM reads a stripe of every expert that was hit
    pinned    groups of a few SMs, expert e in group e % groups
    traced    the same groups, experts by how often a trace of this layer chose them, the heaviest first
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from dsv4c.errors import PlanError

TopologyKind = Literal["striped", "pinned", "traced"]

# Rows of gate and of up in a panel of the first matrices, and of the second matrix in one of that.
UP_ROWS, DOWN_ROWS = 32, 64
# Columns of a panel that are copied at once: what shares are counted in.
SLOT_COLUMNS = 512


@dataclass(frozen=True)
class ExpertShapes:
    """The routed experts of a layer: `inner` rows each of gate and up over `hidden` columns, and back."""

    experts: int
    hidden: int
    inner: int

    @property
    def up_panels(self) -> int:
        return self.inner // UP_ROWS

    @property
    def down_panels(self) -> int:
        return self.hidden // DOWN_ROWS

    @property
    def up_slots(self) -> int:
        """Slots of a panel of the first matrices."""
        return -(-self.hidden // SLOT_COLUMNS)

    @property
    def down_slots(self) -> int:
        return -(-self.inner // SLOT_COLUMNS)


class Unit(NamedTuple):
    """A panel of a place; `place` counts those of the expert."""

    expert: int
    place: int
    panel: int


class Work(NamedTuple):
    """What one SM does in a step, in order: `up` in the first phase, `down` in the second."""

    up: tuple[Unit, ...]
    down: tuple[Unit, ...]


class Stretch(NamedTuple):
    """The units that one SM of a group has, counted through those of all its places: runs of them, in this order."""

    up: tuple[range, range]
    down: tuple[range, range]


@dataclass(frozen=True)
class Topology:
    """`group_sms` SMs of every group, consecutive from SM 0; `group_of` every expert."""

    name: TopologyKind
    shapes: ExpertShapes
    group_sms: tuple[int, ...]
    group_of: tuple[int, ...]

    @property
    def sm_count(self) -> int:
        return sum(self.group_sms)

    @property
    def groups(self) -> int:
        return len(self.group_sms)

    @cached_property
    def first_sm(self) -> tuple[int, ...]:
        """Of every group, and one past the last."""
        return tuple(accumulate(self.group_sms, initial=0))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Experts by rank: group after group, in a group by number."""
        return tuple(sorted(range(len(self.group_of)), key=lambda expert: (self.group_of[expert], expert)))

    @cached_property
    def first_rank(self) -> tuple[int, ...]:
        """Of every group, and one past the last: group g has `order[first_rank[g]:first_rank[g + 1]]`."""
        sizes = [0] * self.groups
        for group in self.group_of:
            sizes[group] += 1
        return tuple(accumulate(sizes, initial=0))

    def seat(self, sm: int) -> tuple[int, int, int]:
        """(group, index in it, SMs of it) of an SM."""
        for group, first in enumerate(self.first_sm[:-1]):
            if sm < first + self.group_sms[group]:
                return group, sm - first, self.group_sms[group]
        raise IndexError(sm)

    def experts_of(self, group: int) -> tuple[int, ...]:
        """By rank."""
        return self.order[self.first_rank[group] : self.first_rank[group + 1]]

    def table(self) -> tuple[int, ...]:
        """As kernels read it: `order`, `first_rank`, and the seat of every SM."""
        seats = (value for sm in range(self.sm_count) for value in self.seat(sm))
        return (*self.order, *self.first_rank, *seats)

    def places(self, group: int, hit: Sequence[tuple[int, int]], place_pairs: int) -> tuple[tuple[int, int], ...]:
        """(expert, place) of a group in rank order; `hit` has (expert, pairs), a place has up to `place_pairs`."""
        pairs = dict(hit)
        assert len(pairs) == len(hit), "an expert is listed twice"
        return tuple(
            (expert, place)
            for expert in self.experts_of(group)
            for place in range(-(-pairs.get(expert, 0) // place_pairs))
        )

    def work(self, sm: int, hit: Sequence[tuple[int, int]], place_pairs: int, halves: bool = False) -> Work:
        """What one SM does of a step that hits these (expert, pairs)."""
        group, index, sms = self.seat(sm)
        places = self.places(group, hit, place_pairs)
        up, down = stretches(self.shapes, len(places), index, sms, halves)
        return Work(_units(places, self.shapes.up_panels, up), _units(places, self.shapes.down_panels, down))

    def unit_counts(
        self, hit: Sequence[tuple[int, int]], place_pairs: int, halves: bool = False
    ) -> list[tuple[int, int]]:
        """(first phase, second phase) units of every SM: the lengths of `work`."""
        counts = []
        for group, sms in enumerate(self.group_sms):
            places = len(self.places(group, hit, place_pairs))
            for index in range(sms):
                up, down = stretches(self.shapes, places, index, sms, halves)
                counts.append((sum(map(len, up)), sum(map(len, down))))
        return counts


def stretches(shapes: ExpertShapes, places: int, index: int, sms: int, halves: bool = False) -> Stretch:
    """What SM `index` of the `sms` of a group does.

    The first phase is shared evenly, and of the second each SM gets what makes its slots as many as every other's.
    Where that would take away from an earlier SM, both are shared evenly. With `halves` the first half of the places
    is shared evenly in both phases, where no SM's share of all is less than that, and the rest is of the second half.
    """
    ups, downs = places * shapes.up_panels, places * shapes.down_panels
    slots = ups * shapes.up_slots + downs * shapes.down_slots
    least_down = (slots // sms - -(-ups // sms) * shapes.up_slots) // shapes.down_slots - 1
    half = places // 2
    half_ups, half_downs = half * shapes.up_panels, half * shapes.down_panels
    if not (halves and ups // sms >= -(-half_ups // sms) and least_down >= -(-half_downs // sms)):
        half_ups = half_downs = 0
    edges = []
    for at in (index, index + 1):
        up = ups * at // sms
        down = (slots * at // sms - up * shapes.up_slots) // shapes.down_slots if least_down >= 0 else downs * at // sms
        up_of_half, down_of_half = half_ups * at // sms, half_downs * at // sms
        edges.append((up_of_half, half_ups + up - up_of_half, down_of_half, half_downs + down - down_of_half))
    first_up, second_up, first_down, second_down = map(range, *edges)
    return Stretch((first_up, second_up), (first_down, second_down))


def _units(places: Sequence[tuple[int, int]], panels: int, runs: tuple[range, range]) -> tuple[Unit, ...]:
    return tuple(Unit(*places[unit // panels], unit % panels) for units in runs for unit in units)


def group_count(kind: TopologyKind, experts: int, sm_count: int, group_sms: int) -> int:
    """Groups that a topology has: no more than experts, so that none is idle by construction."""
    return 1 if kind == "striped" else min(sm_count // group_sms, experts)


def table_size(groups: int, experts: int, sm_count: int) -> int:
    """Integers of `Topology.table`."""
    return experts + groups + 1 + 3 * sm_count


def place(
    shapes: ExpertShapes, sm_count: int, kind: TopologyKind, group_sms: int, counts: Sequence[int] | None = None
) -> Topology:
    """The topology of a layer on `sm_count` SMs; `counts` (traced) is how often a trace chose each expert.

    SMs that are left over go one each to the first groups. The same input gives the same result.
    """
    if kind != "striped" and not 1 <= group_sms <= sm_count:
        raise PlanError(
            f"groups of {group_sms} SMs on a card of {sm_count} SMs", hint=f"choose `group_sms` from 1 to {sm_count}"
        )
    groups = group_count(kind, shapes.experts, sm_count, group_sms)
    smaller, larger = divmod(sm_count, groups)
    sizes = tuple(smaller + (group < larger) for group in range(groups))
    if kind != "traced":
        return Topology(kind, shapes, sizes, tuple(expert % groups for expert in range(shapes.experts)))
    if counts is None or len(counts) != shapes.experts:
        found = "no counts" if counts is None else f"counts of {len(counts)}"
        raise PlanError(f"the trace has {found} experts, the layer {shapes.experts}")
    return Topology(kind, shapes, sizes, _balanced(sizes, counts))


def _balanced(group_sms: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Longest processing time first: the heaviest expert to the group that would be done first with it."""
    # Loads of groups of different size, compared without rounding.
    common = math.lcm(*group_sms)
    cost = [common // sms for sms in group_sms]
    load, held = [0] * len(group_sms), [0] * len(group_sms)
    group_of = [0] * len(counts)
    for expert in sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert)):
        count = counts[expert]
        # Unseen experts cost nothing: dealt by load they would all lie in one group.
        had, more = (load, count) if count else (held, 1)
        done = [(before + more) * each for before, each in zip(had, cost, strict=True)]
        _, _, group = min(zip(done, held, range(len(cost)), strict=True))
        group_of[expert] = group
        load[group] += count
        held[group] += 1
    return tuple(group_of)


def read_table(shapes: ExpertShapes, name: TopologyKind, sm_count: int, groups: int, values: Sequence[int]) -> Topology:
    """The topology whose `table` this is, with or without zeros behind it; raises ValueError where it is none.

    `topology_fault` in runtime/src/topology_table.h is the same rule.
    """
    experts = shapes.experts
    size = table_size(groups, experts, sm_count)
    if len(values) < size:
        raise ValueError("it is too short")
    order, first_rank = tuple(values[:experts]), tuple(values[experts : experts + groups + 1])
    if sorted(order) != list(range(experts)):
        raise ValueError("an expert is missing or there twice")
    # No group is without experts: there are no more groups than those.
    if list(first_rank) != sorted(set(first_rank)) or first_rank[0] != 0 or first_rank[-1] != experts:
        raise ValueError("the ranks of the groups do not cover the experts")
    group_of = [0] * experts
    for group, (first, end) in enumerate(pairwise(first_rank)):
        if list(order[first:end]) != sorted(order[first:end]):
            raise ValueError("the experts of a group do not ascend")
        for expert in order[first:end]:
            group_of[expert] = group
    seats = values[experts + groups + 1 : size]
    sizes = [0] * groups
    for group in seats[::3]:
        if 0 <= group < groups:
            sizes[group] += 1
    topology = Topology(name, shapes, tuple(sizes), tuple(group_of))
    if 0 in sizes or topology.table() != tuple(values[:size]):
        raise ValueError("the seats of the SMs do not follow the groups")
    if any(values[size:]):
        raise ValueError("behind it are numbers that belong to nothing")
    return topology
