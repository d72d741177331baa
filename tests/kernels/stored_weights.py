"""Stored matrices of random codes, for tests of the kernels that multiply by them."""

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import FP4_GROUP

FORMATS = ("f32", "bf16", "fp8", "fp8 float scales", "fp4")


def random_matrix(
    storage: str, shape: tuple[int, ...], block: tuple[int, int], seed: int
) -> tuple[Tensor, Tensor | None]:
    """A matrix [..., O, I] and its scales: every code of the format, scales over several powers of two."""
    generator = torch.Generator().manual_seed(seed)
    *experts, rows, columns = shape
    if storage in ("f32", "bf16"):
        values = torch.randn(shape, generator=generator)
        return values.to(torch.float32 if storage == "f32" else torch.bfloat16), None
    if storage == "fp4":
        codes = torch.randint(0, 256, (*experts, rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = _exponents((*experts, rows, -(-columns // FP4_GROUP)), generator)
        return codes.view(torch.float4_e2m1fn_x2), scales
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E  # NaN, which a build refuses
    grid = (*experts, -(-rows // block[0]), -(-columns // block[1]))
    if storage == "fp8":
        return codes.view(torch.float8_e4m3fn), _exponents(grid, generator)
    return codes.view(torch.float8_e4m3fn), torch.rand(grid, generator=generator) + 0.01


def _exponents(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(119, 131, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
