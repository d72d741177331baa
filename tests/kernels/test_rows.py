"""Row kernels against their reference bodies: awkward widths, strided and broadcast rows, padded buckets."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.errors import PlanError
from dsv4c.graph.fused_ops import RowRounding
from dsv4c.step_abi import Dim
from tests.kernels.comparison import assert_close, assert_same_bits
from tests.kernels.runner import Runner, run_operator

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Values over several magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.05] = 0
    return x.to(dtype)


def frequencies(channels: int) -> Tensor:
    return 10000.0 ** -(torch.arange(0, channels, 2) / channels)


def positions(rows: int) -> Tensor:
    """Small ones and such that take many turns, to a million."""
    return torch.tensor([0, 1, 65537, 127, 999_983, 4096, 12, 1 << 20] * -(-rows // 8), dtype=torch.int32)[:rows]


def columns(x: Tensor, before: int, after: int) -> Tensor:
    """The same values as columns of a wider tensor."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), torch.nan, dtype=x.dtype)
    wide[..., before : before + x.shape[-1]] = x
    return wide[..., before : before + x.shape[-1]]


def reference(name: str, *args: Any) -> Tensor:
    return getattr(torch.ops.dsv4, name)(*args)


@pytest.mark.parametrize(
    ("shape", "dtype", "weighted"),
    [
        ((1, 64), BF16, True),
        ((3, 96), BF16, False),
        ((7, 100), BF16, True),
        ((7, 100), F32, True),
        ((3, 512), BF16, True),
        ((2, 4096), BF16, True),
        ((2, 4096), F32, False),
        ((2, 1100), BF16, True),
        ((1, 1000), F32, True),
        ((3, 8, 64), BF16, False),
        ((2, 64, 512), BF16, False),
        ((1, 1, 36), F32, True),
        ((5, 3, 20), BF16, True),
    ],
    ids=str,
)
def test_rms_norm(runner: Runner, shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    args = (randn(*shape, dtype=dtype), randn(shape[-1], dtype=BF16, seed=1) if weighted else None, EPS)
    (actual,) = run_operator("rms_norm", *args, on=runner)
    assert_close(actual, reference("rms_norm", *args))


@pytest.mark.parametrize(
    ("shape", "rotary", "dtype", "inverse"),
    [
        ((7, 64), 64, BF16, False),
        ((3, 512), 64, BF16, False),
        ((8, 8, 64), 32, F32, False),
        ((8, 8, 64), 32, F32, True),
        ((3, 64, 512), 64, BF16, True),
        ((2, 3, 36), 12, BF16, False),
        ((1, 100), 4, F32, True),
    ],
    ids=str,
)
def test_rope(runner: Runner, shape: tuple[int, ...], rotary: int, dtype: torch.dtype, inverse: bool) -> None:
    args = (randn(*shape, dtype=dtype), positions(shape[0]), frequencies(rotary), inverse)
    (actual,) = run_operator("rope", *args, on=runner)
    expected = reference("rope", *args)
    assert_close(actual, expected)
    assert_same_bits(actual[..., :-rotary], expected[..., :-rotary])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("shape", "group", "width"),
    [
        ((3, 64), 128, 64),
        ((7, 96), 64, 96),
        ((3, 100), 32, 100),
        ((3, 512), 64, 448),
        ((2, 4096), 128, 4096),
        ((1, 8192), 128, 8192),
        ((4, 8, 64), 64, 52),
        ((3, 36), 16, 30),
    ],
    ids=str,
)
def test_fp8_round(runner: Runner, shape: tuple[int, ...], group: int, width: int, dtype: torch.dtype) -> None:
    args = (randn(*shape, dtype=dtype), group, width)
    (actual,) = run_operator("fp8_round", *args, on=runner)
    assert_same_bits(actual, reference("fp8_round", *args))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    ("shape", "group"), [((3, 64), 32), ((7, 4, 128), 32), ((3, 100), 32), ((2, 8, 36), 16)], ids=str
)
def test_fp4_round(runner: Runner, shape: tuple[int, ...], group: int, dtype: torch.dtype) -> None:
    args = (randn(*shape, dtype=dtype), group)
    (actual,) = run_operator("fp4_round", *args, on=runner)
    assert_same_bits(actual, reference("fp4_round", *args))


@pytest.mark.parametrize("operator", ["fp8_round", "fp4_round"])
def test_rounding_of_extreme_groups(runner: Runner, operator: str) -> None:
    """All zero, below the smallest scale, exactly a power of two away from the largest code, ties."""
    x = torch.tensor([0.0, 1e-30, 448.0, 1e-4, 3e4, -6.0, 1e30, 1e-44]).unsqueeze(1).repeat(1, 64)
    x[:, ::3] *= 0.53125
    args = (x, 32, 64) if operator == "fp8_round" else (x, 32)
    (actual,) = run_operator(operator, *args, on=runner)
    assert_same_bits(actual, reference(operator, *args))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (7, 5, 128), (2, 1024), (1, 4), (1, 3, 16)], ids=str)
def test_hadamard(runner: Runner, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = (randn(*shape, dtype=dtype),)
    (actual,) = run_operator("hadamard", *args, on=runner)
    assert_same_bits(actual, reference("hadamard", *args))


CHAINS = {
    "q": {"norm": True, "rotary": 64, "shape": (3, 64, 512)},
    "kv": {"norm": True, "weighted": True, "rotary": 64, "rounding": 1, "group": 64, "width": 448, "shape": (3, 512)},
    "act": {"norm": True, "weighted": True, "rounding": 1, "group": 128, "width": 4096, "shape": (2, 4096)},
    "index_q": {"rotary": 64, "hadamard": True, "rounding": 2, "group": 32, "shape": (3, 64, 128)},
    "tiny_q": {"norm": True, "rotary": 12, "shape": (7, 3, 36)},
    "tiny_act": {"norm": True, "weighted": True, "rounding": 1, "group": 128, "width": 100, "shape": (5, 100)},
    "tiny_index_q": {"rotary": 8, "hadamard": True, "rounding": 2, "group": 32, "shape": (3, 4, 16)},
    "all": {"norm": True, "weighted": True, "rotary": 16, "hadamard": True, "rounding": 1, "shape": (3, 2, 64)},
}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("chain", list(CHAINS))
def test_row_chain(runner: Runner, chain: str, dtype: torch.dtype) -> None:
    what: dict[str, Any] = {"norm": False, "rotary": 0, "hadamard": False, "rounding": 0, **CHAINS[chain]}
    shape = what["shape"]
    rotary = what["rotary"]
    args = (
        randn(*shape, dtype=dtype),
        randn(shape[-1], seed=1) if what.get("weighted") else None,
        positions(shape[0]) if rotary else None,
        frequencies(rotary) if rotary else None,
        what["norm"],
        EPS if what["norm"] else 0.0,
        False,
        what["hadamard"],
        what["rounding"],
        what.get("group", 32),
        what.get("width", shape[-1]),
    )
    (actual,) = run_operator("row_chain", *args, on=runner)
    expected = reference("row_chain", *args)
    # A value at a rounding border before the last step falls into another code of it, of which the steps are wide.
    if what["rounding"] == RowRounding.NONE:
        assert_close(actual, expected, tolerance=2e-6)
    else:
        far = (actual.float() - expected.float()).abs() > 1e-6 * expected.float().abs().max()
        assert far.float().mean() < 0.01
        step = 2.0**-3 if what["rounding"] == RowRounding.FP8 else 0.5
        torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 2048), (3, 33)], ids=str)
def test_swiglu(runner: Runner, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    both = randn(shape[0], 2 * shape[1], dtype=dtype)
    args = (both[:, : shape[1]], both[:, shape[1] :], 10.0, dtype)
    (actual,) = run_operator("swiglu", *args, on=runner)
    assert_close(actual, reference("swiglu", *args))


@pytest.mark.parametrize("dtypes", [(F32, F32, BF16), (BF16, F32, BF16), (BF16, BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 4096), (2, 4, 60)], ids=str)
def test_add(runner: Runner, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    args = (randn(*shape, dtype=dtypes[0]), columns(randn(*shape, dtype=dtypes[1], seed=1), 8, 3), dtypes[2])
    (actual,) = run_operator("add", *args, on=runner)
    assert_same_bits(actual, reference("add", *args))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("width", [64, 100, 4096])
def test_embedding(runner: Runner, width: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    args = (torch.tensor([11, 0, 12], dtype=torch.int32), randn(13, width, dtype=dtypes[0]), dtypes[1])
    (actual,) = run_operator("embedding", *args, on=runner)
    assert_same_bits(actual, reference("embedding", *args))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("width", [64, 100])
def test_gather_rows(runner: Runner, width: int, dtype: torch.dtype) -> None:
    args = (randn(7, 4, width, dtype=dtype), torch.tensor([6, 2], dtype=torch.int32))
    (actual,) = run_operator("gather_rows", *args, on=runner)
    assert_same_bits(actual, reference("gather_rows", *args))


def test_gather_of_broadcast_streams(runner: Runner) -> None:
    """The streams behind the embedding are one tensor, seen four times."""
    args = (randn(5, 1, 64, dtype=BF16).expand(5, 4, 64), torch.tensor([4, 0, 1], dtype=torch.int32))
    (actual,) = run_operator("gather_rows", *args, on=runner)
    assert_same_bits(actual, reference("gather_rows", *args))


@pytest.mark.parametrize(("before", "after"), [(1024, 0), (8, 8), (4, 0), (3, 2)])
def test_columns_of_a_merged_projection(runner: Runner, before: int, after: int) -> None:
    x = columns(randn(3, 64, dtype=BF16), before, after)
    for name, args in (("rms_norm", (x, None, EPS)), ("fp8_round", (x, 32, 64))):
        (actual,) = run_operator(name, *args, on=runner)
        assert_close(actual, reference(name, *args))


@pytest.mark.parametrize("capacity", [3, 64])
def test_rows_of_the_head(runner: Runner, capacity: int) -> None:
    """Behind `gather_rows` the rows are those that want logits."""
    args = (randn(3, 64, dtype=BF16), randn(64, seed=1), EPS)
    (actual,) = run_operator("rms_norm", *args, on=runner, rows=Dim.LOGITS, tokens=17, capacity=max(capacity, 17))
    assert_close(actual, reference("rms_norm", *args))


@pytest.mark.parametrize("group", [24, 512])
def test_other_groups_are_refused(group: int) -> None:
    with pytest.raises(PlanError, match=f"groups of {group}"):
        run_operator("fp8_round", randn(1, 64), group, 64)
