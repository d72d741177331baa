"""The same work by what else there is: torch's grouped products, and DeepGEMM and vLLM where they are installed.

Weights of 256 experts that no peer reads in FP4 as these kernels do; each has its own format and is told its own bytes.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.experts.manifest import Shape
from tests.benchmarks.experts.program import Layer
from tests.benchmarks.experts.routing import Routing, logits_for, route, uniform_ranks
from tests.benchmarks.experts.rows import Reporter
from tests.benchmarks.experts.timing import LAUNCHES, measure, prepare


@dataclass(frozen=True)
class Step:
    """A routing and its lists, made outside of the timing."""

    routing: Routing
    rows: Tensor  # of x, for the pairs by expert
    ends: Tensor  # int32 [E], of the experts' pairs
    weights: Tensor  # bf16 [P, 1], of the pairs by expert
    back: Tensor  # where the pairs of a row are among those by expert
    counts: Tensor  # int32 [E]


def time_peers(report: Reporter, layer: Layer, tokens: int) -> None:
    shape = layer.shape
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn((tokens, shape.hidden), generator=generator, device="cuda").bfloat16()
    steps = [_step(shape, layer.bias, tokens, generator) for _ in range(LAUNCHES)]
    hit = statistics.mean(int((step.counts > 0).sum()) for step in steps)
    flops = 6 * tokens * shape.choices * shape.hidden * shape.inner
    parameters = 3 * shape.hidden * shape.inner
    for name, (bytes_each, module, make) in PEERS.items():
        if find_spec(module) is None:
            continue
        try:
            work = make(layer, x, steps)
            measured = prepare(work)
            measure(report, [measured])
        except torch.AcceleratorError:
            raise  # the card is of no use to this process any more
        except Exception as error:  # noqa: BLE001  other programs' of many kinds
            report.row("peer", tokens=tokens, case=name, note=f"failed: {type(error).__name__}: {error}"[:200])
            continue
        size = hit * parameters * bytes_each
        report.row(
            "peer",
            tokens=tokens,
            case=name,
            us_experts=measured.us,
            spread=measured.spread,
            experts_hit=hit,
            megabytes=size / 1e6,
            tflop_per_s=flops / measured.us / 1e6,
            sm_mhz=measured.sm_mhz[-1],
            note="ok",
        )


Make = Callable[[Layer, Tensor, Sequence[Step]], Callable[[], object]]


def report_missing(report: Reporter, layer: Layer) -> None:
    for name, (_, module, _) in PEERS.items():
        if find_spec(module) is None:
            report.row("peer", case=name, note="not available")


def _step(shape: Shape, bias: Tensor, tokens: int, generator: torch.Generator) -> Step:
    ranks = uniform_ranks(tokens, shape.experts, generator)
    routing = route(shape, logits_for(ranks, bias), bias, None)
    order = routing.ids.flatten().sort(stable=True).indices
    counts = torch.bincount(routing.ids.flatten(), minlength=shape.experts)
    return Step(
        routing,
        order // shape.choices,
        counts.cumsum(0).int(),
        routing.weights.flatten()[order].bfloat16().unsqueeze(1),
        order.argsort(),
        counts.int(),
    )


def _bf16_weights(layer: Layer) -> tuple[Tensor, Tensor]:
    """w13 [E, 2I, D] and w2 [E, D, I]."""
    shape = layer.shape
    sizes = {
        "bf16 w13": (shape.experts, 2 * shape.inner, shape.hidden),
        "bf16 w2": (shape.experts, shape.hidden, shape.inner),
    }
    for name, size in sizes.items():
        if name not in layer.stored:
            layer.stored[name] = torch.empty(size, dtype=torch.bfloat16, device="cuda")
            for matrix in layer.stored[name]:
                matrix.normal_(std=1 / 64)
    return layer.stored["bf16 w13"], layer.stored["bf16 w2"]


def _grouped_mm(layer: Layer, x: Tensor, steps: Sequence[Step]) -> Callable[[], object]:
    """Gather, two products, SwiGLU and the weighted sum."""
    shape = layer.shape
    w13, w2 = _bf16_weights(layer)

    def work() -> None:
        for step in steps:
            gate_up = torch._grouped_mm(x[step.rows], w13.transpose(1, 2), offs=step.ends)
            gate, up = gate_up.chunk(2, 1)
            h = torch.nn.functional.silu(gate.clamp(max=shape.limit)) * up.clamp(-shape.limit, shape.limit)
            parts = torch._grouped_mm(h * step.weights, w2.transpose(1, 2), offs=step.ends)
            parts[step.back].view(len(x), shape.choices, shape.hidden).sum(1, dtype=torch.float32)

    return work


def _vllm(layer: Layer, x: Tensor, steps: Sequence[Step]) -> Callable[[], object]:
    from vllm.model_executor.layers.fused_moe import fused_experts

    w13, w2 = _bf16_weights(layer)
    routed = [(step.routing.weights.float(), step.routing.ids.int()) for step in steps]
    return lambda: [fused_experts(x, w13, w2, weights, ids) for weights, ids in routed]


def _deep_gemm(layer: Layer, x: Tensor, steps: Sequence[Step]) -> Callable[[], object]:
    import deep_gemm

    shape, tokens = layer.shape, len(x)
    rows = max(8, -(-max(int(step.counts.max()) for step in steps) // 8) * 8)

    def operands(n: int, k: int) -> tuple[Any, Any, Tensor]:
        def codes(*size: int) -> Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)

        a = codes(shape.experts, rows, k), torch.ones((shape.experts, rows, k // 128), device="cuda")
        b = codes(shape.experts, n, k), torch.ones((shape.experts, n // 128, k // 128), device="cuda")
        return a, b, torch.empty((shape.experts, rows, n), dtype=torch.bfloat16, device="cuda")

    products = [operands(2 * shape.inner, shape.hidden), operands(shape.hidden, shape.inner)]
    expected = -(-tokens * shape.choices // shape.experts)

    def work() -> None:
        for step in steps:
            for a, b, out in products:
                deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, step.counts, expected)

    return work


# Bytes of a weight, what must be installed, and what makes the work of all steps.
PEERS: dict[str, tuple[float, str, Make]] = {
    "torch._grouped_mm, bf16": (2, "torch", _grouped_mm),
    "vLLM fused_experts, bf16": (2, "vllm", _vllm),
    "DeepGEMM masked, FP8, the two products alone": (1 + 4 / 128**2, "deep_gemm", _deep_gemm),
}
