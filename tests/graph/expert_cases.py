"""Random experts in stored form and packed, for tests of the operators and of what runs them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4c.checkpoint.expert_packing import StoredMatrix, pack_fp4, pack_fp8
from dsv4c.checkpoint.formats import quantize_fp4, quantize_fp8


@dataclass(frozen=True)
class ExpertCase:
    """The same experts as operands of `moe_ffn`, with their scale block, and as that of `placed_experts`."""

    w13: Tensor
    w13_scales: Tensor
    w2: Tensor
    w2_scales: Tensor
    block: tuple[int, int]
    packed: Tensor


def expert_case(count: int, hidden: int, inner: int, *, fp8: bool = False, seed: int = 0) -> ExpertCase:
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> StoredMatrix:
        values = torch.randn(rows, columns, generator=random) * 2.0 / columns**0.5
        return StoredMatrix(*(quantize_fp8(values, (128, 128)) if fp8 else quantize_fp4(values)))

    experts = [(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)) for _ in range(count)]
    pack = pack_fp8 if fp8 else pack_fp4
    code = torch.float8_e4m3fn if fp8 else torch.float4_e2m1fn_x2

    def stack(part: int, *which: int) -> Tensor:
        return torch.stack([torch.cat([expert[i][part].view(torch.uint8) for i in which]) for expert in experts])

    return ExpertCase(
        stack(0, 0, 1).view(code),
        stack(1, 0, 1).view(torch.float8_e8m0fnu),
        stack(0, 2).view(code),
        stack(1, 2).view(torch.float8_e8m0fnu),
        (128, 128) if fp8 else (1, 32),
        torch.stack([pack(*expert) for expert in experts]).view(code),
    )
