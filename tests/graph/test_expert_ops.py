"""`placed_experts` against the operators that it stands for."""

import pytest
import torch
from torch import Tensor

from dsv4c.graph import expert_ops
from tests.graph.expert_cases import ExpertCase, expert_case

dsv4 = torch.ops.dsv4
assert expert_ops  # its import registers the operators

EXPERTS, HIDDEN, INNER, LIMIT = 5, 256, 128, 1.0


def operands(tokens: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, HIDDEN, generator=random).to(torch.bfloat16)
    return x, torch.randn(tokens, EXPERTS, generator=random)


def separate(case: ExpertCase, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    stacks = (case.w13, case.w13_scales, case.w2, case.w2_scales)
    result = dsv4.moe_ffn(x, ids, weights, *stacks, *case.block, LIMIT, 128)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_score_routing(fp8: bool, tokens: int) -> None:
    case = expert_case(EXPERTS, HIDDEN, INNER, fp8=fp8)
    x, logits = operands(tokens)
    bias = torch.linspace(0, 0.5, EXPERTS)
    ids, weights = dsv4.route_topk(logits, bias, 3, 2.5)
    found = dsv4.placed_experts(x, logits, bias, None, None, case.packed, None, INNER, 3, 2.5, LIMIT, 0)
    assert found.dtype == torch.float32 and torch.equal(found, separate(case, x, ids, weights))
    assert found.abs().mean() > 0.01


@pytest.mark.parametrize("fp8", [False, True])
def test_hash_routing(fp8: bool) -> None:
    case = expert_case(EXPERTS, HIDDEN, INNER, fp8=fp8)
    x, logits = operands(4)
    table = torch.tensor([[0, 1], [4, 2], [3, 0]])
    tokens = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    ids, weights = dsv4.route_hash(logits, table, tokens, 1.5)
    found = dsv4.placed_experts(x, logits, None, table, tokens, case.packed, None, INNER, 2, 1.5, LIMIT, 0)
    assert torch.equal(found, separate(case, x, ids, weights))


def test_where_experts_are_computed_changes_nothing() -> None:
    case = expert_case(EXPERTS, HIDDEN, INNER)
    x, logits = operands(3)
    args = (x, logits, torch.zeros(EXPERTS), None, None)
    topology = torch.arange(20, dtype=torch.int32).view(2, 10)
    plain = dsv4.placed_experts(*args, case.packed, None, INNER, 2, 1.0, LIMIT, 0)
    assert torch.equal(plain, dsv4.placed_experts(*args, case.packed, topology, INNER, 2, 1.0, LIMIT, 4))


def test_records_may_lie_apart() -> None:
    """In an engine every expert begins on a page."""
    case = expert_case(EXPERTS, HIDDEN, INNER)
    x, logits = operands(2)
    record = case.packed.shape[1]
    wide = torch.full((EXPERTS, record + 4096), 0xFF, dtype=torch.uint8)
    wide[:, :record] = case.packed.view(torch.uint8)
    apart = wide.view(case.packed.dtype)[:, :record]
    args = (x, logits, torch.zeros(EXPERTS), None, None)
    found = [dsv4.placed_experts(*args, stack, None, INNER, 2, 1.0, LIMIT, 0) for stack in (case.packed, apart)]
    assert torch.equal(*found)
