"""Engines whose weights the build quantises: the released bytes, what the report says, and memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.checkpoint.tensor_classes import TensorClass, tensor_class
from dsv4c.compiler import BuildReport, build_engine
from dsv4c.engine.format import SectionType
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.engine.summary import engine_summary, summary_text
from dsv4c.errors import CheckpointError
from dsv4c.recipe import Numerics, Recipe, WeightsRecipe, load_recipe, recipes_folder
from dsv4c.verification import verify_engine
from tests.fixtures import TINY_OFFICIAL, config_of, random_weights, write_checkpoint
from tests.graph.small_models import CONFIGS

TRAINED = Path(__file__).parents[2] / "shared/data/tiny-v4"
STORED = Recipe.for_target("cpu", None)


def weights_of(reader: EngineReader) -> bytes:
    entry = reader.sections[SectionType.WEIGHTS]
    return reader.weights_path().read_bytes()[entry.offset : entry.offset + entry.size]


def build(checkpoint: Path, recipe: Recipe, output: Path) -> BuildReport:
    return build_engine(checkpoint, recipe, output, goldens=False)


@pytest.mark.skipif(not TRAINED.is_dir(), reason=f"{TRAINED} (the bf16 form of the trained model) is missing")
def test_bf16_checkpoint_becomes_the_released_engine(tmp_path: Path) -> None:
    """FP8 and FP4 made by the build are, byte for byte, those of the official checkpoint."""
    recipe = load_recipe(recipes_folder() / "cpu-fp8-fp4.toml")
    report = build(TRAINED, recipe, tmp_path / "made.dsv4c")
    build(TINY_OFFICIAL, STORED, tmp_path / "stored.dsv4c")
    made, stored = (read_engine(tmp_path / f"{name}.dsv4c") for name in ("made", "stored"))
    assert weights_of(made) == weights_of(stored)
    assert made.section(SectionType.PLAN) == stored.section(SectionType.PLAN)
    errors = {total.kind: total.relative_error for total in report.weights if total.made_of == "bf16"}
    assert errors == {"attention": 0.0266, "indexer": 0.0267, "shared expert": 0.0265, "experts": 0.116}


def test_report_of_a_requantised_checkpoint(tmp_path: Path) -> None:
    weights = WeightsRecipe(experts="int4", dense="int8", experts_group=64)
    report = build(TINY_OFFICIAL, replace(STORED, weights=weights), tmp_path / "e")
    made = {total.kind: total for total in report.weights if total.made_of}
    assert set(made) == {"attention", "indexer", "shared expert", "experts"}
    experts = made["experts"]
    assert (experts.encoding, experts.made_of, experts.tensors) == ("int4_group", "fp4_group", 8 * 16 * 3)
    # Half a byte a weight, and a float16 for 64 of them.
    assert experts.size_bytes == 8 * 16 * 3 * 256 * 128 * (0.5 + 2 / 64)
    assert experts.relative_error is not None and 0.05 < experts.relative_error < 0.12
    assert made["attention"].relative_error is not None and made["attention"].relative_error < 0.008
    stored = [total for total in report.weights if not total.made_of]
    assert all(total.relative_error is None for total in stored)
    assert "made of fp4_group, relative error 0.0" in report.to_text()
    reader = read_engine(tmp_path / "e")
    assert reader.manifest["weights"] == [total.to_dict() for total in report.weights]
    assert "experts       int4_group    384 tensors" in summary_text(engine_summary(reader))


def test_bytes_of_every_class_add_up(tmp_path: Path) -> None:
    report = build(TINY_OFFICIAL, STORED, tmp_path / "e")
    assert all(total.made_of is None for total in report.weights)
    checkpoint = open_checkpoint(TINY_OFFICIAL)
    # What the engine holds beyond the checkpoint: rotary tables, and padding.
    constants = next(total.size_bytes for total in report.weights if total.kind == "constants")
    stored = sum(
        info.stored.size_bytes + (info.scales.size_bytes if info.scales else 0) for info in checkpoint.weights.values()
    )
    total = sum(total.size_bytes for total in report.weights)
    # Scales of merged matrices may be repeated.
    assert stored <= total - constants < stored * 1.001
    assert total <= report.weight_bytes < total * 1.1
    tensors = sum(total.tensors for total in report.weights if total.kind != "constants")
    assert tensors == len(checkpoint.weights)


def test_classes() -> None:
    wanted = {
        "embed.weight": TensorClass.EMBEDDING,
        "head.weight": TensorClass.HEAD,
        "norm.weight": TensorClass.NORMS,
        "hc_head_fn": TensorClass.MHC,
        "layers.3.hc_attn_base": TensorClass.MHC,
        "layers.3.attn.q_norm.weight": TensorClass.NORMS,
        "layers.3.attn.compressor.norm.weight": TensorClass.NORMS,
        "layers.3.attn.attn_sink": TensorClass.ATTENTION,
        "layers.3.attn.wo_a.weight": TensorClass.ATTENTION,
        "layers.3.attn.compressor.ape": TensorClass.COMPRESSOR,
        "layers.3.attn.indexer.wq_b.weight": TensorClass.INDEXER,
        "layers.3.attn.indexer.compressor.wkv.weight": TensorClass.INDEXER,
        "layers.3.ffn.gate.weight": TensorClass.ROUTER,
        "layers.3.ffn.gate.tid2eid": TensorClass.ROUTER,
        "layers.3.ffn.shared_experts.w2.weight": TensorClass.SHARED_EXPERT,
        "layers.3.ffn.experts.15.w2.weight": TensorClass.EXPERTS,
    }
    assert {name: tensor_class(name) for name in wanted} == wanted
    assert all(tensor_class(name) for name in open_checkpoint(TINY_OFFICIAL).weights)


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    config = CONFIGS["one_even"]
    checkpoint = write_checkpoint(tmp_path / "m", config, random_weights(config_of(config), seed=2))
    weights = WeightsRecipe(experts="int4", dense="int8", dense_group=64, rounding="search")
    for name in ("a", "b"):
        build(checkpoint, replace(STORED, weights=weights), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_weight_that_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    config = CONFIGS["one_even"]
    weights = random_weights(config_of(config), seed=2)
    weights["layers.0.ffn.experts.1.w2.weight"][5, 7] = torch.nan
    checkpoint = write_checkpoint(tmp_path / "nan", config, weights)
    recipe = replace(STORED, weights=WeightsRecipe(experts="int4"))
    with pytest.raises(CheckpointError, match=r"tensor `layers.0.ffn.experts.1.w2.weight`: .* NaN or infinity"):
        build_engine(checkpoint, recipe, tmp_path / "e", goldens=False, check_values=False)
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]


@pytest.mark.parametrize(
    "weights",
    [
        WeightsRecipe(experts="int4", dense="int8", dense_group=64, rounding="search"),
        WeightsRecipe(experts="int8", dense="int4", experts_group=128, dense_group=32),
        WeightsRecipe(experts="fp4", dense="fp8"),
        WeightsRecipe(experts="fp8", dense="stored", rounding="search"),
    ],
    ids=lambda weights: f"{weights.experts}-{weights.dense}",
)
@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_the_runtime_computes_what_the_oracle_does(tmp_path: Path, numerics: Numerics, weights: WeightsRecipe) -> None:
    """Launch by launch, with the goldens that the build recorded."""
    config = CONFIGS["one_even"]
    checkpoint = write_checkpoint(tmp_path / "m", config, random_weights(config_of(config), seed=2))
    recipe = replace(STORED.with_overrides(numerics=numerics), weights=weights)
    build_engine(checkpoint, recipe, tmp_path / "e")
    report = verify_engine(tmp_path / "e", replay=True)
    assert report.ok, report.lines
