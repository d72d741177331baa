"""What the manifest says of routed experts, against the launches and the constants of a lowered model."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.graph.annotations import Constant
from dsv4c.graph.builder import build_graph
from dsv4c.graph.topology import ExpertShapes, place
from dsv4c.kernels.assign import assign_kernels
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import ExecutionPlan
from dsv4c.plan.expert_facts import expert_facts
from dsv4c.plan.lowering import lower_graph
from dsv4c.recipe import ExpertsRecipe, Numerics, Recipe
from dsv4c.routing_trace import RoutingTrace
from tests.fixtures import TINY_OFFICIAL

SHAPES = ExpertShapes(experts=16, hidden=256, inner=128)
TRACE = RoutingTrace(
    "a trace", 16, {layer: tuple((expert * 7 + layer) % 16 for expert in range(16)) for layer in range(8)}
)
RECIPES = {
    "striped": ExpertsRecipe(),
    "pinned": ExpertsRecipe(topology="pinned", group_sms=12),
    "traced": ExpertsRecipe(topology="traced", group_sms=12, trace=TRACE),
    "checkpoint": ExpertsRecipe(layout="checkpoint"),
}


@cache
def lowered(name: str, numerics: Numerics = "reference") -> tuple[ExecutionPlan, Recipe]:
    recipe = replace(
        Recipe.for_target("h100", None).with_overrides(numerics=numerics),
        experts=RECIPES[name],
        decode_buckets=(1,),
        mixed_buckets=(16,),
    )
    checkpoint = open_checkpoint(Path(TINY_OFFICIAL))
    graph = build_graph(checkpoint.config, checkpoint.weights, recipe.numerics, recipe.rollback_rows)
    graph = run_passes(graph, build_pipeline(), PassContext(recipe.target, recipe))
    plan = lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)
    return assign_kernels(plan, recipe.target), recipe


def facts_of(name: str) -> dict[str, Any]:
    facts = expert_facts(*lowered(name))
    assert facts is not None
    return facts


@pytest.mark.parametrize("name", ("striped", "pinned", "traced"))
def test_facts(name: str) -> None:
    facts = facts_of(name)
    assert (facts["experts"], facts["per_token"], facts["hidden"], facts["inner"]) == (16, 4, 256, 128)
    assert facts["format"] == "fp4" and facts["expert_bytes"] == 3 * 256 * 128 * 17 // 32
    assert facts["topology"] == name and facts["sm_counts"] == [132, 114]
    assert facts["trace"] == (TRACE.digest if name == "traced" else None)
    assert [row["layer"] for row in facts["layers"]] == list(range(8))
    assert [row["choice"] for row in facts["layers"]] == ["hash"] * 2 + ["score"] * 6
    assert [row["tokens"] for row in facts["buckets"]] == [1, 16]
    assert {row["kernel"] for row in facts["buckets"]} == {"experts_stream"}
    assert all(row["place_pairs"] == 8 for row in facts["buckets"])
    assert [row["halves"] for row in facts["buckets"]] == [True, False]


@pytest.mark.parametrize("name", ("pinned", "traced"))
def test_tables_lie_where_the_facts_say(name: str) -> None:
    plan, _ = lowered(name)
    constants = {extent.offset: extent.what for extent in plan.weights.extents if isinstance(extent.what, Constant)}
    offsets = set()
    for row in facts_of(name)["layers"]:
        table = row["table"]
        offsets.add(table["offset"])
        constant = constants[table["offset"]]
        assert constant.dtype == torch.int32
        for sms, stored in zip((132, 114), zip(*[iter(constant.values)] * table["row"], strict=True), strict=True):
            counts = TRACE.layers[row["layer"]] if name == "traced" else None
            expected = place(SHAPES, sms, RECIPES[name].topology, 12, counts).table()
            assert stored == (*expected, *[0] * (table["row"] - len(expected)))
    # Experts are dealt alike in all layers unless a trace tells them apart.
    assert len(offsets) == (1 if name == "pinned" else 8)


def test_striped_has_no_tables() -> None:
    assert {row["table"] for row in facts_of("striped")["layers"]} == {None}


def test_several_launches_have_no_facts() -> None:
    assert expert_facts(*lowered("checkpoint")) is None
    assert expert_facts(*lowered("striped", "exact")) is None
