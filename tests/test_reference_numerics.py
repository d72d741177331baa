"""Numerics as trained (`numerics = "reference"`): the engine against the eager oracle with the same roundings.

A float32 sum that is added up in another order can fall on the other side of a rounding to bf16, e4m3 or e2m1, and such
a step can send a row to another expert or entry. So rows are compared one by one, and a small share of them may differ.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.compiler import build_engine
from dsv4c.graph.builder import build_graph
from dsv4c.graph.interpreter import Oracle
from dsv4c.passes.pass_manager import PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.recipe import Recipe
from dsv4c.runtime.engine import Engine
from tests.fixtures import TINY_OFFICIAL, config_of, random_weights, tiny_config_json, write_checkpoint
from tests.model_cases import Logits, checkpoint_of, engine_of

TOKENS = 200
RECIPE = Recipe.for_target("cpu", None).with_overrides(numerics="reference")


def engine_logits(path: str, ids: list[int], chunk: int) -> Logits:
    with Engine.open(path) as engine:
        session = engine.session(slots=1, context=512)
        rows = [
            session.step(ids[a : a + chunk], [0] * len(ids[a : a + chunk]), list(range(a, min(a + chunk, len(ids)))))
            for a in range(0, len(ids), chunk)
        ]
    return np.concatenate(rows)


@pytest.mark.parametrize("name", ["tiny", "partial_blocks", "narrow"])
@pytest.mark.parametrize("chunk", [1, 70, 200])
def test_packed_state_is_the_simulated_rounding_bit_for_bit(name: str, chunk: int) -> None:
    ids = np.random.default_rng(3).integers(0, 97, TOKENS).tolist()
    packed = engine_logits(str(engine_of(name, "fp8_fp4", "reference")), ids, chunk)
    simulated = engine_logits(str(engine_of(name, "fp8_fp4", "reference", "f32")), ids, chunk)
    np.testing.assert_array_equal(packed, simulated)


def test_index_keys_in_fp8_are_those_in_fp4(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("tiny", "fp8_fp4")
    build_engine(checkpoint, replace(RECIPE, index_keys="fp8"), tmp_path / "e", goldens=False)
    ids = np.random.default_rng(3).integers(0, 97, TOKENS).tolist()
    np.testing.assert_array_equal(
        engine_logits(str(tmp_path / "e"), ids, 70),
        engine_logits(str(engine_of("tiny", "fp8_fp4", "reference")), ids, 70),
    )


def test_a_cache_of_rotary_channels_only_stays_bfloat16(tmp_path: Path) -> None:
    config = tiny_config_json(head_dim=64, num_hidden_layers=3, compress_ratios=[0, 4, 128], num_nextn_predict_layers=0)
    checkpoint = write_checkpoint(tmp_path / "m", config, random_weights(config_of(config), seed=2), quantization="fp8")
    build_engine(checkpoint, RECIPE, tmp_path / "fp8", goldens=False)
    build_engine(checkpoint, replace(RECIPE, kv="f32"), tmp_path / "f32", goldens=False)
    ids = list(range(150))
    packed, plain = (engine_logits(str(tmp_path / name), ids, 150) for name in ("fp8", "f32"))
    assert np.isfinite(packed).all()
    np.testing.assert_array_equal(packed, plain)


def test_trained_model_against_the_oracle(tmp_path: Path) -> None:
    text_ids = np.random.default_rng(0)
    checkpoint = open_checkpoint(TINY_OFFICIAL)
    build_engine(TINY_OFFICIAL, RECIPE, tmp_path / "e", goldens=False)
    with Engine.open(tmp_path / "e") as engine:
        # The model's own text: trained models are sure of it, random ids are all near ties.
        prompt = [0, *text_ids.integers(3, 4096, 3).tolist()]
        ids = prompt + list(engine.generate(prompt, max_new_tokens=TOKENS - len(prompt), stop_ids=()))
    gm = build_graph(checkpoint.config, checkpoint.weights, "reference", RECIPE.rollback_rows)
    gm = run_passes(gm, build_pipeline(), PassContext(RECIPE.target, RECIPE))
    oracle = Oracle(gm, checkpoint, slots=1, context=512)
    expected = oracle.step(ids, [0] * len(ids), list(range(len(ids)))).numpy()
    found = engine_logits(str(tmp_path / "e"), ids, len(ids))
    row_error = np.sqrt(np.mean((found - expected) ** 2, axis=1)) / expected.std()
    same = found.argmax(-1) == expected.argmax(-1)
    gap = np.sort(expected, axis=-1)[:, -1] - np.sort(expected, axis=-1)[:, -2]
    assert np.median(row_error) < 0.03
    # Where the oracle's own two best logits are further apart than the roundings move them.
    assert same[gap > 1.0].all()
    assert same.mean() > 0.95
