"""Perplexity of one model in every form that dsv4c builds, as CSV rows on stdout.

python -m tests.benchmarks.quality BF16_CHECKPOINT OFFICIAL_CHECKPOINT DOCUMENTS [--rows N] [--only "NAME;NAME"]

The protocol is that of `dsv4c bench --perplexity`. The first rows are the two checkpoints as stored; `change` is
against the first. Rows named `reference...` are the official checkpoint with the rounding of the reference numerics,
all of it or one part: activations are bfloat16 in all of them.
"""

import argparse
import csv
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.compiler import weight_blocks
from dsv4c.engine.plan_section import encode_plan
from dsv4c.engine.writer import EngineParts, write_engine
from dsv4c.graph.builder import build_graph
from dsv4c.graph.state_ops import Rounding
from dsv4c.passes.pass_manager import Pass, PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.passes.quantize_weights import ACT_GROUP, quantize_weights
from dsv4c.perplexity import measure_perplexity, read_texts, token_rows
from dsv4c.plan.lowering import lower_graph
from dsv4c.recipe import Recipe, WeightsRecipe, load_recipe, recipes_folder
from dsv4c.runtime.engine import Engine
from dsv4c.text import Tokenizer

dsv4 = torch.ops.dsv4

PARTS = ("activations", "kv", "index")


@dataclass(frozen=True)
class Variant:
    """`parts`: which roundings of the reference numerics take place."""

    name: str
    official: bool
    recipe: Recipe
    parts: tuple[str, ...] = PARTS


@dataclass(frozen=True)
class Row:
    name: str
    checkpoint: str
    numerics: str
    experts: str
    dense: str
    rounding: str
    weight_mb: float
    rows: int
    nll: float
    perplexity: float
    change_percent: float
    tokens_per_s: float


def variants() -> Iterator[Variant]:
    plain = Recipe.for_target("cpu", None)
    yield Variant("bf16", False, plain)
    yield Variant("official", True, plain)
    for name, weights in (
        ("fp8 dense", WeightsRecipe(dense="fp8")),
        ("fp8 dense + fp8 experts", WeightsRecipe(dense="fp8", experts="fp8")),
        ("fp8 dense + fp4 experts, search", WeightsRecipe(dense="fp8", experts="fp4", rounding="search")),
        ("int8 dense", WeightsRecipe(dense="int8")),
        ("int4 experts /128", WeightsRecipe(experts="int4", experts_group=128)),
        ("int4 experts /128, search", WeightsRecipe(experts="int4", experts_group=128, rounding="search")),
        ("int4 experts /32", WeightsRecipe(experts="int4", experts_group=32)),
        ("int4 experts /32, search", WeightsRecipe(experts="int4", experts_group=32, rounding="search")),
        ("int4 all /32, search", WeightsRecipe("int4", "int4", dense_group=32, rounding="search")),
    ):
        yield Variant(name, False, replace(plain, weights=weights))
    for recipe in ("cpu-fp8-fp4", "cpu-int8", "cpu-int4"):
        yield Variant(f"{recipe}.toml", False, load_recipe(recipes_folder() / f"{recipe}.toml"))
    yield Variant("cpu-int4.toml of official", True, load_recipe(recipes_folder() / "cpu-int4.toml"))
    reference = plain.with_overrides(numerics="reference")
    yield Variant("reference", True, reference)
    # Where a part is left out there is nothing to pack; a rounded row packs exactly, so that changes no number.
    loose = replace(reference, kv="f32", index_keys="f32")
    yield Variant("reference: bf16 alone", True, loose, ())
    for part in PARTS:
        yield Variant(f"reference: bf16 + {part}", True, loose, (part,))
    yield Variant("reference of bf16", False, reference)


def without(parts: set[str]) -> Pass:
    """A pass that takes out some roundings of the reference numerics, right after `quantize_weights`.

    dsv4.fp8_round(x, ...) -> x; the Hadamard transform goes with the rounding of index keys, which alone it is for.
    """

    def drop_roundings(gm: GraphModule, ctx: PassContext) -> PassResult:
        for node in list(gm.graph.nodes):
            if node.target is dsv4.fp8_round.default:
                if ("activations" if node.args[1] == ACT_GROUP else "kv") in parts:
                    _replace_by_input(node)
            elif node.target in (dsv4.hadamard.default, dsv4.fp4_round.default) and "index" in parts:
                _replace_by_input(node)
            elif node.target is dsv4.moe_ffn.default and "activations" in parts:
                node.args = (*node.args[:-1], 0)
            elif node.target is dsv4.compress.default:
                *before, rounding, dtype = node.args
                part = {Rounding.FP8: "kv", Rounding.HADAMARD_FP4: "index"}.get(Rounding(rounding))
                node.args = (*before, int(Rounding.NONE) if part in parts else rounding, dtype)
        return PassResult(gm, True)

    return drop_roundings


def _replace_by_input(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    node.replace_all_uses_with(source)


def build(folder: Path, variant: Variant, output: Path) -> int:
    """An engine without goldens; returns the bytes of its weights."""
    recipe = variant.recipe
    checkpoint = open_checkpoint(folder)
    passes = build_pipeline()
    if recipe.numerics == "reference":
        passes.insert(passes.index(quantize_weights) + 1, without(set(PARTS) - set(variant.parts)))
    graph = build_graph(checkpoint.config, checkpoint.weights, recipe.numerics, recipe.rollback_rows)
    graph = run_passes(graph, passes, PassContext(recipe.target, recipe))
    plan = lower_graph(graph, recipe.decode_buckets, recipe.mixed_buckets, recipe.rollback_rows)
    parts = EngineParts(
        recipe.target.arch, {}, encode_plan(plan), checkpoint.tokenizer_texts(), None, plan.weights.size_bytes
    )
    write_engine(output, parts, weight_blocks(checkpoint, plan))
    return plan.weights.size_bytes


def measure(folder: Path, variant: Variant, texts: list[str], rows: int | None, baseline: float | None) -> Row:
    weights = variant.recipe.weights
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "engine.dsv4c"
        weight_bytes = build(folder, variant, path)
        with Engine.open(path) as engine:
            ids = token_rows(texts, Tokenizer(engine.tokenizer_files()), engine.info)[:rows]
            started = time.perf_counter()
            found = measure_perplexity(engine, ids)
            seconds = time.perf_counter() - started
    return Row(
        name=variant.name,
        checkpoint=folder.name,
        numerics=variant.recipe.numerics,
        experts=_format(weights.experts, weights.experts_group),
        dense=_format(weights.dense, weights.dense_group),
        rounding=weights.rounding,
        weight_mb=round(weight_bytes / 1e6, 2),
        rows=len(ids),
        nll=round(found.nll, 7),
        perplexity=round(found.perplexity, 5),
        change_percent=round(100 * (found.perplexity / baseline - 1), 3) if baseline else 0.0,
        tokens_per_s=round(found.tokens / seconds, 1),
    )


def _format(encoding: str, group: int) -> str:
    return f"{encoding}/{group}" if encoding.startswith("int") else encoding


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity of one model in every form, as CSV")
    parser.add_argument("bf16", type=Path)
    parser.add_argument("official", type=Path)
    parser.add_argument("documents", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", type=lambda text: text.split(";"), help="names, separated by semicolons")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = read_texts(arguments.documents)
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    writer.writeheader()
    baseline: float | None = None
    for variant in variants():
        if arguments.only and variant.name not in arguments.only and baseline is not None:
            continue
        folder = arguments.official if variant.official else arguments.bf16
        row = measure(folder, variant, texts, arguments.rows, baseline)
        baseline = baseline or row.perplexity
        writer.writerow(asdict(row))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
