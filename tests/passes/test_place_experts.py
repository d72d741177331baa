"""Router and experts become one operator over packed weights on Hopper; not one bit of the logits changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from dsv4c.errors import PassError, RecipeError
from dsv4c.graph.annotations import Constant, Numerics, get_placeholder, set_placeholder, unplaced_experts
from dsv4c.graph.interpreter import Oracle
from dsv4c.graph.printer import format_graph
from dsv4c.graph.topology import ExpertShapes, place
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.passes.place_experts import place_experts
from dsv4c.recipe import ExpertsRecipe, WeightsRecipe
from dsv4c.routing_trace import RoutingTrace
from tests.fixtures import Quantization
from tests.graph.small_models import checkpoint, context, graph, schedule_logits

dsv4 = torch.ops.dsv4


def hopper(numerics: Numerics = "reference", weights: WeightsRecipe | None = None, **experts: Any) -> PassContext:
    return context(numerics, target="h100", experts=ExpertsRecipe(**experts), weights=weights or WeightsRecipe())


def before(name: str = "two_even", stored: Quantization = "fp8_fp4", ctx: PassContext | None = None) -> GraphModule:
    """The graph as the pass gets it."""
    ctx = ctx or hopper()
    passes = build_pipeline()
    gm = graph(name, ctx.recipe.numerics, stored)
    return run_passes(gm, passes[: passes.index(insert_fp8_kv) + 1], ctx)


def test_before_and_after() -> None:
    gm = run_passes(before(), [place_experts], hopper())
    text = format_graph(gm)
    FileCheck().run(
        """
        # CHECK: %p_layers_0_ffn_experts_packed : float4_e2m1fn_x2[5, 52224] = weight packed of layers.0.ffn.experts.{expert}.w1.weight + layers.0.ffn.experts.{expert}.w3.weight + layers.0.ffn.experts.{expert}.w2.weight (fp4_group 1x32, 5 experts)
        # CHECK: %p_layers_1_ffn_experts_packed : float4_e2m1fn_x2[5, 52224] =
        # CHECK: %l0_placed_experts : float32[T, 256] = dsv4.placed_experts(%l0_ffn_norm, %l0_ffn_logits, None, %p_layers_0_ffn_gate_tid2eid_stored, %token_ids, %p_layers_0_ffn_experts_packed, None, 128, 2, 1.0, 10.0, 0)
        # CHECK: %l0_ffn_sum : bfloat16[T, 256] = dsv4.add(%l0_placed_experts
        # CHECK: %l1_placed_experts : float32[T, 256] = dsv4.placed_experts(%l1_ffn_norm, %l1_ffn_logits, %p_layers_1_ffn_gate_bias_stored, None, None, %p_layers_1_ffn_experts_packed, None, 128, 2, 1.0, 10.0, 0)
        """,  # noqa: E501
        text,
    )
    assert "moe_ffn" not in text and "route" not in text and "ffn_experts_w" not in text
    assert not place_experts(gm, hopper()).modified


@pytest.mark.parametrize(
    ("stored", "experts"), [("fp8_fp4", "stored"), ("fp8", "stored"), ("bf16", "fp4"), ("bf16", "fp8")]
)
def test_the_numbers_stay(stored: Quantization, experts: Any) -> None:
    ctx = hopper(weights=WeightsRecipe(experts=experts))
    opened = checkpoint("two_even", stored)
    gm = before(stored=stored, ctx=ctx)
    expected = schedule_logits(gm, opened)
    gm = run_passes(gm, [place_experts], ctx)
    kind = "float8_e4m3fn[5, 98496]" if "fp8" in (stored, experts) else "float4_e2m1fn_x2[5, 52224]"
    assert f"%p_layers_0_ffn_experts_packed : {kind}" in format_graph(gm)
    assert all(torch.equal(a, b) for a, b in zip(expected, schedule_logits(gm, opened), strict=True))


def tables(gm: GraphModule) -> dict[str, Constant]:
    found = {node.name: get_placeholder(node) for node in gm.graph.nodes if node.op == "placeholder"}
    return {name: what for name, what in found.items() if isinstance(what, Constant) and "topology" in name}


SHAPES = ExpertShapes(5, 256, 128)


def test_pinned_experts_share_a_table() -> None:
    gm = run_passes(before(), [place_experts], hopper(topology="pinned", group_sms=40))
    FileCheck().run(
        """
        # CHECK: %c_expert_topology : int32[2, 405] = constant of 810 integers
        # CHECK: dsv4.placed_experts(%l0_ffn_norm, %l0_ffn_logits
        # CHECK-SAME: %p_layers_0_ffn_experts_packed, %c_expert_topology, 128, 2, 1.0, 10.0, 40)
        # CHECK: %p_layers_1_ffn_experts_packed, %c_expert_topology, 128, 2, 1.0, 10.0, 40)
        """,
        format_graph(gm),
    )
    (what,) = tables(gm).values()
    large, small = (place(SHAPES, sms, "pinned", 40).table() for sms in (132, 114))
    assert what.values == large + small + (0,) * (len(large) - len(small))
    opened = checkpoint("two_even")
    expected = Oracle(before(), opened).step([1, 2], [0, 0], [0, 1])
    assert torch.equal(expected, Oracle(gm, opened).step([1, 2], [0, 0], [0, 1]))


def test_traced_experts_have_a_table_a_layer() -> None:
    counts = {0: (1, 1, 1, 1, 100), 1: (50, 1, 1, 1, 1)}
    trace = RoutingTrace("a test", 5, counts)
    gm = run_passes(before(), [place_experts], hopper(topology="traced", group_sms=32, trace=trace))
    found = tables(gm)
    assert list(found) == ["c_layers_0_expert_topology", "c_layers_1_expert_topology"]
    for (layer, row), what in zip(counts.items(), found.values(), strict=True):
        table = place(SHAPES, 132, "traced", 32, row).table()
        assert what.layer == layer and what.values[: len(table)] == table
    other = replace(trace, layers={0: counts[0]})
    with pytest.raises(RecipeError, match="has no counts of layer 1"):
        run_passes(before(), [place_experts], hopper(topology="traced", group_sms=32, trace=other))


def test_groups_larger_than_the_smallest_card_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"group_sms` is 120; an engine for 'h100' is for cards of 114 and 132 SMs"):
        hopper(topology="pinned", group_sms=120)
    # As large as it: a group on either card.
    run_passes(before(), [place_experts], hopper(topology="pinned", group_sms=114))


def test_other_targets_and_layouts_keep_their_operators() -> None:
    gm = before()
    text = format_graph(gm)
    for ctx in (context("reference"), hopper(layout="checkpoint")):
        assert not place_experts(gm, ctx).modified and format_graph(gm) == text


def other_user_of_ids(n: dict[str, Node]) -> None:
    n["l0_ffn_sum"].args = (n["l0_moe_ffn"], n["l0_route_weights"], torch.bfloat16)


def other_router(n: dict[str, Node]) -> None:
    n["l0_moe_ffn"].args = (n["l0_ffn_norm"], n["l1_route_ids"], *n["l0_moe_ffn"].args[2:])


def other_rounding(n: dict[str, Node]) -> None:
    n["l0_moe_ffn"].args = (*n["l0_moe_ffn"].args[:-1], 64)


def other_storage_of_w2(n: dict[str, Node]) -> None:
    node = n["p_layers_0_ffn_experts_w2_stored_codes"]
    set_placeholder(node, replace(get_placeholder(node), float_scales=True))  # type: ignore[type-var]


NEAR_MISSES: list[tuple[Callable[[dict[str, Node]], None], str]] = [
    (other_user_of_ids, "something else uses the choice of their router"),
    (other_router, "something else uses the choice of their router"),
    (other_rounding, "their inputs are not rounded to FP8 in groups of 128"),
    (other_storage_of_w2, "they are not FP4 or FP8 in blocks of 128x128"),
]


@pytest.mark.parametrize(("alter", "reason"), NEAR_MISSES)
def test_near_misses_stay(alter: Callable[[dict[str, Node]], None], reason: str) -> None:
    gm = before()
    alter({node.name: node for node in gm.graph.nodes})
    text = format_graph(gm)
    line = next(line for line in text.splitlines() if line.startswith("%l0_moe_ffn"))
    place_experts(gm, hopper())
    assert line in format_graph(gm) and "%l0_placed_experts" not in format_graph(gm)
    with pytest.raises(PassError, match=f'"pinned".: {reason}') as raised:
        place_experts(gm, hopper(topology="pinned"))
    assert raised.value.message.startswith("%l0_moe_ffn: the experts cannot be placed")
    assert raised.value.hint is not None and "striped" in raised.value.hint


@pytest.mark.parametrize(
    ("name", "stored", "numerics", "reason"),
    [
        ("two_even", "fp8_fp4", "exact", "their inputs are not rounded"),
        ("two_even", "bf16", "reference", "their inputs are not rounded"),
        ("one_layer", "fp8_fp4", "reference", "in widths that 128 divides"),
    ],
)
def test_models_that_do_not_fit_stay(name: str, stored: Quantization, numerics: Numerics, reason: str) -> None:
    gm = before(name, stored, hopper(numerics))
    assert not place_experts(gm, hopper(numerics)).modified
    with pytest.raises(PassError, match=reason):
        place_experts(gm, hopper(numerics, topology="pinned"))


def test_more_choices_than_there_is_room_for() -> None:
    gm = before("one_even")
    n = {node.name: node for node in gm.graph.nodes}
    n["l0_route"].args = (*n["l0_route"].args[:2], 17, 1.5)
    with pytest.raises(PassError, match="5 of them and 17 a token, at most 512 and 16 fit"):
        place_experts(gm, hopper(topology="pinned"))


def test_one_choice_a_token() -> None:
    """One place would need all SMs at once (dsv4c/kernels/experts.md)."""
    gm = before("one_even")
    n = {node.name: node for node in gm.graph.nodes}
    n["l0_route"].args = (*n["l0_route"].args[:2], 1, 1.5)
    assert not place_experts(gm, hopper()).modified
    assert "a token has one expert" in (unplaced_experts(gm) or "")
