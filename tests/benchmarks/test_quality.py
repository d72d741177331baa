"""The ablation of the quality benchmark takes out what it says, and nothing else."""

import pytest
import torch
from torch.fx import GraphModule

from dsv4c.graph.state_ops import Rounding
from dsv4c.passes.pass_manager import run_passes
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.passes.quantize_weights import quantize_weights
from tests.benchmarks.quality import PARTS, without
from tests.graph.small_models import context, graph

dsv4 = torch.ops.dsv4


def roundings(gm: GraphModule) -> dict[str, int]:
    """How many places of a graph round each part."""
    found = dict.fromkeys(PARTS, 0)
    for node in gm.graph.nodes:
        if node.target is dsv4.fp8_round.default:
            found["activations" if node.args[1] == 128 else "kv"] += 1
        elif node.target is dsv4.moe_ffn.default:
            found["activations"] += bool(node.args[-1])
        elif node.target in (dsv4.hadamard.default, dsv4.fp4_round.default):
            found["index"] += 1
        elif node.target is dsv4.compress.default:
            found["kv"] += node.args[-2] == Rounding.FP8
            found["index"] += node.args[-2] == Rounding.HADAMARD_FP4
    return found


@pytest.mark.parametrize(
    "dropped",
    [set(), {"activations"}, {"kv", "index"}, set(PARTS)],
    ids=lambda parts: "+".join(sorted(parts)) or "none",
)
def test_parts(dropped: set[str]) -> None:
    passes = build_pipeline()
    passes = passes[: passes.index(quantize_weights) + 1]
    gm = run_passes(graph("one_layer", "reference"), [*passes, without(dropped)], context("reference"))
    # Five inputs of projections and the experts; the window's keys and the compressed ones; the indexer's q and keys.
    all_of_them = {"activations": 6, "kv": 2, "index": 3}
    assert roundings(gm) == {part: 0 if part in dropped else count for part, count in all_of_them.items()}
