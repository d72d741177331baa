"""`dsv4::sample`: the ids are exactly those of the reference, over seeds, settings and masks."""

import pytest
import torch
from torch import Tensor

from dsv4c.graph.sampling import uniform
from tests.runtime.kernel_runner import reference, run_kernel

VOCAB = 101
TOKENS = 7


def settings(rows: int, temperature: float, top_k: int, top_p: float, first_seed: int) -> tuple[Tensor, ...]:
    seeds = torch.arange(rows, dtype=torch.int64) * 0x1234567890ABCDE + first_seed
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        seeds,
    )


def step_of(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the step and positions of all its rows."""
    positions = torch.tensor([0, 1, 5, 1_000_000, 77, 3, 2**31 - 1], dtype=torch.int32)
    return torch.arange(rows, dtype=torch.int32) % TOKENS, positions


def random_mask(rows: int, vocab: int, share: float) -> Tensor:
    """Bits behind the vocabulary are set: nothing may read them."""
    words = -(-vocab // 32)
    bits = torch.rand(rows, words * 32, generator=torch.Generator().manual_seed(4)) < share
    bits[:, vocab:] = True
    packed = (bits.view(rows, words, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def check_sample(*args: Tensor | None) -> Tensor:
    (expected,) = reference("sample", *args)
    for threads in (1, 2, 3):
        (actual,) = run_kernel("sample", *args, threads=threads)
        assert torch.equal(actual, expected)
    return expected


@pytest.mark.parametrize("temperature", (0.0, 0.3, 1.0, 2.5))
@pytest.mark.parametrize("top_k", (0, 1, 5, 100_000))
@pytest.mark.parametrize("top_p", (1.0, 0.9, 0.3, 0.0))
def test_sample(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    masks = (None, random_mask(60, VOCAB, 0.3), random_mask(60, VOCAB, 0.01))
    for first_seed, mask in enumerate(masks):
        check_sample(logits, *step_of(60), *settings(60, temperature, top_k, top_p, first_seed - 1), mask)


def test_a_row_alone_draws_the_same() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(2))
    rows, positions = step_of(20)
    options = settings(20, 1.0, 0, 1.0, 5)
    ids = check_sample(logits, rows, positions, *options, None)
    assert len(set(ids.tolist())) > 5
    for row in range(20):
        one = slice(row, row + 1)
        alone = run_kernel("sample", logits[one], rows[one], positions, *(option[one] for option in options), None)
        assert alone[0].tolist() == [int(ids[row])]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_ties_and_missing_candidates(temperature: float) -> None:
    logits = torch.full((4, 40), -torch.inf)
    logits[0, 3:30] = 2.0
    logits[1] = 0.0
    logits[2, 7] = -50.0
    options = settings(4, temperature, 3, 0.5, 0)
    ids = check_sample(logits, *step_of(4), *options, None)
    assert ids[2:].tolist() == [7, -1]
    if temperature == 0:
        assert ids[:2].tolist() == [3, 0]
    nothing = torch.zeros(4, 2, dtype=torch.int32)
    assert check_sample(logits, *step_of(4), *options, nothing).tolist() == [-1] * 4


def test_top_p_that_a_prefix_reaches_exactly() -> None:
    """Four equal logits: half of the probability is two candidates, not three."""
    ids = check_sample(torch.zeros(60, 4), *step_of(60), *settings(60, 1.0, 0, 0.5, 0), None)
    assert set(ids.tolist()) == {0, 1}


def test_draw_on_the_border_of_two_candidates_takes_the_second() -> None:
    rows, positions = step_of(1)
    draws = ((seed, uniform(seed, 0) * 1024) for seed in range(100_000))
    seed, border = next((seed, draw) for seed, draw in draws if draw >= 1 and draw == int(draw))
    options = settings(1, 1.0, 0, 1.0, seed)
    assert check_sample(torch.zeros(1, 1024), rows, positions, *options, None).tolist() == [int(border)]


def test_nan_and_infinity_do_not_crash() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    logits[0, 5], logits[1, 9], logits[2] = torch.nan, torch.inf, torch.nan
    logits[3, 7:9] = torch.inf
    for temperature in (0.0, 1.0):
        check_sample(logits, *step_of(6), *settings(6, temperature, 0, 0.9, 0), None)


def test_no_rows() -> None:
    args = (torch.zeros(0, 40), *step_of(0), *settings(0, 1.0, 0, 1.0, 0), None)
    assert run_kernel("sample", *args)[0].shape == (0,)
