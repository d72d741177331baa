"""Every operator takes a step without rows: its reference body gives what the fake says, and leaves the state alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4c.graph import expert_ops, fused_ops, ops, sampling, state_ops
from tests.graph.expert_cases import expert_case

assert all((expert_ops, fused_ops, ops, sampling, state_ops))  # their import registers the operators

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
N, D, HEADS, EXPERTS, K, INNER, VOCAB = 4, 128, 2, 5, 2, 128, 40
RING, GROUP, WIDTH, RATIO, BLOCK = 8, 6, 2 * D, 4, 2


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros((0, *shape), dtype=dtype)


def full(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


STEP = (rows(dtype=I32), rows(dtype=I32), full(3, 2, dtype=I32))  # slots, positions, block table
FREQUENCIES = full(32)
ATTENTION = (rows(HEADS, D), rows(D), full(3, RING, D), None, full(6, BLOCK, D), None, rows(K, dtype=I32), full(HEADS))
MIX = (rows(N, D), full(24, N * D), full(3), full(24))


def moe(name: str) -> tuple[Any, ...]:
    case = expert_case(EXPERTS, D, INNER, fp8=name.startswith("fp8"))
    if name.endswith("moe"):
        choice = rows(K, dtype=I32), rows(K, dtype=F32)
        return rows(D), *choice, case.w13, case.w13_scales, case.w2, case.w2_scales, *case.block, 1.0, 128
    by_token = (None, full(VOCAB, K, dtype=torch.int64), rows(dtype=I32))
    router = by_token if name.endswith("hash") else (full(EXPERTS), None, None)
    return rows(D), rows(EXPERTS, dtype=F32), *router, case.packed, None, INNER, K, 1.0, 1.0, 0


def chain(rounding: int, group: int, hadamard: bool) -> tuple[Any, ...]:
    return rows(HEADS, D), full(D), rows(dtype=I32), FREQUENCIES, True, 1e-6, False, hadamard, rounding, group, 64


CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "add": [lambda: (rows(D), rows(D), BF16)],
    "attention": [lambda: (*ATTENTION, *STEP, 4, RATIO, 64, 0.1)],
    "attention_unrotated": [lambda: (*ATTENTION, *STEP, 4, RATIO, 64, 0.1, FREQUENCIES)],
    "commit_ring": [lambda: (rows(D), full(3, RING, D), None, *STEP[:2], 64)],
    "compress": [
        lambda: (
            *(rows(WIDTH, dtype=F32), rows(WIDTH, dtype=F32), full(RATIO, WIDTH), full(D), FREQUENCIES, *STEP),
            *(full(3, GROUP, 2, WIDTH), full(6, BLOCK, D), None, RATIO, True, 1e-6, 0, BF16),
        )
    ],
    "count_routing": [lambda: (rows(K, dtype=I32), full(1, EXPERTS, dtype=torch.int64))],
    "embedding": [lambda: (rows(dtype=I32), full(VOCAB, D), BF16)],
    "fp4_round": [lambda: (rows(D), 32), lambda: (rows(HEADS, D), 32)],
    "fp8_round": [lambda: (rows(D), 128, D), lambda: (rows(HEADS, D), 64, 64)],
    "gather_rows": [lambda: (rows(N, D), rows(dtype=I32)), lambda: (full(3, N, D), rows(dtype=I32))],
    "grouped_linear": [lambda: (rows(2 * D), full(8, D), None, 0, 0, 2)],
    "hadamard": [lambda: (rows(D),), lambda: (rows(HEADS, D),)],
    "linear": [lambda: (rows(D), full(8, D), None, 0, 0, BF16)],
    "mhc_combine": [lambda: (rows(D), rows(N, D), rows(N, dtype=F32), rows(N, N, dtype=F32))],
    "mhc_head": [lambda: (rows(N, D), full(N, N * D), full(1), full(N), 1e-6, 1e-6)],
    "mhc_mix": [lambda: (*MIX, 3, 1e-6, 1e-6)],
    "mhc_mix_norm": [lambda: (*MIX, full(D), 3, 1e-6, 1e-6, 1e-6)],
    "moe_ffn": [lambda: moe("fp4 moe"), lambda: moe("fp8 moe")],
    "placed_experts": [lambda: moe("fp4"), lambda: moe("fp8"), lambda: moe("fp4 hash")],
    "rms_norm": [lambda: (rows(D), full(D), 1e-6)],
    "rope": [
        lambda: (rows(D), rows(dtype=I32), FREQUENCIES, False),
        lambda: (rows(2, D), *STEP[:1], FREQUENCIES, True),
    ],
    "route_hash": [lambda: (rows(EXPERTS, dtype=F32), full(VOCAB, K, dtype=torch.int64), rows(dtype=I32), 1.0)],
    "route_topk": [lambda: (rows(EXPERTS, dtype=F32), full(EXPERTS), K, 1.0)],
    "row_chain": [lambda: chain(0, 0, False), lambda: chain(1, 64, False), lambda: chain(2, 32, True)],
    "sample": [
        lambda: (
            *(rows(VOCAB, dtype=F32), rows(dtype=I32), full(3, dtype=I32), rows(dtype=F32), rows(dtype=I32)),
            *(rows(dtype=F32), rows(dtype=torch.int64), rows(2, dtype=I32)),
        )
    ],
    "select_entries": [
        lambda: (rows(HEADS, D), rows(HEADS, dtype=F32), full(6, BLOCK, D), None, *STEP, K, RATIO, 1.0),
    ],
    "swiglu": [lambda: (rows(D), rows(D), 1.0, BF16)],
}


def test_every_operator_has_a_case() -> None:
    names = {name.removeprefix("dsv4::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsv4::")}
    assert {name.split(".")[0] for name in names} == CASES.keys()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, case, id=f"{name}-{number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_no_rows(name: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
    operator = getattr(torch.ops.dsv4, name).default
    given = arguments()
    before = [each.clone() if isinstance(each, Tensor) else each for each in given]
    found = _tensors(operator(*given))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given]
        expected = _tensors(operator(*fakes))
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]
    assert all(each.shape[0] == 0 for each in found)
    for old, new in zip(before, given, strict=True):
        assert not isinstance(old, Tensor) or torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def _tensors(result: object) -> list[Tensor]:
    return [each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, Tensor)]
