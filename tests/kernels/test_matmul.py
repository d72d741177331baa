"""linear and grouped_linear against their reference bodies: formats, partial blocks, padded buckets, strided rows.

A tolerance is relative to the largest result: float32 sums of up to COLUMNS terms of either sign, in another order.
bfloat16 results are one unit apart where such a sum lies at a rounding border.
"""

import pytest
import torch
from torch import Tensor

from dsv4c.errors import PlanError
from dsv4c.step_abi import Dim
from tests.kernels.comparison import assert_close
from tests.kernels.runner import Runner, run_operator
from tests.kernels.stored_weights import FORMATS, random_matrix

BF16, F32 = torch.bfloat16, torch.float32
SUM_ORDER = 4e-6
BLOCK = (128, 128)


def activations(tokens: int, width: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn((tokens, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    runner: Runner,
    x: Tensor,
    storage: str,
    rows: int,
    result: torch.dtype = BF16,
    block: tuple[int, int] = BLOCK,
    capacity: int | None = None,
    dim: Dim = Dim.TOKENS,
    sm_count: int = 132,
) -> None:
    weight, scales = random_matrix(storage, (rows, x.shape[1]), block, seed=1)
    args = (x, weight, scales, *(block if scales is not None else (0, 0)), result)
    (actual,) = run_operator("linear", *args, on=runner, capacity=capacity, rows=dim, sm_count=sm_count)
    assert_close(actual, torch.ops.dsv4.linear(*args), SUM_ORDER)


@pytest.mark.parametrize("result", [BF16, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("storage", FORMATS)
def test_formats(runner: Runner, storage: str, dtype: torch.dtype, result: torch.dtype) -> None:
    check(runner, activations(3, 256, dtype), storage, 80, result)


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (1, 8), (8, 8), (9, 16), (16, 16), (3, 16)])
@pytest.mark.parametrize("storage", ["bf16", "fp8", "fp4"])
def test_streamed_rows(runner: Runner, storage: str, tokens: int, capacity: int) -> None:
    check(runner, activations(tokens, 384), storage, 40, capacity=capacity)


@pytest.mark.parametrize(("tokens", "capacity"), [(17, 32), (64, 64), (65, 256), (3, 64), (200, 256)])
@pytest.mark.parametrize("storage", ["bf16", "fp8", "fp8 float scales"])
def test_tiled_rows(runner: Runner, storage: str, tokens: int, capacity: int) -> None:
    check(runner, activations(tokens, 256), storage, 200, capacity=capacity)


@pytest.mark.parametrize("capacity", [8, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(1, 64, BLOCK), (16, 192, BLOCK), (17, 320, (64, 128)), (100, 128, (16, 64)), (130, 1088, (1, 128))],
    ids=str,
)
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_sizes_off_the_tiles(
    runner: Runner, storage: str, rows: int, columns: int, block: tuple[int, int], capacity: int
) -> None:
    check(runner, activations(3, columns), storage, rows, F32, block, capacity)


@pytest.mark.parametrize("capacity", [4, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(33, 50, (16, 16)), (7, 96, (32, 32)), (65, 36, BLOCK)], ids=str
)
@pytest.mark.parametrize("storage", ["f32", "bf16", "fp8", "fp8 float scales", "fp4"])
def test_matrices_without_alignment(
    runner: Runner, storage: str, rows: int, columns: int, block: tuple[int, int], capacity: int
) -> None:
    check(runner, activations(3, columns), storage, rows, BF16, block, capacity)
    if rows == 33:
        check(runner, activations(3, columns, F32), storage, rows, F32, block, capacity)


@pytest.mark.parametrize("capacity", [8, 64])
@pytest.mark.parametrize("before", [64, 1])
def test_columns_of_a_merged_projection(runner: Runner, before: int, capacity: int) -> None:
    wide = activations(5, 512)
    check(runner, wide[:, before : before + 256], "fp8", 48, capacity=capacity)


@pytest.mark.parametrize("capacity", [8, 64])
def test_rows_that_want_logits(runner: Runner, capacity: int) -> None:
    check(runner, activations(5, 256), "bf16", 300, F32, capacity=capacity, dim=Dim.LOGITS)


@pytest.mark.parametrize("capacity", [8, 64])
@pytest.mark.parametrize("sm_count", [132, 114])
def test_split_columns(runner: Runner, capacity: int, sm_count: int) -> None:
    check(runner, activations(7, 2048), "fp8", 64, capacity=capacity, sm_count=sm_count)
    check(runner, activations(7, 2048), "bf16", 64, capacity=capacity, sm_count=sm_count)


@pytest.mark.parametrize("capacity", [8, 64])
@pytest.mark.parametrize("exponent", [0, 1, 128, 129, 200, 250])
def test_scales_far_from_one(runner: Runner, exponent: int, capacity: int) -> None:
    """Every scale whose products are finite in float32; subnormal results of e4m3 codes are lost."""
    x = torch.eye(8, 128, dtype=BF16)
    for storage in ("fp8", "fp4"):
        weight, scales = random_matrix(storage, (16, 128), BLOCK, seed=2)
        assert scales is not None
        scales = torch.full_like(scales.view(torch.uint8), exponent).view(torch.float8_e8m0fnu)
        if storage == "fp8":
            scales.view(torch.uint8).clamp_(min=20, max=240)
        args = (x, weight, scales, *BLOCK, F32)
        (actual,) = run_operator("linear", *args, on=runner, capacity=capacity)
        assert torch.equal(actual, torch.ops.dsv4.linear(*args))


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (3, 16), (17, 64)])
@pytest.mark.parametrize(
    ("storage", "dtype", "groups", "rows", "columns"),
    [
        ("fp8", BF16, 8, 64, 128),
        ("bf16", BF16, 2, 24, 64),
        ("fp8 float scales", BF16, 4, 32, 256),
        ("fp8", F32, 4, 24, 64),
        ("fp8", BF16, 3, 10, 36),
    ],
)
def test_grouped_linear(
    runner: Runner, storage: str, dtype: torch.dtype, groups: int, rows: int, columns: int, tokens: int, capacity: int
) -> None:
    weight, scales = random_matrix(storage, (groups * rows, columns), (16, 128), seed=3)
    x = activations(tokens, groups * columns, dtype)
    args = (x, weight, scales, *((16, 128) if scales is not None else (0, 0)), groups)
    (actual,) = run_operator("grouped_linear", *args, on=runner, capacity=capacity)
    assert_close(actual, torch.ops.dsv4.grouped_linear(*args), SUM_ORDER)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_integer_weights_name_the_recipe(dtype: torch.dtype) -> None:
    weight = torch.zeros((8, 64), dtype=dtype)
    with pytest.raises(PlanError, match="INT8 or INT4") as raised:
        run_operator("linear", activations(1, 64), weight, torch.ones((8, 2), dtype=torch.float16), 1, 32, BF16)
    assert "recipe" in str(raised.value.hint)


# The projections of V4-Flash: rows, columns, storage, result, and rows of the step with the bucket.
FLASH = [
    (1536, 4096, "fp8", BF16),
    (32768, 1024, "fp8", BF16),
    (4096, 8192, "fp8", BF16),
    (2560, 4096, "bf16", F32),
    (64, 4096, "bf16", BF16),
    (256, 4096, "bf16", F32),
]


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (7, 8), (13, 16), (50, 64), (200, 256)])
@pytest.mark.parametrize(("rows", "columns", "storage", "result"), FLASH, ids=str)
def test_flash_projections(
    on_device: Runner, rows: int, columns: int, storage: str, result: torch.dtype, tokens: int, capacity: int
) -> None:
    check(on_device, activations(tokens, columns), storage, rows, result, capacity=capacity)


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (1000, 1024)])
def test_flash_grouped(on_device: Runner, tokens: int, capacity: int) -> None:
    weight, scales = random_matrix("fp8", (8192, 4096), BLOCK, seed=3)
    args = (activations(tokens, 32768), weight, scales, *BLOCK, 8)
    (actual,) = run_operator("grouped_linear", *args, on=on_device, capacity=capacity)
    assert_close(actual, torch.ops.dsv4.grouped_linear(*args), SUM_ORDER)


@pytest.mark.gpu
@pytest.mark.sm90a
def test_flash_head(on_device: Runner) -> None:
    check(on_device, activations(4, 4096), "bf16", 129280, F32, capacity=4, dim=Dim.LOGITS)
