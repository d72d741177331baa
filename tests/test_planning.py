"""Plans against the spec's totals, against whole models, and against what build and runtime really take."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from dsv4c.checkpoint.checkpoint import WeightInfo, expected_weights, open_checkpoint
from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding
from dsv4c.compiler import build_engine
from dsv4c.engine.reader import read_engine
from dsv4c.errors import InputError, PlanError, RecipeError
from dsv4c.graph.builder import build_graph
from dsv4c.inspection import summarize_checkpoint
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import ExecutionPlan
from dsv4c.plan.lowering import lower_graph
from dsv4c.planning.kernels import kernel_uses
from dsv4c.planning.layers import ModelPlan, plan_model
from dsv4c.planning.model_plan import PlanOptions, make_plan
from dsv4c.planning.roofline import decode_traffic
from dsv4c.planning.source import open_source, released_weights
from dsv4c.planning.splits import check_ep, check_tp
from dsv4c.planning.targets import PLAN_TARGETS, find_plan_target, plan_recipe
from dsv4c.recipe import ExpertsRecipe, Numerics, Recipe, WeightsRecipe
from dsv4c.routing_trace import RoutingTrace
from dsv4c.runtime.engine import Engine
from dsv4c.target import find_target
from tests.fixtures import TINY_OFFICIAL, Naming, config_of, random_weights, tiny_config_json, write_checkpoint
from tests.header_only import RELEASED, write_config, write_header_only
from tests.model_cases import CONFIGS

# Spec section 1: tensors and payload bytes, draft module included.
TOTALS = {
    "flash": (69_187, 159_609_485_896),
    "flash-0731": (72_317, 166_878_536_440),
    "pro": (145_116, 864_704_792_696),
    "pro-0813": (149_782, 892_727_580_904),
}
NAMES = {
    "flash": "V4-Flash preview (284B / 13B parameters), MTP draft module",
    "flash-0731": "V4-Flash 0731 (284B / 13B parameters), DSpark draft module",
    "pro": "V4-Pro preview (1.6T / 49B parameters), MTP draft module",
    "pro-0813": "V4-Pro 0813 (1.6T / 49B parameters), DSpark draft module",
}
# Spec section 3: bytes of one sequence at 8K, 128K and 1M positions, FP8 KV.
STATE = {
    ("flash", "fp4"): (44.2e6, 476.0e6, 3.700e9),
    ("flash", "fp8"): (47.0e6, 520.1e6, 4.053e9),
    ("pro", "fp4"): (64.5e6, 682.8e6, 5.299e9),
    ("pro", "fp8"): (68.4e6, 745.7e6, 5.802e9),
}
# Every kind of layer more than once, in another order than the released models, and a few hash layers.
MIXED = tiny_config_json(
    num_hidden_layers=9,
    compress_ratios=[0, 0, 4, 128, 4, 128, 4, 0, 128],
    num_hash_layers=3,
    num_nextn_predict_layers=0,
    expert_dtype="fp4",
)
CASES = {**CONFIGS, "mixed": MIXED}


@cache
def config_folder(name: str) -> Path:
    return write_config(Path(mkdtemp(prefix="dsv4c-config-")) / name, RELEASED[name])


@cache
def plan_of(name: str, target: str, **options: Any) -> dict[str, Any]:
    found = find_plan_target(target)
    return make_plan(open_source(config_folder(name)), found, plan_recipe(found, None), PlanOptions(**options))


def whole_plan(config: ModelConfig, weights: dict[str, WeightInfo], recipe: Recipe) -> ExecutionPlan:
    graph = build_graph(config, weights, recipe.numerics, recipe.rollback_rows)
    graph = run_passes(graph, build_pipeline(), PassContext(recipe.target, recipe))
    return lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)


def check_against(plan: ModelPlan, whole: ExecutionPlan) -> None:
    assert plan.weight_bytes == whole.weights.size_bytes
    state = whole.state
    assert (plan.slot_bytes, plan.block_bytes) == (state.slot_bytes, state.block_bytes)
    assert plan.session_bytes == state.session_bytes
    assert sum(total.size_bytes for total in plan.class_totals()) == sum(e.size_bytes for e in whole.weights.extents)
    for mine, bucket in zip(plan.buckets, whole.buckets, strict=True):
        assert (mine.tokens, mine.launches, mine.arena_bytes) == (
            bucket.tokens,
            len(bucket.launches),
            bucket.arena_bytes,
        )
        assert mine.bytes_moved == sum(launch.bytes_moved for launch in bucket.launches)
        assert mine.flops == sum(launch.flops for launch in bucket.launches)


@pytest.mark.parametrize("numerics", ["exact", "reference"])
@pytest.mark.parametrize("name", list(CASES))
def test_one_layer_a_kind_gives_the_plan_of_the_whole_model(name: str, numerics: Numerics) -> None:
    config = config_of(CASES[name])
    weights = released_weights(expected_weights(config), config)
    recipe = Recipe.for_target("cpu", None).with_overrides(numerics=numerics)
    recipe = replace(recipe, decode_buckets=(1, 4), mixed_buckets=(128,))
    check_against(plan_model(config, weights, recipe), whole_plan(config, weights, recipe))


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_routing_counts_are_counted_to_the_byte(target: str) -> None:
    config = config_of(CASES["narrow"])
    weights = released_weights(expected_weights(config), config)
    plain = Recipe(find_target(target), decode_buckets=(1,), mixed_buckets=(16,))
    recipe = replace(plain, experts=ExpertsRecipe(counts=True))
    plan, whole = plan_model(config, weights, recipe), whole_plan(config, weights, recipe)
    if target == "cpu":  # elsewhere the arena of the plan has the kernels' scratch
        check_against(plan, whole)
    assert plan.session_bytes == whole.state.session_bytes == len(config.layers) * config.n_routed_experts * 8
    without = plan_model(config, weights, plain)
    for slots in (1, 5):
        # Of a session, however many slots it has. Planes begin on 64 bytes.
        padded = len(config.layers) * -(-config.n_routed_experts * 8 // 64) * 64
        assert plan.state_bytes(slots, 4096) - without.state_bytes(slots, 4096) == padded
    for counted, bucket in zip(plan.buckets, without.buckets, strict=True):
        # The experts of this model are not placed: their routers are launches of their own anyhow.
        assert counted.launches == bucket.launches + len(config.layers)


@pytest.mark.parametrize("topology", ["striped", "pinned", "traced"])
def test_packed_experts_and_their_topologies_are_counted_to_the_byte(topology: Any) -> None:
    config = config_of(MIXED)
    weights = released_weights(expected_weights(config), config)
    counts = dict.fromkeys(range(config.num_hidden_layers), (1,) * config.n_routed_experts)
    trace = RoutingTrace("a test", config.n_routed_experts, counts) if topology == "traced" else None
    recipe = replace(
        Recipe.for_target("h100", None),
        experts=ExpertsRecipe(topology=topology, trace=trace),
        decode_buckets=(1,),
        mixed_buckets=(16,),
    )
    plan, whole = plan_model(config, weights, recipe), whole_plan(config, weights, recipe)
    assert plan.weight_bytes == whole.weights.size_bytes
    sizes = dict.fromkeys(Encoding, 0)
    for total in plan.class_totals():
        sizes[total.encoding] += total.size_bytes
    for extent in whole.weights.extents:
        sizes[extent.what.stored_as] -= extent.size_bytes
    assert set(sizes.values()) == {0}
    for mine, bucket in zip(plan.buckets, whole.buckets, strict=True):
        assert mine.launches == len(bucket.launches)
        assert mine.bytes_moved == sum(launch.bytes_moved for launch in bucket.launches)
        assert mine.flops == sum(launch.flops for launch in bucket.launches)
    (experts,) = (use for use in kernel_uses(plan) if use.kernel == "placed_experts" and "bias" in use.weights)
    shape = f"[16, {2 * config.moe_intermediate_size}, {config.hidden_size}]"
    assert (experts.shape, experts.format) == (shape, "fp4_group")
    assert experts.weights == "ffn.gate.bias, ffn.experts.w1, ffn.experts.w3, ffn.experts.w2"


def test_a_trace_is_compared_with_the_whole_model() -> None:
    config = config_of(MIXED)
    weights = released_weights(expected_weights(config), config)
    for layers in (config.num_hidden_layers - 1, config.num_hidden_layers + 1):
        trace = RoutingTrace("a test", config.n_routed_experts, dict.fromkeys(range(layers), (1,) * 16))
        recipe = replace(Recipe.for_target("h100", None), experts=ExpertsRecipe(topology="traced", trace=trace))
        with pytest.raises(RecipeError, match="counts of layer"):
            plan_model(config, weights, recipe)


def test_layers_of_another_storage_are_kinds_of_their_own() -> None:
    """A checkpoint whose last layer was left in bf16, and a recipe that quantises."""
    config = config_of(MIXED)
    weights = released_weights(expected_weights(config), config)
    plain = released_weights(expected_weights(config), replace(config, expert_dtype=None))
    weights |= {name: info for name, info in plain.items() if name.startswith("layers.8.")}
    recipe = replace(Recipe.for_target("cpu", None), weights=WeightsRecipe(dense="int8"))
    plan = plan_model(config, weights, recipe)
    assert (8,) in plan.groups
    check_against(plan, whole_plan(config, weights, recipe))


@pytest.mark.parametrize("name", list(TOTALS))
def test_totals_of_the_released_models(name: str) -> None:
    source = open_source(config_folder(name))
    weights = [*source.weights.values(), *source.draft_weights.values()]
    tensors = sum(2 if info.scales else 1 for info in weights)
    payload = sum(info.stored.size_bytes + (info.scales.size_bytes if info.scales else 0) for info in weights)
    assert (tensors, payload) == TOTALS[name]
    assert source.identity is not None and source.identity.to_text() == NAMES[name]
    assert source.assumed and "assumed" in source.warnings[0]


@pytest.mark.parametrize("naming", ["official", "save_pretrained", "transformers"])
def test_full_size_headers(tmp_path: Path, naming: Naming) -> None:
    folder = write_header_only(tmp_path / naming, RELEASED["flash"], naming)
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 64 << 20
    source = open_source(folder)
    target = find_plan_target("h100")
    plan = make_plan(source, target, plan_recipe(target, None), PlanOptions())
    assert (plan["source"]["tensors"], plan["source"]["payload_bytes"]) == TOTALS["flash"]
    assert plan["source"]["naming"] == naming and not plan["source"]["encodings_assumed"]
    # The config alone says the same.
    assumed = plan_of("flash", "h100")
    assert plan["weights"] == assumed["weights"] and plan["capacity"] == assumed["capacity"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash-0731", "pro", "pro-0813"])
def test_full_size_headers_of_the_others(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(write_header_only(tmp_path / name, RELEASED[name]))
    assert checkpoint.warnings == []
    summary = summarize_checkpoint(checkpoint)
    assert summary.name == NAMES[name]
    assert f"name         {NAMES[name]}" in summary.to_text()


def test_base_variants_have_fp8_experts(tmp_path: Path) -> None:
    config = {key: value for key, value in RELEASED["flash"].items() if key != "expert_dtype"}
    source = open_source(write_config(tmp_path, config))
    assert source.identity is not None and source.identity.family == "V4-Flash-Base"
    assert "FP8 experts" in source.warnings[0]


@pytest.mark.parametrize(("name", "keys"), list(STATE))
def test_state_is_that_of_the_spec(name: str, keys: str) -> None:
    source = open_source(config_folder(name))
    target = find_plan_target("h100")
    recipe = replace(plan_recipe(target, None), index_keys=keys)
    plan = plan_model(source.config, source.weights, recipe)
    for context, expected in zip((8192, 131072, 1048576), STATE[name, keys], strict=True):
        # The spec has no rows for rollback.
        assert plan.state_bytes(1, context) - plan.rollback_bytes == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("target", "devices"), [("h100", 3), ("h200", 2), ("orin", 3)])
def test_devices_for_flash(target: str, devices: int) -> None:
    capacity = plan_of("flash", target)["capacity"]
    assert not capacity["fits"] and capacity["devices_by_capacity"] == devices
    split = capacity["split"]
    assert split["devices"] >= devices and split["fits"] and split["margin_bytes"] >= 0
    # What would fit one: a slice, or fewer experts.
    part = capacity["one_device_holds"]
    assert 0 < part["layers"] < 43 and 6 <= part["experts"] < 256


def test_all_experts_count_for_capacity_and_those_hit_for_bandwidth() -> None:
    plan = plan_of("flash", "h200")
    experts = next(row for row in plan["weights"]["engine_classes"] if row["class"] == "experts")
    # Spec 4.2: 3,422,552,064 bytes a layer, 80.2 MB of them for a token.
    assert experts["size_bytes"] == 43 * 3_422_552_064
    rest = plan["weights"]["engine_bytes"] - experts["size_bytes"]
    embedding = next(row for row in plan["weights"]["engine_classes"] if row["class"] == "embedding")
    token = plan["decode"]["contexts"][0]["bytes_per_token"]
    expected = rest - embedding["size_bytes"] + 43 * 6 * 13_369_344
    # Beside the weights: activations, the window and what the indexer reads.
    assert expected < token < 1.02 * expected


def test_longer_contexts_and_more_slots_cost_what_they_read() -> None:
    source = open_source(config_folder("flash"))
    target = find_plan_target("h100")
    traffic = decode_traffic(plan_model(source.config, source.weights, plan_recipe(target, None)))
    step = 131072
    # Between two contexts: index keys in 21 layers (68 bytes a key of 4 tokens), every entry in 20 (584 of 128).
    assert traffic.state_bytes(2 * step) - traffic.state_bytes(step) == step * 21 * 68 // 4 + step * 20 * 584 // 128
    # The window and the 512 selected entries are there before.
    window = 43 * 128 * 584 + 21 * 512 * 584
    assert traffic.state_bytes(step) == window + step * 21 * 68 // 4 + step * 20 * 584 // 128
    speeds = [traffic.tokens_per_second(slots, 8192, 1e12, None) for slots in (1, 4, 16)]
    assert speeds == sorted(speeds) and speeds[2] < 16 * speeds[0]
    assert traffic.step_bytes(4, 8192, tp=2) < traffic.step_bytes(4, 8192)


def flash_plan() -> ModelPlan:
    source = open_source(config_folder("flash"))
    return plan_model(source.config, source.weights, Recipe.for_target("cpu", None))


def test_splits_and_why_not() -> None:
    plan = flash_plan()
    assert [tp for tp in range(1, 17) if check_tp(plan, tp).legal] == [1, 2, 4, 8]
    assert check_tp(plan, 3).reasons[0] == "attention heads (64) are not divisible by 3"
    assert check_tp(plan, 16).reasons == ("output groups (8) are not divisible by 16",)
    assert check_ep(plan.config, 3).reasons == ("experts (256) are not divisible by 3",)
    assert check_ep(plan.config, 64).legal


def test_split_may_not_cut_a_scale_block() -> None:
    """192 inner channels are 1.5 blocks of 128; two ranks would cut the second."""
    config = config_of(
        tiny_config_json(moe_intermediate_size=192, o_groups=4, o_lora_rank=128, num_nextn_predict_layers=0)
    )
    weights = released_weights(expected_weights(config), config)
    check = check_tp(plan_model(config, weights, Recipe.for_target("cpu", None)), 2)
    assert any("FP8 scale blocks of 128" in reason for reason in check.reasons)


def test_illegal_split_is_an_error_that_names_legal_ones() -> None:
    with pytest.raises(PlanError, match="ep 3 is not possible: experts") as raised:
        plan_of("flash", "h100", ep=3)
    assert raised.value.hint is not None and "--ep 1, 2, 4, 8" in raised.value.hint


def test_context_beyond_the_model_is_an_error() -> None:
    with pytest.raises(InputError, match="is beyond the model's 1,048,576"):
        plan_of("flash", "h100", context=1048577)


def test_largest_context_and_slots_are_the_largest() -> None:
    source = open_source(config_folder("flash"))
    target = find_plan_target("h200")
    recipe = plan_recipe(target, None)
    found = make_plan(source, target, recipe, PlanOptions(tp=2, context=131072, slots=4))["capacity"]
    assert found["fits"] and found["largest_slots"] > 4
    for slots, fits in ((found["largest_slots"], True), (found["largest_slots"] + 1, False)):
        options = PlanOptions(tp=2, context=131072, slots=slots)
        assert make_plan(source, target, recipe, options)["capacity"]["fits"] is fits


def test_recipe_of_a_target_that_can_be_built_serves_the_others(tmp_path: Path) -> None:
    target = find_plan_target("orin")
    assert plan_recipe(target, Path("cpu-int4")).weights.experts == "int4"
    assert plan_recipe(target, Path("cpu-int4")).target.name == "orin"
    assert set(PLAN_TARGETS) == {"cpu", "h100", "h200", "orin"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in the released formats and its engine."""
    folder = tmp_path_factory.mktemp("small")
    weights = random_weights(config_of(MIXED), seed=2)
    checkpoint = write_checkpoint(folder / "m", MIXED, weights, quantization="fp8_fp4")
    build_engine(checkpoint, Recipe.for_target("cpu", None), folder / "e.dsv4c", goldens=False)
    return checkpoint, folder / "e.dsv4c"


def cpu_plan(checkpoint: Path, **options: Any) -> dict[str, Any]:
    target = find_plan_target("cpu", 1.0)
    return make_plan(open_source(checkpoint), target, plan_recipe(target, None), PlanOptions(**options))


@pytest.mark.parametrize("which", ["small", "tiny"])
def test_engine_is_as_large_as_planned(small: tuple[Path, Path], tmp_path: Path, which: str) -> None:
    checkpoint, engine = small
    if which == "tiny":
        checkpoint, engine = TINY_OFFICIAL, tmp_path / "tiny.dsv4c"
        build_engine(checkpoint, Recipe.for_target("cpu", None), engine)
    goldens = which == "tiny"
    build = cpu_plan(checkpoint)["build"]
    planned = build["disk_bytes"] if goldens else build["disk_bytes_without_goldens"]
    assert planned == pytest.approx(engine.stat().st_size, rel=0.01)
    manifest = read_engine(engine).manifest
    assert manifest["weight_bytes"] == cpu_plan(checkpoint)["weights"]["engine_bytes"]
    assert manifest["forced"] is False


def mapped_bytes() -> int:
    """Virtual memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: memory cannot be read")
def test_session_takes_the_memory_that_is_planned(small: tuple[Path, Path]) -> None:
    checkpoint, path = small
    capacity = cpu_plan(checkpoint, slots=64, context=4096)["capacity"]
    with Engine.open(path) as engine:
        before = mapped_bytes()
        session = engine.session(slots=64, context=4096)
        taken = mapped_bytes() - before
        assert session.length(0) == 0
    assert capacity["state_bytes"] + capacity["arena_bytes"] == pytest.approx(taken, rel=0.01)


def test_build_refuses_what_does_not_fit(small: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, _ = small
    needed = cpu_plan(checkpoint)["capacity"]["needed_bytes"]
    recipe, output = Recipe.for_target("cpu", None), tmp_path / "e.dsv4c"
    with pytest.raises(PlanError, match="does not fit this machine") as raised:
        build_engine(checkpoint, recipe, output, memory_gb=needed * 0.99 / 1e9)
    assert raised.value.hint is not None and "--force" in raised.value.hint
    assert list(tmp_path.iterdir()) == []
    build_engine(checkpoint, recipe, output, memory_gb=needed * 0.5 / 1e9, force=True, goldens=False)
    assert read_engine(output).manifest["forced"] is True


def test_build_accepts_97_percent_and_says_so(small: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, _ = small
    needed = cpu_plan(checkpoint)["capacity"]["needed_bytes"]
    recipe = Recipe.for_target("cpu", None)
    report = build_engine(checkpoint, recipe, tmp_path / "e", memory_gb=needed / 0.97 / 1e9, goldens=False)
    assert report.memory_needed_bytes == needed
    assert "97% of" in report.to_text() and "margin" in report.to_text()


def test_plan_is_json(small: tuple[Path, Path]) -> None:
    plan = cpu_plan(small[0])
    assert json.loads(json.dumps(plan)) == plan
    assert list(plan) == [
        "source", "model", "target", "recipe", "weights", "state", "buckets", "build", "capacity", "splits",
        "kernels", "experts", "decode", "warnings",
    ]  # fmt: skip
    # Nobody knows this machine's bandwidth.
    assert all(row["tokens_per_second"] is None for row in plan["decode"]["tokens_per_second"])
    assert {use["kernel"] for use in plan["kernels"]} == set(read_engine(small[1]).manifest["kernels"])


def test_modules_of_a_target() -> None:
    assert find_plan_target("orin").product == find_plan_target("orin", module="agx-64").product
    small = find_plan_target("orin", module="nano-8")
    assert small.memory_bytes == 8_000_000_000 and small.arch == "sm_87"
    assert find_plan_target("h100", module="pcie").sm_count == 114
    with pytest.raises(RecipeError, match="unknown module 'nano' of target orin"):
        find_plan_target("orin", module="nano")
    with pytest.raises(RecipeError, match="unknown module 'x' of target cpu"):
        find_plan_target("cpu", module="x")
