"""`dsv4::route_topk` and `route_hash`: ids exactly, weights to the rounding of a float32 logarithm; `count_routing`."""

import pytest
import torch
from torch import Tensor

from tests.kernels.runner import Runner, run_operator

dsv4 = torch.ops.dsv4


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def check(runner: Runner, name: str, *args: object) -> Tensor:
    """The ids."""
    expected = getattr(dsv4, name)(*args)
    found = run_operator(name, *args, on=runner)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-9)
    return found[0]


@pytest.mark.parametrize(("experts", "k"), [(256, 6), (384, 8), (16, 4), (5, 5), (33, 1), (300, 40)])
@pytest.mark.parametrize("rows", [1, 9, 300])
def test_topk(runner: Runner, experts: int, k: int, rows: int) -> None:
    check(runner, "route_topk", normal(rows, experts, spread=2.0), normal(experts, seed=1) * 0.1, k, 1.5)


def test_topk_of_columns_of_a_wider_matrix(runner: Runner) -> None:
    logits = normal(5, 40)[:, 8:24]
    check(runner, "route_topk", logits, normal(16, seed=1).bfloat16(), 3, 2.5)


def test_ties_go_to_the_lower_id(runner: Runner) -> None:
    logits = torch.zeros(3, 70)
    logits[1, 40:] = 1.0
    logits[2, ::3] = 2.0
    ids = check(runner, "route_topk", logits, torch.zeros(70), 5, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44], [0, 3, 6, 9, 12]]


def test_the_bias_decides_the_choice_and_not_the_weight(runner: Runner) -> None:
    bias = torch.full((64,), -100.0)
    bias[[7, 50]] = 100.0
    bias[7] = 101.0
    logits = normal(4, 64)
    ids = check(runner, "route_topk", logits, bias, 2, 1.0)
    assert ids.tolist() == [[7, 50]] * 4


def test_scores_from_nothing_to_the_linear_part(runner: Runner) -> None:
    """softplus is exp(x) far below zero and x above 20; the smallest scores are zero, and so is their sum."""
    logits = torch.tensor([[-200.0, -90.0, -50.0, -10.0, 0.0, 19.9, 20.1, 90.0], [-200.0] * 8])
    logits = torch.cat([logits, -logits])
    for k in (8, 3):
        check(runner, "route_topk", logits, torch.zeros(8), k, 1.5)


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize(("experts", "k"), [(256, 6), (16, 4), (64, 40)])
def test_hash(runner: Runner, experts: int, k: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(50)])
    tokens = torch.randint(50, (rows,), generator=generator, dtype=torch.int32)
    check(runner, "route_hash", normal(rows, experts + 3)[:, 3:], table, tokens, 1.5)


def choices(rows: int, experts: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(experts, (rows, k), generator=generator, dtype=torch.int32)


def check_counts(runner: Runner, ids: Tensor, experts: int, tokens: int | None = None) -> None:
    """Counts that are there are added to; they take more than 32 bits."""
    counts = torch.arange(experts).unsqueeze(0) << 31
    expected = counts.clone()
    dsv4.count_routing(ids[:tokens], expected)
    (found,) = run_operator("count_routing", ids, counts, tokens=tokens, capacity=1024, on=runner)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize(("experts", "k"), [(256, 6), (16, 4), (300, 40), (5, 1)])
def test_counts(runner: Runner, experts: int, k: int, rows: int) -> None:
    check_counts(runner, choices(rows, experts, k), experts)


@pytest.mark.parametrize("tokens", [1, 40, 171, 299])
def test_rows_behind_the_step_are_not_counted(runner: Runner, tokens: int) -> None:
    """They hold what an earlier step chose: experts that there are."""
    check_counts(runner, choices(300, 16, 6), 16, tokens)


def test_all_rows_choose_the_same_expert(runner: Runner) -> None:
    check_counts(runner, torch.full((300, 6), 2, dtype=torch.int32), 16)


def test_choices_that_are_no_expert_are_left_out(runner: Runner) -> None:
    """As a damaged hash table may give them: nothing beside the counts is written."""
    ids = torch.tensor([[0, -1], [16, 15], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    (found,) = run_operator("count_routing", ids, torch.zeros(1, 16, dtype=torch.int64), on=runner)
    assert found.nonzero().tolist() == [[0, 0], [0, 15]] and int(found.sum()) == 2
