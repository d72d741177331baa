"""The numbers behind a placeholder: decoded values, stored codes or scales of its checkpoint tensors."""

import math

import torch
from torch import Tensor

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.checkpoint.formats import Encoding
from dsv4c.graph.annotations import Constant, Parameter

STORED_DTYPE = {
    Encoding.F32: torch.float32,
    Encoding.BF16: torch.bfloat16,
    Encoding.F16: torch.float16,
    Encoding.INT64: torch.int64,
    Encoding.FP8_BLOCK: torch.float8_e4m3fn,
    Encoding.FP4_GROUP: torch.float4_e2m1fn_x2,
}


def part_dtype(parameter: Parameter) -> torch.dtype:
    """The dtype of the codes or the scales of a stored weight."""
    if parameter.part == "scales":
        return torch.float32 if parameter.float_scales else torch.float8_e8m0fnu
    return STORED_DTYPE[parameter.encoding]


def unstraddled_block(block: tuple[int, int] | None, rows: tuple[int, ...]) -> tuple[int, int] | None:
    """The scale block of sources of `rows` stacked into one matrix: none may straddle the border of two sources."""
    if block is None:
        return None
    borders = [sum(rows[:i]) for i in range(1, len(rows))]
    return math.gcd(block[0], *borders), block[1]


def scale_rows(scales: Tensor, rows: int, block_rows: int, wanted: int) -> Tensor:
    """Scales [ceil(rows/block_rows), C] with one row for every `wanted` weight rows; `wanted` divides `block_rows`."""
    if wanted == block_rows:
        return scales
    return scales.repeat_interleave(block_rows // wanted, 0)[: -(-rows // wanted)]


def source_part(checkpoint: Checkpoint, name: str, parameter: Parameter) -> Tensor:
    """One source tensor of a parameter: float32 (int64) values, stored codes, or scales."""
    if parameter.part == "values":
        return checkpoint.values(name)
    if parameter.part == "codes":
        return checkpoint.codes(name)
    scales = checkpoint.scales(name)
    info = checkpoint.weights[name]
    assert scales is not None and info.block is not None and parameter.block is not None, name
    return scale_rows(scales, info.shape[0], info.block[0], parameter.block[0])


def load_parameter(checkpoint: Checkpoint, parameter: Parameter) -> Tensor:
    """The whole parameter in memory; for the oracle and for tests. Codes and scales come as their stored bytes."""

    def stack(expert: int | None) -> Tensor:
        return torch.cat([source_part(checkpoint, n, parameter) for n in parameter.source_names(expert)])

    if not parameter.experts:
        return stack(None)
    return torch.stack([stack(expert) for expert in range(parameter.experts)])


def load_constant(constant: Constant) -> Tensor:
    return torch.tensor(constant.values, dtype=torch.float32)
