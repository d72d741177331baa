"""Small random checkpoints, their graphs, and what every pass makes of them; made once a run, for graph/passes/plan."""

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dsv4c.graph.annotations import Numerics
from dsv4c.graph.builder import build_graph
from dsv4c.graph.interpreter import Oracle
from dsv4c.graph.printer import format_graph
from dsv4c.passes.pass_manager import Pass, PassContext, run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.plan.execution_plan import ExecutionPlan
from dsv4c.plan.lowering import lower_graph
from dsv4c.recipe import Recipe
from dsv4c.target import find_target
from tests.fixtures import ODD_CONFIGS, Quantization, config_of, random_weights, tiny_config_json, write_checkpoint

ROLLBACK_ROWS = 8
DECODE_BUCKETS, MIXED_BUCKETS = (1, 4), (32,)
CONFIGS: dict[str, dict[str, Any]] = ODD_CONFIGS | {
    # One layer of each kind, the first of them hash-routed, in round sizes: for goldens.
    "tiny": tiny_config_json(
        num_hidden_layers=3, num_hash_layers=1, compress_ratios=[0, 4, 128], num_nextn_predict_layers=0
    ),
    # One score-routed CSA layer: for graphs that a test takes apart.
    "one_layer": ODD_CONFIGS["narrow"] | {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [4]},
    # The same in sizes that groups of 32 and 64 divide.
    "one_even": ODD_CONFIGS["narrow"]
    | {
        "num_hidden_layers": 1,
        "num_hash_layers": 0,
        "compress_ratios": [4],
        "hidden_size": 128,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "moe_intermediate_size": 128,
    },
    # A hash-routed and a score-routed layer in sizes that 128 divides: for packed experts.
    "two_even": ODD_CONFIGS["narrow"]
    | {
        "num_hidden_layers": 2,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4],
        "hidden_size": 256,
        "moe_intermediate_size": 128,
    },
    # `one_layer`, hash-routed and without compression.
    "one_window": ODD_CONFIGS["narrow"] | {"num_hidden_layers": 1, "num_hash_layers": 1, "compress_ratios": [0]},
}
# (slot, positions) of every step: a chunk longer than the ring of `narrow`, then two slots in one step, then decode.
SCHEDULE = (
    ((0, range(0, 30)),),
    ((1, range(0, 3)), (0, range(30, 33)), (1, range(3, 5))),
    ((0, range(33, 34)), (1, range(5, 6))),
)

# What `walk` is asked for: FP8 and FP4 weights with partial blocks, and bf16 ones, where no activation is rounded.
WALKS: tuple[tuple[str, Numerics, Quantization], ...] = (
    ("narrow", "exact", "fp8_fp4"),
    ("narrow", "reference", "fp8_fp4"),
    ("narrow", "reference", "bf16"),
    ("partial_blocks", "exact", "fp8"),
    ("partial_blocks", "reference", "fp8_fp4"),
    ("partial_blocks", "reference", "bf16"),
)

_folder = tempfile.TemporaryDirectory(prefix="dsv4c-tests-")


@functools.cache
def checkpoint(name: str, quantization: Quantization = "fp8_fp4") -> Checkpoint:
    folder = Path(_folder.name) / f"{name}-{quantization}"
    config = CONFIGS[name]
    write_checkpoint(folder, config, random_weights(config_of(config), seed=5), quantization=quantization)
    return open_checkpoint(folder)


def graph(name: str, numerics: Numerics = "exact", quantization: Quantization = "fp8_fp4") -> GraphModule:
    """A new graph, to be altered at will."""
    opened = checkpoint(name, quantization)
    return build_graph(opened.config, opened.weights, numerics, ROLLBACK_ROWS)


def context(
    numerics: Numerics = "exact", dump_dir: Path | None = None, target: str = "cpu", **recipe: Any
) -> PassContext:
    chosen = Recipe(find_target(target), **recipe).with_overrides(numerics=numerics)
    return PassContext(chosen.target, chosen, dump_dir)


def until(gm: GraphModule, last: Pass, numerics: Numerics = "exact") -> GraphModule:
    """`gm` after the pipeline up to and including `last`."""
    passes = build_pipeline()
    return run_passes(gm, passes[: passes.index(last) + 1], context(numerics))


def max_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Over the logits of every step."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def step_rows(step: tuple[tuple[int, range], ...], vocab_size: int) -> tuple[list[int], list[int], list[int]]:
    """(token ids, slots, positions) of one step of SCHEDULE."""
    slots = [slot for slot, run in step for _ in run]
    positions = [position for _, run in step for position in run]
    ids = [(7 + 31 * p + 57 * s) * 13 % vocab_size for s, p in zip(slots, positions, strict=True)]
    return ids, slots, positions


def schedule_logits(gm: GraphModule, opened: Checkpoint) -> list[Tensor]:
    """The logits of every step of SCHEDULE, on state that starts as NaN."""
    oracle = Oracle(gm, opened, slots=2, context=256, poison=True)
    return [oracle.step(*step_rows(step, opened.config.vocab_size)) for step in SCHEDULE]


@dataclass(frozen=True)
class Stage:
    """What one pass did: the graph's text and its logits before and after."""

    before: str
    after: str
    modified: bool
    logits_before: list[Tensor]
    logits_after: list[Tensor]


@dataclass(frozen=True)
class Walk:
    """A graph's way through the pipeline; `gm` is its end. Shared by tests: not to be altered."""

    stages: dict[str, Stage]
    gm: GraphModule


@functools.cache
def walk(name: str, numerics: Numerics, quantization: Quantization) -> Walk:
    """One of WALKS; steps that wrote no logits of NaN: state starts as that."""
    opened = checkpoint(name, quantization)
    gm = graph(name, numerics, quantization)
    text, logits = format_graph(gm), schedule_logits(gm, opened)
    stages = {}
    for run in build_pipeline():
        flags: list[bool] = []

        @functools.wraps(run)
        def recorded(gm: GraphModule, ctx: PassContext, run: Pass = run, flags: list[bool] = flags) -> PassResult:
            result = run(gm, ctx)
            flags.append(result.modified)
            return result

        before, logits_before = text, logits
        gm = run_passes(gm, [recorded], context(numerics))
        text = format_graph(gm)
        if text != before:
            logits = schedule_logits(gm, opened)
        stages[run.__name__] = Stage(before, text, flags[0], logits_before, logits)
    return Walk(stages, gm)


@functools.cache
def final_graph(name: str, numerics: Numerics, quantization: Quantization = "fp8_fp4") -> GraphModule:
    """The graph after the pipeline; not to be altered."""
    if (name, numerics, quantization) in WALKS:
        return walk(name, numerics, quantization).gm
    return run_passes(graph(name, numerics, quantization), build_pipeline(), context(numerics))


@functools.cache
def plan(name: str, numerics: Numerics, quantization: Quantization = "fp8_fp4") -> ExecutionPlan:
    return lower_graph(final_graph(name, numerics, quantization), DECODE_BUCKETS, MIXED_BUCKETS, ROLLBACK_ROWS)
