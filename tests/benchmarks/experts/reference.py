"""The routed experts in float64, rounded where the kernels round."""

import torch
from torch import Tensor

from tests.benchmarks.experts.records import Records
from tests.benchmarks.experts.routing import Routing, dequantized, quantized


def expected(records: Records, x: Tensor, routing: Routing) -> Tensor:
    """float64 [T, D]."""
    shape = records.shape
    ids, weights = routing.ids, routing.weights
    parts = torch.zeros((*ids.shape, shape.hidden), dtype=torch.float64, device=x.device)
    rounded = dequantized(*quantized(x))
    for expert in ids.unique().tolist():
        rows, choices = torch.where(ids == expert)
        gate_weight, up_weight, down_weight = records.unpack(expert)
        gate = (rounded[rows] @ gate_weight.T).clamp(max=shape.limit)
        up = (rounded[rows] @ up_weight.T).clamp(-shape.limit, shape.limit)
        h = gate * torch.sigmoid(gate) * up * weights[rows, choices].unsqueeze(1)
        h = dequantized(*quantized(h.bfloat16()))
        parts[rows, choices] = h @ down_weight.T
    return parts.sum(1)
