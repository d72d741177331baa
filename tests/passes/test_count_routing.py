"""Routers get an operator that counts their choices; nothing else changes, and the counts are the reference's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.testing import FileCheck

from dsv4c.errors import PassError
from dsv4c.graph.annotations import Numerics, get_state_layout
from dsv4c.graph.interpreter import Oracle
from dsv4c.graph.printer import format_graph
from dsv4c.passes.count_routing import count_routing
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.passes.place_experts import place_experts
from dsv4c.plan.lowering import lower_graph
from dsv4c.plan.printer import format_plan
from dsv4c.plan.reference_run import ReferenceRun
from dsv4c.recipe import ExpertsRecipe
from dsv4c.step_abi import StateKind
from tests.graph.small_models import (
    DECODE_BUCKETS,
    MIXED_BUCKETS,
    ROLLBACK_ROWS,
    SCHEDULE,
    checkpoint,
    context,
    final_graph,
    graph,
    schedule_logits,
    step_rows,
    until,
)


def counting(numerics: Numerics = "exact", target: str = "cpu", **experts: Any) -> PassContext:
    return context(numerics, target=target, experts=ExpertsRecipe(counts=True, **experts))


def final(name: str, ctx: PassContext) -> GraphModule:
    return run_passes(graph(name, ctx.recipe.numerics), build_pipeline(), ctx)


def reference_counts(name: str, gm: GraphModule, ids: str) -> list[list[int]]:
    """Of all steps of SCHEDULE, from the ids that the graph's own routers choose: nodes `l<layer>_<ids>`."""
    opened = checkpoint(name)
    oracle = Oracle(gm, opened, slots=2, context=256)
    config = opened.config
    counts = torch.zeros(config.num_hidden_layers, config.n_routed_experts, dtype=torch.int64)
    for step in SCHEDULE:
        trace: dict[str, Tensor] = {}
        oracle.step(*step_rows(step, config.vocab_size), trace=trace)
        for layer, row in enumerate(counts):
            for expert in trace[f"l{layer}_{ids}"].flatten().tolist():
                row[expert] += 1
    found: list[list[int]] = counts.tolist()
    return found


def counted(name: str, gm: GraphModule) -> list[list[int]]:
    """What the graph has counted after SCHEDULE, on state that starts as NaN where it is none to add to."""
    opened = checkpoint(name)
    oracle = Oracle(gm, opened, slots=2, context=256, poison=True)
    for step in SCHEDULE:
        oracle.step(*step_rows(step, opened.config.vocab_size))
    return [oracle.state[f"s_l{layer}_routing_counts"][0].tolist() for layer in range(len(opened.config.layers))]


def test_before_and_after() -> None:
    """`narrow` hashes layer 0 and scores the others."""
    gm = until(graph("narrow"), insert_fp8_kv)
    text = format_graph(gm)
    assert not count_routing(gm, context()).modified and format_graph(gm) == text
    assert run_passes(gm, [count_routing], counting()) is gm
    FileCheck().run(
        """
        # CHECK: %s_l0_routing_counts : int64[1, 5] = state, 5 rows a session
        # CHECK: %s_l1_routing_counts : int64[1, 5] = state, 5 rows a session
        # CHECK: %l0_route_ids : int32[T, 2] = getitem(%l0_route, 0)
        # CHECK-NEXT: %l0_count_routing : () = dsv4.count_routing(%l0_route_ids, %s_l0_routing_counts)
        # CHECK: dsv4.moe_ffn(%l0_ffn_norm, %l0_route_ids, %l0_route_weights,
        # CHECK: %l1_count_routing : () = dsv4.count_routing(%l1_route_ids, %s_l1_routing_counts)
        """,
        format_graph(gm),
    )
    kept = [line for line in format_graph(gm).splitlines() if "routing" not in line]
    assert kept == text.splitlines()


def test_twice_and_without_routers_is_refused() -> None:
    gm = run_passes(until(graph("narrow"), insert_fp8_kv), [count_routing], counting())
    layers = len(checkpoint("narrow").config.layers)
    with pytest.raises(PassError, match=f"found 0 routers to count; the model has {layers}"):
        count_routing(gm, counting())
    with pytest.raises(PassError, match=f"found 0 routers to count; the model has {layers}") as raised:
        count_routing(graph("narrow"), counting())
    assert raised.value.hint is not None and "fuse_router" in raised.value.hint


def test_counts_are_those_of_the_models_own_router() -> None:
    name = "narrow"
    gm = final(name, counting())
    found = counted(name, gm)
    rows = sum(len(run) for step in SCHEDULE for _, run in step)
    assert {sum(row) for row in found} == {rows * checkpoint(name).config.num_experts_per_tok}
    # The graph as the model is written: aten, before any pass.
    assert found == reference_counts(name, graph(name), "ffn_ids")
    expected = schedule_logits(final_graph(name, "exact"), checkpoint(name))
    found_logits = schedule_logits(gm, checkpoint(name))
    assert all(torch.equal(a, b) for a, b in zip(expected, found_logits, strict=True))


def test_experts_are_placed_all_the_same() -> None:
    """On Hopper the router is part of `placed_experts`; another one stays, for the counts."""
    ctx = counting("reference", "h100")
    gm = final("two_even", ctx)
    FileCheck().run(
        """
        # CHECK: %l0_route : (int32[T, 2], float32[T, 2]) = dsv4.route_hash(%l0_ffn_logits, %p_layers_0_ffn_gate_tid2eid_stored, %token_ids, 1.0)
        # CHECK-NEXT: %l0_route_ids : int32[T, 2] = getitem(%l0_route, 0)
        # CHECK-NEXT: %l0_count_routing : () = dsv4.count_routing(%l0_route_ids, %s_l0_routing_counts)
        # CHECK: %l0_placed_experts : float32[T, 256] = dsv4.placed_experts(%l0_mhc_normed_1, %l0_ffn_logits, None, %p_layers_0_ffn_gate_tid2eid_stored, %token_ids,
        # CHECK: %l1_count_routing : () = dsv4.count_routing(%l1_route_ids, %s_l1_routing_counts)
        # CHECK: %l1_placed_experts : float32[T, 256] = dsv4.placed_experts(%l1_mhc_normed_1, %l1_ffn_logits, %p_layers_1_ffn_gate_bias_stored, None,
        """,  # noqa: E501
        format_graph(gm),
    )
    assert "moe_ffn" not in format_graph(gm)
    plain = final("two_even", context("reference", target="h100"))
    assert "count" not in format_graph(plain) and "dsv4.route" not in format_graph(plain)
    opened = checkpoint("two_even")
    pairs = zip(schedule_logits(plain, opened), schedule_logits(gm, opened), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # What `placed_experts` itself chooses: it is the router and the experts as they were before.
    passes = build_pipeline()
    unplaced = run_passes(graph("two_even", "reference"), passes[: passes.index(place_experts)], ctx)
    assert counted("two_even", gm) == reference_counts("two_even", unplaced, "route_ids")


def test_another_use_of_the_choice_is_none_of_the_counting() -> None:
    ctx = counting("reference", "h100")
    passes = build_pipeline()
    gm = run_passes(graph("two_even", "reference"), passes[: passes.index(place_experts)], ctx)
    n = {node.name: node for node in gm.graph.nodes}
    n["l0_ffn_sum"].args = (n["l0_moe_ffn"], n["l0_route_ids"], torch.bfloat16)
    place_experts(gm, ctx)
    assert "%l0_placed_experts" not in format_graph(gm) and "%l1_placed_experts" in format_graph(gm)


def test_experts_that_are_not_placed_are_counted_too() -> None:
    gm = final("two_even", counting("reference", "h100", layout="checkpoint"))
    text = format_graph(gm)
    assert text.count("dsv4.count_routing") == text.count("dsv4.moe_ffn") == text.count("= dsv4.route_") == 2


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_the_plan(target: str) -> None:
    """It counts rows, not the capacity of buckets, and says what the counts take."""
    opened = checkpoint("two_even")
    gm = final("two_even", counting("reference", target))
    plain = get_state_layout(final("two_even", context("reference", target=target)))
    plan = lower_graph(gm, DECODE_BUCKETS, MIXED_BUCKETS, ROLLBACK_ROWS)
    assert plan.state.session_bytes == 2 * 5 * 8 and plain.session_bytes == 0
    assert (plan.state.slot_bytes, plan.state.block_bytes) == (plain.slot_bytes, plain.block_bytes)
    counts = [plane for plane in plan.state.planes if plane.kind is StateKind.ROUTING_COUNTS]
    assert [(plane.layer, plane.rows, plane.row_bytes) for plane in counts] == [(0, 5, 8), (1, 5, 8)]
    index = plan.state.planes.index(counts[1])
    FileCheck().run(
        f"""
        # CHECK: state {index} %s_l1_routing_counts: 5 rows of 8 bytes a session
        # CHECK: %l1_count_routing = count_routing(arena
        # CHECK-SAME: i32[T, 2], state{index}+0 i64[1, 5]) -> ()
        """,
        format_plan(plan),
    )
    launch = next(launch for launch in plan.buckets[-1].launches if launch.kernel == "count_routing")
    # Ids are read, counts read and written.
    assert (launch.bytes_moved, launch.flops) == (MIXED_BUCKETS[-1] * 2 * (4 + 2 * 8), 0)
    run = ReferenceRun(plan, opened, slots=2, context=256)
    oracle = Oracle(gm, opened, slots=2, context=256)
    for bucket, step in zip((-1, -1, 1), SCHEDULE, strict=True):
        rows = step_rows(step, opened.config.vocab_size)
        assert torch.equal(run.step(plan.buckets[bucket], *rows), oracle.step(*rows))
    for plane in counts:
        state = run._state[plan.state.planes.index(plane)]
        assert torch.equal(state.view(torch.int64), oracle.state[plane.name][0])
