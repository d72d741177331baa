"""The hyper-connections: float32 rows to the order of a sum, bfloat16 rows to one rounding of the result."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.step_abi import Dim
from tests.kernels.runner import Runner, run_operator

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
# Rows of a step and of its bucket, streams and width: every tile of rows, partly filled, and several of them; a width
# that is no multiple of a load.
STEPS = pytest.mark.parametrize(
    ("rows", "capacity", "n", "width"),
    [(1, 1, 4, 64), (3, 4, 4, 37), (17, 32, 3, 104), (50, 64, 2, 96), (70, 256, 4, 64)],
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixer(rows: int, n: int, width: int, dtype: torch.dtype, logits: int | None = None) -> list[Tensor]:
    """Streams, fn, scale and base; logits that reach both ends of the sigmoids."""
    logits = (2 + n) * n if logits is None else logits
    fn = normal(logits, n * width, seed=1) * (3 / (n * width) ** 0.5)
    scale = torch.tensor([0.7, -0.4, 1.3])[: 3 if logits > n else 1]
    return [normal(rows, n, width).to(dtype), fn, scale, normal(logits, seed=2)]


def check(name: str, *args: Any, runner: Runner, capacity: int | None = None, rows: Dim = Dim.TOKENS) -> None:
    expected = getattr(torch.ops.dsv4, name)(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run_operator(name, *args, on=runner, capacity=capacity, rows=rows)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == wanted.dtype
        # Gates are float32 whatever the rows are. A bfloat16 has 8 bits: a sum in another order may round to the
        # neighbour, and what is normalised behind it once more.
        # Sums of up to 28,672 products in another order: the reference is no nearer to the truth.
        tolerance = 2**-6 if wanted.dtype == BF16 else 1e-5
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=tolerance, atol=max(tolerance, 3e-5))
        if wanted.dtype == BF16:
            assert float((actual != wanted).float().mean()) < 0.05


@DTYPES
@STEPS
def test_mix_norm(runner: Runner, dtype: torch.dtype, rows: int, capacity: int, n: int, width: int) -> None:
    weight = normal(width, seed=3) + 1
    check(
        "mhc_mix_norm",
        *(*mixer(rows, n, width, dtype), weight, 20, 1e-6, 1e-6, 1e-5),
        runner=runner,
        capacity=capacity,
    )


@DTYPES
@pytest.mark.parametrize(("iterations", "eps"), [(1, 1e-6), (3, 1e-2)])
def test_mix(runner: Runner, dtype: torch.dtype, iterations: int, eps: float) -> None:
    check("mhc_mix", *mixer(5, 4, 72, dtype), iterations, eps, 1e-3, runner=runner)


@DTYPES
def test_streams_behind_the_embedding_are_one(runner: Runner, dtype: torch.dtype) -> None:
    streams, *weights = mixer(19, 4, 64, dtype)
    streams = streams[:, :1].expand(19, 4, 64)
    check("mhc_mix", streams, *weights, 20, 1e-6, 1e-6, runner=runner)
    y, post, comb = normal(19, 64, seed=5).to(dtype), normal(19, 4, seed=6), normal(19, 4, 4, seed=7)
    check("mhc_combine", y, streams, post, comb, runner=runner)


@DTYPES
def test_weights_in_bf16(runner: Runner, dtype: torch.dtype) -> None:
    streams, *weights = mixer(6, 4, 64, dtype)
    operands = [streams, *(weight.bfloat16() for weight in (*weights, normal(64, seed=3)))]
    check("mhc_mix_norm", *operands, 20, 1e-6, 1e-6, 1e-6, runner=runner)


def test_small_and_large_streams(runner: Runner) -> None:
    """fn is a sum of three bfloat16 on tensor cores; nothing of it is lost."""
    streams, fn, scale, base = mixer(4, 4, 64, BF16)
    streams[0] *= 1e-4
    streams[1] *= 1e4
    streams[2] = 0
    fn[:, ::2] *= 1e3
    check("mhc_mix", streams, fn, scale * 1e-3, base, 20, 1e-6, 1e-6, runner=runner)


@DTYPES
@STEPS
def test_head(runner: Runner, dtype: torch.dtype, rows: int, capacity: int, n: int, width: int) -> None:
    operands = mixer(rows, n, width, dtype, logits=n)
    check("mhc_head", *operands, 1e-6, 1e-6, runner=runner, capacity=capacity, rows=Dim.LOGITS)


@DTYPES
@STEPS
def test_combine(runner: Runner, dtype: torch.dtype, rows: int, capacity: int, n: int, width: int) -> None:
    y, streams = normal(rows, width, seed=5).to(dtype), normal(rows, n, width).to(dtype)
    gates = normal(rows, n, seed=6), normal(rows, n, n, seed=7)
    check("mhc_combine", y, streams, *gates, runner=runner, capacity=capacity)


def test_combine_of_a_float32_result(runner: Runner) -> None:
    y = normal(5, 100)[:, :64]
    check("mhc_combine", y, normal(5, 4, 64).bfloat16(), normal(5, 4), normal(5, 4, 4), runner=runner)


class TestRealWidths:
    """On a GPU only: on the CPU each would take long."""

    pytestmark = [  # noqa: RUF012
        pytest.mark.gpu,
        pytest.mark.sm90a,
        pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"]),
        pytest.mark.parametrize(("rows", "width"), [(1, 4096), (33, 7168), (500, 4096), (300, 7168)]),
    ]

    def test_mix_norm(self, on_device: Runner, dtype: torch.dtype, rows: int, width: int) -> None:
        operands, weight = mixer(rows, 4, width, dtype), normal(width, seed=3).bfloat16()
        check("mhc_mix_norm", *operands, weight, 20, 1e-6, 1e-6, 1e-6, runner=on_device)

    def test_combine(self, on_device: Runner, dtype: torch.dtype, rows: int, width: int) -> None:
        y, streams = normal(rows, width, seed=5).to(dtype), normal(rows, 4, width).to(dtype)
        check("mhc_combine", y, streams, normal(rows, 4, seed=6), normal(rows, 4, 4, seed=7), runner=on_device)

    def test_head(self, on_device: Runner, dtype: torch.dtype, rows: int, width: int) -> None:
        operands = mixer(rows, 4, width, dtype, logits=4)
        check("mhc_head", *operands, 1e-6, 1e-6, runner=on_device, rows=Dim.LOGITS)
