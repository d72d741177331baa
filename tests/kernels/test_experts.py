"""moe_ffn against its reference body: experts without pairs, with one and with all, formats, padded buckets.

Results are compared relative to the largest: float32 sums in another order. With rounded activations a product at
a border of e4m3 may fall to its other side, which changes one input of the second projection by up to 1/16.
"""

import pytest
import torch
from torch import Tensor

from dsv4c.errors import PlanError
from tests.kernels.comparison import assert_close
from tests.kernels.runner import Runner, run_operator
from tests.kernels.stored_weights import random_matrix

BF16, F32 = torch.bfloat16, torch.float32
SUM_ORDER = 4e-6
# A bf16 product one unit off moves a result by 2^-8 of one of its terms.
ROUNDED_PRODUCT = 2e-3
# An e4m3 product one unit off, by 2^-4.
ROUNDED_CODE = 2e-2
LIMIT = 10.0


def route(pattern: str, tokens: int, count: int, choices: int) -> Tensor:
    """Experts of each row, all different within it."""
    if pattern == "random":
        generator = torch.Generator().manual_seed(tokens)
        return torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(tokens)]).int()
    if pattern == "same":  # all rows to the first experts
        return torch.arange(choices, dtype=torch.int32).repeat(tokens, 1)
    assert pattern == "last", pattern  # and to the last
    return torch.arange(count - 1, count - 1 - choices, -1, dtype=torch.int32).repeat(tokens, 1)


def arguments(
    tokens: int,
    *,
    storage: str = "fp4",
    dtype: torch.dtype = BF16,
    width: int = 256,
    inner: int = 128,
    count: int = 8,
    choices: int = 4,
    block: tuple[int, int] = (128, 128),
    act_group: int = 0,
    pattern: str = "random",
) -> tuple[object, ...]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((tokens, width), generator=generator).to(dtype)
    weights = torch.rand((tokens, choices), generator=generator) + 0.1
    w13, scales13 = random_matrix(storage, (count, 2 * inner, width), block, seed=1)
    w2, scales2 = random_matrix(storage, (count, width, inner), block, seed=2)
    ids = route(pattern, tokens, count, choices)
    # Products of a size that the limit of swiglu cuts now and then.
    scale = 2.0 ** -round(torch.log2(torch.tensor(float(width))).item() / 2)
    x = (x * scale).to(dtype)
    return x, ids, weights, w13, scales13, w2, scales2, *block, LIMIT, act_group


def check(runner: Runner, args: tuple[object, ...], tolerance: float, capacity: int | None = None) -> None:
    (actual,) = run_operator("moe_ffn", *args, on=runner, capacity=capacity)
    assert_close(actual, torch.ops.dsv4.moe_ffn(*args), tolerance)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("storage", ["f32", "bf16", "fp8", "fp8 float scales", "fp4"])
def test_formats(runner: Runner, storage: str, dtype: torch.dtype) -> None:
    tolerance = SUM_ORDER if dtype is F32 else ROUNDED_PRODUCT
    check(runner, arguments(3, storage=storage, dtype=dtype), tolerance)


@pytest.mark.parametrize("pattern", ["random", "same", "last"])
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (3, 4), (8, 8), (17, 64), (65, 256)])
def test_routings(runner: Runner, tokens: int, capacity: int, pattern: str) -> None:
    """With `same` and `last` one expert has every row and others none."""
    check(runner, arguments(tokens, pattern=pattern), ROUNDED_PRODUCT, capacity)


@pytest.mark.parametrize(
    ("tokens", "count", "choices"), [(3, 32, 1), (3, 32, 6), (20, 8, 4), (20, 8, 6), (40, 300, 1), (40, 300, 6)]
)
def test_choices(runner: Runner, tokens: int, count: int, choices: int) -> None:
    check(runner, arguments(tokens, count=count, choices=choices, width=64, inner=32), ROUNDED_PRODUCT)


@pytest.mark.parametrize("capacity", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("storage", ["bf16", "fp8", "fp4"])
def test_tiles_of_every_size(runner: Runner, storage: str, capacity: int) -> None:
    """Buckets in which an expert's share grows from a few pairs to a hundred."""
    check(runner, arguments(7, storage=storage), ROUNDED_PRODUCT, capacity)


# In float32 the kernels are the same for every bucket.
@pytest.mark.parametrize(
    ("capacity", "dtype", "act_group"),
    [
        *((capacity, BF16, group) for capacity, group in ((4, 128), (4, 32), (256, 128), (256, 64))),
        *((4, F32, group) for group in (128, 64, 32)),
    ],
    ids=str,
)
def test_rounded_activations(runner: Runner, act_group: int, capacity: int, dtype: torch.dtype) -> None:
    check(runner, arguments(3, act_group=act_group, inner=192, dtype=dtype), ROUNDED_CODE, capacity)


# The last two are not for tensor cores, nor are groups of 48.
@pytest.mark.parametrize(
    ("width", "inner", "storage", "act_groups"),
    [
        (160, 96, "fp4", (0, 128, 48)),
        (96, 160, "fp4", (0, 128)),
        (72, 40, "bf16", (0, 128)),
        (80, 48, "fp8", (0, 128)),
        (50, 36, "fp8", (0, 48)),
        (36, 50, "bf16", (0, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [4, 256])
def test_sizes_off_the_tiles(
    runner: Runner, width: int, inner: int, storage: str, act_groups: tuple[int, ...], capacity: int
) -> None:
    for act_group in act_groups if capacity == 4 else act_groups[1:2]:
        args = arguments(3, width=width, inner=inner, storage=storage, act_group=act_group, block=(32, 64))
        check(runner, args, ROUNDED_CODE if act_group else ROUNDED_PRODUCT, capacity)


def test_strided_rows_and_experts(runner: Runner) -> None:
    """Columns of wider tensors, and experts with other bytes between them."""
    x, ids, weights, w13, scales13, w2, scales2, *rest = arguments(5, storage="fp8")
    assert isinstance(w13, Tensor) and isinstance(x, Tensor)
    wide = torch.zeros((5, 328), dtype=BF16)
    wide[:, 40:296] = x
    spaced = torch.zeros((8, w13[0].numel() + 256), dtype=torch.uint8)
    spaced[:, : w13[0].numel()] = w13.view(torch.uint8).flatten(1)
    w13 = spaced.view(torch.float8_e4m3fn)[:, : w13[0].numel()].unflatten(1, w13.shape[1:])
    for capacity in (8, 256):
        check(runner, (wide[:, 40:296], ids, weights, w13, scales13, w2, scales2, *rest), ROUNDED_PRODUCT, capacity)


def test_integer_weights_name_the_recipe() -> None:
    x, ids, weights, w13, _, w2, _, *rest = arguments(1, storage="f32")
    assert isinstance(w13, Tensor) and isinstance(w2, Tensor)
    ones13, ones2 = torch.ones((8, 256, 8), dtype=torch.float16), torch.ones((8, 256, 4), dtype=torch.float16)
    with pytest.raises(PlanError, match="INT8 or INT4"):
        run_operator("moe_ffn", x, ids, weights, w13.to(torch.int8), ones13, w2.to(torch.int8), ones2, *rest)


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize(("tokens", "capacity"), [(1, 1), (7, 8), (20, 32), (64, 128), (100, 256), (300, 1024)])
def test_flash_experts(on_device: Runner, tokens: int, capacity: int) -> None:
    """V4-Flash's sizes but for the number of experts, which decides the time of the reference; every size of tile."""
    args = arguments(tokens, width=4096, inner=2048, count=24, choices=6, act_group=128)
    check(on_device, args, ROUNDED_CODE, capacity)
