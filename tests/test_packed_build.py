"""Engines with packed experts, built without kernels: their bytes, reports, manifest and goldens.

What their kernels compute is tested in tests/kernels and on the card.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4c import compiler
from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.checkpoint.expert_packing import record_bytes, unpack_fp4
from dsv4c.checkpoint.formats import Encoding
from dsv4c.cli.main import main
from dsv4c.compiler import BuildReport, build_engine
from dsv4c.engine.format import SectionType
from dsv4c.engine.goldens import Goldens
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import PassError, RecipeError
from dsv4c.plan.execution_plan import ExecutionPlan, TensorRef
from dsv4c.recipe import ExpertsRecipe, Recipe, load_recipe, recipes_folder
from dsv4c.routing_trace import RoutingTrace
from dsv4c.target import Target
from dsv4c.verification import verify_engine
from tests.fixtures import TINY_OFFICIAL

TRAINED = Path(__file__).parents[2] / "shared/data/tiny-v4"
LAYERS, EXPERTS, HIDDEN, INNER = 8, 16, 256, 128


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ExecutionPlan]:
    """Builds leave the kernels out; their plans are listed here."""
    made: list[ExecutionPlan] = []

    def operators_only(plan: ExecutionPlan, target: Target) -> ExecutionPlan:
        made.append(plan)
        return plan

    monkeypatch.setattr(compiler, "assign_kernels", operators_only)
    return made


def recipe(**experts: object) -> Recipe:
    chosen = replace(Recipe.for_target("h100", None), decode_buckets=(1,), mixed_buckets=(16,), golden_tokens=4)
    return replace(chosen, experts=ExpertsRecipe(**experts))  # type: ignore[arg-type]


def build(checkpoint: Path, chosen: Recipe, output: Path, goldens: bool = False) -> BuildReport:
    return build_engine(checkpoint, chosen, output, goldens=goldens)


def weights_of(reader: EngineReader) -> torch.Tensor:
    entry = reader.sections[SectionType.WEIGHTS]
    data = bytearray(reader.path.read_bytes()[entry.offset : entry.offset + entry.size])
    return torch.frombuffer(data, dtype=torch.uint8)


def golden_results(reader: EngineReader, kernel: str) -> list[object]:
    assert reader.goldens is not None
    steps = Goldens.from_dict(reader.goldens).steps
    return [launch.outputs for step in steps for launch in step.launches if launch.kernel == kernel]


def test_a_packed_engine_of_the_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = build(TINY_OFFICIAL, recipe(), tmp_path / "packed", goldens=True)
    plain = build(TINY_OFFICIAL, recipe(layout="checkpoint"), tmp_path / "plain", goldens=True)
    reader = read_engine(tmp_path / "packed")
    # The same tensors and bytes, and the same numbers from every layer.
    assert [total.to_dict() for total in report.weights] == [total.to_dict() for total in plain.weights]
    assert report.launches_per_step == plain.launches_per_step - LAYERS
    placed, separate = (
        golden_results(read_engine(tmp_path / name), kernel)
        for name, kernel in (("packed", "placed_experts"), ("plain", "moe_ffn"))
    )
    assert len(placed) == 2 * LAYERS and placed == separate
    assert verify_engine(tmp_path / "packed", replay=False).ok
    facts = reader.manifest["experts"]
    assert (facts["layout"], facts["topology"], facts["experts"]) == ("packed", "striped", EXPERTS)
    assert read_engine(tmp_path / "plain").manifest["experts"] is None
    assert main(["inspect", str(tmp_path / "packed")]) == 0
    assert "experts       fp4_group     384 tensors" in capsys.readouterr().out


def test_unpacking_the_engine_gives_the_checkpoint_back(tmp_path: Path, plans: list[ExecutionPlan]) -> None:
    build(TINY_OFFICIAL, recipe(), tmp_path / "e")
    opened, written = open_checkpoint(TINY_OFFICIAL), weights_of(read_engine(tmp_path / "e"))
    size = record_bytes(Encoding.FP4_GROUP, HIDDEN, INNER)
    stacks = [launch.args[5] for launch in plans[0].buckets[0].launches if launch.kernel == "placed_experts"]
    for layer, stack in enumerate(stacks):
        assert isinstance(stack, TensorRef)
        for expert in range(EXPERTS):
            at = stack.offset + expert * stack.strides[0]
            matrices = unpack_fp4(written[at : at + size], HIDDEN, INNER)
            for leaf, (codes, scales) in zip(("w1", "w3", "w2"), matrices, strict=True):
                name = f"layers.{layer}.ffn.experts.{expert}.{leaf}.weight"
                stored = opened.scales(name)
                assert stored is not None
                assert torch.equal(codes, opened.codes(name).view(torch.uint8)), name
                assert torch.equal(scales, stored.view(torch.uint8)), name
    assert len(stacks) == LAYERS


@pytest.mark.skipif(not TRAINED.is_dir(), reason=f"{TRAINED} (the bf16 form of the trained model) is missing")
def test_bf16_checkpoint_becomes_the_packed_engine_of_the_released_one(tmp_path: Path) -> None:
    made = replace(
        load_recipe(recipes_folder() / "h100-fp8-fp4.toml"), decode_buckets=(1,), mixed_buckets=(16,), golden_tokens=4
    )
    report = build(TRAINED, made, tmp_path / "made")
    build(TINY_OFFICIAL, recipe(), tmp_path / "stored")
    ours, theirs = (read_engine(tmp_path / name) for name in ("made", "stored"))
    assert torch.equal(weights_of(ours), weights_of(theirs))
    assert ours.section(SectionType.PLAN) == theirs.section(SectionType.PLAN)
    errors = {total.kind: total.relative_error for total in report.weights if total.made_of == "bf16"}
    assert errors["experts"] == 0.116


def test_a_traced_engine_says_by_which_trace(tmp_path: Path) -> None:
    trace = RoutingTrace("a test", EXPERTS, {layer: tuple(range(EXPERTS)) for layer in range(LAYERS)})
    build(TINY_OFFICIAL, recipe(topology="traced", trace=trace), tmp_path / "e")
    manifest = read_engine(tmp_path / "e").manifest
    assert manifest["experts"]["trace"] == manifest["recipe"]["experts"]["trace"] == trace.digest
    places = [layer["table"]["offset"] for layer in manifest["experts"]["layers"]]
    assert len(set(places)) == LAYERS
    (constants,) = (each for each in manifest["weights"] if each["encoding"] == "int32")
    assert constants["tensors"] == LAYERS and str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (range(LAYERS + 1), f"has counts of layer {LAYERS}; the model has layers 0 to {LAYERS - 1}"),
        (range(LAYERS - 1), f"has no counts of layer {LAYERS - 1}"),
        (range(1, LAYERS), "has no counts of layer 0"),  # it is routed by token, and placed as the others are
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_trace_of_another_model_is_refused(layers: range, message: str, force: bool, tmp_path: Path) -> None:
    trace = RoutingTrace("a test", EXPERTS, dict.fromkeys(layers, (1,) * EXPERTS))
    with pytest.raises(RecipeError, match=message):
        build_engine(TINY_OFFICIAL, recipe(topology="traced", trace=trace), tmp_path / "e", force=force)
    assert not list(tmp_path.iterdir())


def test_the_same_build_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(TINY_OFFICIAL, recipe(topology="pinned"), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_the_recipe_asks_for_in_vain_is_refused(tmp_path: Path) -> None:
    exact = recipe(topology="pinned").with_overrides(numerics="exact")
    with pytest.raises(PassError, match="the experts cannot be placed"):
        build(TINY_OFFICIAL, exact, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_experts_that_stay_in_l2_anyhow_are_said_to(tmp_path: Path) -> None:
    report = build(TINY_OFFICIAL, recipe(l2_resident="experts"), tmp_path / "e")
    assert any("fit the L2 cache" in warning for warning in report.warnings)
