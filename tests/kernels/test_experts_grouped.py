"""The one launch of the routed experts of large steps, experts_grouped and experts_prefill, against the reference body
of the operator."""

import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.expert_packing import StoredMatrix, pack_fp4
from dsv4c.checkpoint.formats import quantize_fp4
from dsv4c.graph.topology import ExpertShapes, place
from tests.graph.expert_cases import expert_case
from tests.kernels.runner import run_operator

BUCKET = 512  # larger than what the weights are streamed for
SMS = 3
# Sums of 128 columns are added in another order than the reference adds all.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}


def check(
    experts: Tensor,
    tokens: int,
    hidden: int,
    inner: int,
    choices: int,
    *,
    crowd: int = 0,
    topology: Tensor | None = None,
    sm_count: int = SMS,
    scale: float = 1.0,
) -> None:
    """All of the first `crowd` rows choose expert 0, which then has several places."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=random).bfloat16()
    logits = torch.randn(tokens, len(experts), generator=random)
    logits[:crowd, 0] = 50
    bias = torch.zeros(len(experts))
    args = (x, logits, bias, None, None, experts, topology, inner, choices, 1.5, 10.0, 4)
    (out,) = run_operator("placed_experts", *args, capacity=BUCKET, sm_count=sm_count)
    if tokens:
        expected = torch.ops.dsv4.placed_experts(*args)
        torch.testing.assert_close(out * scale, expected * scale, **TOLERANCE)


# With 128 experts places have up to 32 pairs, and products are of e4m3; with 24 up to 64 and with 16 up to 128, of f16.
@pytest.mark.parametrize("fp8", [False, True], ids=["fp4", "fp8"])
@pytest.mark.parametrize(("count", "tokens", "crowd"), [(128, 70, 70), (24, 90, 80), (16, 150, 140)])
def test_places_of_any_number_of_pairs(count: int, tokens: int, crowd: int, fp8: bool) -> None:
    # w2 has six panels, a strip four: the second strip has only two.
    check(expert_case(count, 384, 256, fp8=fp8).packed, tokens, 384, 256, 2, crowd=crowd)


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_steps_of_few_rows(tokens: int) -> None:
    check(expert_case(16, 256, 128).packed, tokens, 256, 128, 4)


@pytest.mark.parametrize("count", [128, 16])
def test_groups_of_sms(count: int) -> None:
    placed = place(ExpertShapes(count, 256, 128), 8, "pinned", 4)
    topology = torch.tensor([placed.table()], dtype=torch.int32)
    check(expert_case(count, 256, 128).packed, 40, 256, 128, 4, topology=topology, sm_count=8)


def distant_scales(rows: int, columns: int, random: torch.Generator) -> StoredMatrix:
    """Nearly as far apart as may be packed, within a row too; and blocks of zeros with any scale."""
    codes, scales = quantize_fp4(torch.randn(rows, columns, generator=random) * 2.0 / columns**0.5)
    moved = scales.view(torch.uint8).int()
    moved += torch.randint(-4, 4, moved.shape, generator=random)
    moved += torch.randint(-14, 2, (rows, 1), generator=random)
    zero = torch.rand(moved.shape, generator=random) < 0.1
    moved[zero] = torch.where(torch.rand(moved.shape, generator=random) < 0.5, 250, 1).int()[zero]
    blocks = codes.view(torch.uint8).view(rows, columns // 32, 16).clone()
    blocks[zero] = 0x80  # two zeros, one of them negative
    return StoredMatrix(blocks.view(rows, columns // 2), moved.to(torch.uint8))


@pytest.mark.parametrize("count", [4, 24, 128])
def test_scales_that_lie_far_apart(count: int) -> None:
    random = torch.Generator().manual_seed(3)
    shapes = ((256, 256), (256, 256), (256, 256))
    packed = [pack_fp4(*(distant_scales(*shape, random) for shape in shapes)) for _ in range(count)]
    experts = torch.stack(packed).view(torch.float4_e2m1fn_x2)
    check(experts, 100, 256, 256, 2, crowd=90, scale=1e-3)
