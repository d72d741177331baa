"""Topology tables: what the runtime refuses when an engine is opened is what `read_table` refuses, for the same reason.

That opening an engine for a GPU looks at them is tested in cuda_cases.py.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4c.graph.topology import ExpertShapes, Topology, TopologyKind, group_count, place, read_table
from dsv4c.kernels.assign import assign_kernels
from dsv4c.passes.pass_manager import run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import TensorRef
from dsv4c.plan.lowering import lower_graph
from dsv4c.recipe import ExpertsRecipe
from dsv4c.routing_trace import RoutingTrace
from dsv4c.step_abi import DType, Space
from tests.graph.small_models import ROLLBACK_ROWS, context, graph
from tests.runtime.kernel_runner import topology_fault

SHAPES = ExpertShapes(experts=16, hidden=256, inner=128)
KINDS: tuple[TopologyKind, ...] = ("pinned", "traced")


def python_fault(found: Topology, values: list[int]) -> str | None:
    try:
        read_table(found.shapes, found.name, found.sm_count, found.groups, values)
    except ValueError as error:
        return str(error)
    return None


def compare(found: Topology, values: list[int]) -> str | None:
    fault = topology_fault(values, found.shapes.experts, found.groups, found.sm_count)
    assert fault == python_fault(found, values)
    return fault


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    shapes = ExpertShapes(draw(st.integers(1, 24)), 128, 128)
    sm_count = draw(st.integers(1, 24))
    counts = draw(st.lists(st.integers(0, 9), min_size=shapes.experts, max_size=shapes.experts))
    return place(shapes, sm_count, draw(st.sampled_from(KINDS)), draw(st.integers(1, sm_count)), counts)


@settings(deadline=None)
@given(topologies(), st.integers(0, 5))
def test_good_tables(found: Topology, zeros: int) -> None:
    assert compare(found, [*found.table(), *[0] * zeros]) is None


@settings(deadline=None, max_examples=500)
@given(topologies(), st.data())
def test_numbers_that_changed(found: Topology, data: st.DataObject) -> None:
    values = [*found.table(), *[0] * data.draw(st.integers(0, 4))]
    before = list(values)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(values) - 1))
        values[at] = data.draw(st.integers(-2, 30) | st.sampled_from((2**31 - 1, -(2**31))))
    # Experts that changed places are another table, not a damaged one.
    experts = found.shapes.experts
    sound = values[experts:] == before[experts:] and sorted(values[:experts]) == sorted(before[:experts])
    assert (compare(found, values) is None) == sound


@settings(deadline=None, max_examples=300)
@given(topologies(), st.data())
def test_parts_that_moved(found: Topology, data: st.DataObject) -> None:
    """Every number is one that a table has: swapped, cut off, or of a topology of another card."""
    values = list(found.table())
    first, second = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    values[first], values[second] = values[second], values[first]
    compare(found, values[: data.draw(st.integers(0, len(values)))])
    other = data.draw(topologies())
    compare(found, list(other.table()))


def _edit(at: int, value: int) -> list[int]:
    values = list(place(SHAPES, 132, "pinned", 16).table())
    values[at] = value
    return values


RANKS, SEATS = 16, 16 + 9  # 8 groups of 16 or 17 SMs, 2 experts each


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (_edit(0, 16), "an expert is missing or there twice"),
        (_edit(0, -1), "an expert is missing or there twice"),
        (_edit(0, 2**31 - 1), "an expert is missing or there twice"),
        (_edit(0, 1), "an expert is missing or there twice"),
        ([8, 0, *_edit(0, 0)[2:]], "the experts of a group do not ascend"),
        (_edit(RANKS, 1), "the ranks of the groups do not cover the experts"),
        (_edit(RANKS + 1, 0), "the ranks of the groups do not cover the experts"),
        (_edit(RANKS + 1, -5), "the ranks of the groups do not cover the experts"),
        (_edit(RANKS + 1, 2**31 - 1), "the ranks of the groups do not cover the experts"),
        (_edit(RANKS + 8, 15), "the ranks of the groups do not cover the experts"),
        (_edit(SEATS, 8), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS, -1), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS + 1, 1), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS + 2, 0), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS + 2, 133), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS + 2, -(2**31)), "the seats of the SMs do not follow the groups"),
        (_edit(SEATS + 3 * 131 + 1, 99), "the seats of the SMs do not follow the groups"),
        ([*_edit(0, 0), 0, 1], "behind it are numbers that belong to nothing"),
        (_edit(0, 0)[:-1], "it is too short"),
        (_edit(0, 0)[:10], "it is too short"),
        ([], "it is too short"),
        # Of a card with fewer SMs, as the row of another product beside it is.
        ([*place(SHAPES, 114, "pinned", 14).table(), *[0] * 54], "the seats of the SMs do not follow the groups"),
    ],
)
def test_what_is_refused(values: list[int], fault: str) -> None:
    assert compare(place(SHAPES, 132, "pinned", 16), values) == fault


def test_a_long_table() -> None:
    counts = [random.Random(0).randrange(1000) for _ in range(512)]
    found = place(ExpertShapes(512, 7168, 3072), 148, "traced", 1, counts)
    assert compare(found, list(found.table())) is None


@pytest.mark.parametrize("topology", [None, *KINDS])
def test_the_calls_that_multiply_say_how_many_there_are(topology: TopologyKind | None) -> None:
    """`check_topologies` takes experts and groups from three arguments in a row."""
    trace = RoutingTrace("a test", 5, {0: (1, 2, 3, 4, 5), 1: (5, 4, 3, 2, 1)}) if topology == "traced" else None
    chosen = ExpertsRecipe(topology=topology or "striped", group_sms=40, trace=trace)
    ctx = context("reference", target="h100", experts=chosen)
    gm = run_passes(graph("two_even", "reference", "fp8_fp4"), build_pipeline(), ctx)
    plan = assign_kernels(lower_graph(gm, (1,), (16, 64, 1024), ROLLBACK_ROWS), ctx.target)
    kernels = set()
    for bucket in plan.buckets:
        for launch in (each for each in bucket.launches if each.kernel == "placed_experts"):
            tables = [arg for call in launch.calls for arg in call.args if _is_list(arg, Space.WEIGHT)]
            assert len(tables) == (2 if topology else 0) and len(set(tables)) == bool(topology)
            call = launch.calls[-1]
            kernels.add(call.variant.entry)
            (at,) = (i for i, arg in enumerate(call.args) if arg.dtype is DType.F4E2M1X2)
            groups = group_count(topology or "striped", 5, bucket.sm_count, 40)
            heads = call.args[at - 2 if topology else at - 1]
            assert call.args[at].sizes[0] == 5 and _is_list(heads, Space.ARENA) and heads.sizes == (groups + 1,)
            assert not topology or call.args[at - 1] == tables[0]
    assert kernels == {"experts_stream", "experts_prefill"}


def _is_list(ref: TensorRef, space: Space) -> bool:
    return ref.space is space and ref.dtype is DType.I32 and len(ref.sizes) == 1 and ref.strides == (1,)
