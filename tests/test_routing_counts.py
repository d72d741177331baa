"""An engine that counts its routing says what the model's own router chooses, as the eager reference runs it."""

from pathlib import Path

import torch
from torch import Tensor

from dsv4c.compiler import build_engine
from dsv4c.engine.format import SectionType
from dsv4c.engine.reader import read_engine
from dsv4c.graph.interpreter import Oracle
from dsv4c.recipe import ExpertsRecipe, Recipe
from dsv4c.runtime import Engine
from dsv4c.target import find_target
from tests.graph.small_models import SCHEDULE, checkpoint, graph, step_rows

CPU = find_target("cpu")


def build(folder: Path, name: str, recipe: Recipe) -> Path:
    path = folder / f"{name}.dsv4c"
    build_engine(checkpoint("narrow").path, recipe, path, goldens=False)
    return path


def test_counts_are_those_of_the_eager_router(tmp_path: Path) -> None:
    """Two slots in one step, one longer than every bucket, decode; hash- and score-routed layers."""
    opened = checkpoint("narrow")
    config = opened.config
    # Small buckets: the first step, of 30 rows, runs in pieces, the last of them with room to spare.
    recipe = Recipe(CPU, experts=ExpertsRecipe(counts=True), decode_buckets=(4,), mixed_buckets=(8,))
    path = build(tmp_path, "counting", recipe)
    oracle = Oracle(graph("narrow"), opened, slots=2, context=256)
    expected = torch.zeros(config.num_hidden_layers, config.n_routed_experts, dtype=torch.int64)
    assert {layer.hash_routed for layer in config.layers} == {True, False}
    with Engine.open(path) as engine, engine.session(slots=2, context=256) as session:
        for step in SCHEDULE:
            rows = step_rows(step, config.vocab_size)
            trace: dict[str, Tensor] = {}
            oracle.step(*rows, trace=trace)
            session.step(*rows, [])
            for layer, counts in enumerate(expected):
                counts += torch.bincount(trace[f"l{layer}_ffn_ids"].flatten(), minlength=config.n_routed_experts)
            found = session.routing_counts()
            assert found.layers == tuple(range(config.num_hidden_layers))
            assert found.counts.tolist() == expected.tolist()
        session.reset_routing_counts()
        assert not session.routing_counts().counts.any()
        session.step([1], [0], [34], [])
        assert session.routing_counts().counts.sum() == config.num_hidden_layers * config.num_experts_per_tok


def test_an_engine_that_does_not_count_has_nothing_of_it(tmp_path: Path) -> None:
    """The same plan, weights and digests whether the recipe says so or is silent; less than that of one that counts."""
    silent, off, on = (
        read_engine(build(tmp_path, name, recipe))
        for name, recipe in {
            "silent": Recipe(CPU),
            "off": Recipe(CPU, experts=ExpertsRecipe(counts=False)),
            "on": Recipe(CPU, experts=ExpertsRecipe(counts=True)),
        }.items()
    )
    assert silent.path.read_bytes() == off.path.read_bytes()
    assert b"count" not in silent.section(SectionType.PLAN) and b"count_routing" in on.section(SectionType.PLAN)
    assert silent.manifest["state"]["bytes_per_session"] == 0
    config = checkpoint("narrow").config
    assert on.manifest["state"]["bytes_per_session"] == len(config.layers) * config.n_routed_experts * 8
    assert (silent.manifest["recipe"].get("experts"), on.manifest["recipe"]["experts"]) == (None, {"counts": True})
    assert silent.section(SectionType.CHUNKS) == on.section(SectionType.CHUNKS)
    # Of the launches, one a layer and bucket.
    for before, after in zip(silent.manifest["buckets"], on.manifest["buckets"], strict=True):
        assert after["launches"] == before["launches"] + len(config.layers)
