"""What plans and builds say of routed experts: their size against the L2 cache, the refusal to keep them there."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from dsv4c.compiler import build_engine
from dsv4c.errors import RecipeError
from dsv4c.planning.expert_budget import l2_text
from dsv4c.planning.layers import plan_model
from dsv4c.planning.model_plan import PlanOptions, make_plan
from dsv4c.planning.roofline import decode_traffic
from dsv4c.planning.source import open_source
from dsv4c.planning.tables import render
from dsv4c.planning.targets import PLAN_TARGETS, find_plan_target, plan_recipe
from dsv4c.planning.text import plan_sections
from dsv4c.recipe import ExpertsRecipe, Recipe
from tests.fixtures import TINY_OFFICIAL
from tests.header_only import RELEASED, write_config


@cache
def flash() -> Path:
    return write_config(Path(mkdtemp(prefix="dsv4c-config-")) / "flash", RELEASED["flash"])


def plan_of(model: Path, target: str) -> dict[str, Any]:
    found = find_plan_target(target)
    return make_plan(open_source(model), found, plan_recipe(found, None), PlanOptions())


def test_experts_of_flash_against_the_card_s_cache() -> None:
    one = 3 * 4096 * 2048 * 17 // 32
    plan = plan_of(flash(), "h100")
    experts = plan["experts"]
    assert experts["l2_bytes"] == 50 << 20 and experts["notes"] == []
    assert (experts["one_bytes"], experts["layer_bytes"]) == (one, 256 * one)
    assert experts["total_bytes"] == 43 * 256 * one
    hits = {hit["tokens"]: hit for hit in experts["hits"]}
    assert hits[1] == {"tokens": 1, "experts": pytest.approx(6), "size_bytes": 6 * one}
    stream = next(kernel for kernel in experts["kernels"] if kernel["kernel"] == "experts_stream")
    assert stream["blocks_per_sm"] >= 1 and stream["shared_bytes"] <= stream["most_shared_bytes"]
    text = render([], plan_sections(plan), [], terminal=False)
    assert "Routed experts against the L2 cache" in text and "13.37 MB" in text and l2_text(50 << 20) in text


def test_caches_of_other_targets() -> None:
    assert plan_of(TINY_OFFICIAL, "h200")["experts"]["l2_bytes"] == 60 << 20
    assert plan_of(TINY_OFFICIAL, "cpu")["experts"]["l2_bytes"] is None


def resident(recipe: Recipe) -> Recipe:
    assert recipe.experts is not None
    return replace(recipe, experts=replace(recipe.experts, l2_resident="experts"))


def test_experts_in_the_cache_are_refused_where_they_do_not_fit() -> None:
    target = find_plan_target("h100")
    recipe = resident(plan_recipe(target, None))
    with pytest.raises(RecipeError, match=r"one expert is 13\.37 MB, the 256 of a layer 3\.42 GB.* is 52\.43 MB"):
        make_plan(open_source(flash()), target, recipe, PlanOptions())
    # Those of the test model are 6.7 MB.
    (note,) = make_plan(open_source(TINY_OFFICIAL), target, recipe, PlanOptions())["experts"]["notes"]
    assert "fit the L2 cache of 52.43 MB (50 MiB) by themselves" in note


def test_build_refuses_experts_in_the_cache_before_it_reads_weights(tmp_path: Path) -> None:
    """A cache of 8 MB, as the test model is small."""
    target = replace(PLAN_TARGETS["h100"], l2_bytes=8 << 20)
    recipe = resident(Recipe.for_target("h100", None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLAN_TARGETS, "h100", target)
        patch.setattr("dsv4c.compiler.scan_checkpoint", lambda *_, **__: pytest.fail("weights were read"))
        with pytest.raises(RecipeError, match="they do not fit the L2 cache of H100 SXM 80 GB"):
            build_engine(TINY_OFFICIAL, recipe, tmp_path / "e.dsv4c", force=True)
    assert list(tmp_path.iterdir()) == []


def test_layout_of_experts_changes_no_traffic_of_weights() -> None:
    target = find_plan_target("h100")
    recipe = plan_recipe(target, None)
    source = open_source(TINY_OFFICIAL)
    packed, plain, pinned = (
        decode_traffic(plan_model(source.config, source.weights, replace(recipe, experts=chosen)))
        for chosen in (
            ExpertsRecipe(),
            ExpertsRecipe(layout="checkpoint"),
            ExpertsRecipe(topology="pinned", group_sms=12),
        )
    )
    assert packed.experts == plain.experts == pinned.experts
    assert packed.fixed_bytes == plain.fixed_bytes
    # Both SM counts' tables; a step reads one.
    assert 0 < pinned.weight_bytes(1) - packed.weight_bytes(1) < 100_000
