"""`dsv4::sample`: the ids of the reference, but where a draw falls on the border of two candidates."""

import pytest
import torch
from torch import Tensor

from dsv4c.graph.sampling import allowed, uniform
from tests.kernels.runner import Runner, run_operator

TOKENS = 7


def settings(rows: int, temperature: float, top_k: int, top_p: float, first_seed: int = 0) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.arange(rows, dtype=torch.int64) * 0x1234567890ABCDE + first_seed,
    )


def step_of(rows: int) -> tuple[Tensor, Tensor]:
    """Rows of the step and positions of all its rows."""
    positions = torch.tensor([0, 1, 5, 1_000_000, 77, 3, 2**31 - 1], dtype=torch.int32)
    return torch.arange(rows, dtype=torch.int32) * 3 % TOKENS, positions


def normal(rows: int, vocab: int, spread: float = 3.0, seed: int = 1) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def random_mask(rows: int, vocab: int, share: float) -> Tensor:
    """Bits behind the vocabulary are set: nothing may read them."""
    words = -(-vocab // 32)
    bits = torch.rand(rows, words * 32, generator=torch.Generator().manual_seed(4)) < share
    bits[:, vocab:] = True
    packed = (bits.view(rows, words, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def check(runner: Runner, logits: Tensor, options: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
    """The ids; those that differ from the reference's must be where the draw or a cut is on the border."""
    args = (logits, *step_of(logits.shape[0]), *options, mask)
    expected = torch.ops.dsv4.sample(*args)
    (found,) = run_operator("sample", *args, on=runner)
    for row in (found != expected).nonzero().flatten().tolist():
        assert on_border(args, row, int(found[row])), (row, int(found[row]), int(expected[row]))
    return found


def on_border(args: tuple[Tensor | None, ...], row: int, found: int) -> bool:
    """Whether `found` and the reference's choice are neighbours with the draw within 1e-6 of what parts them."""
    logits, rows, positions, temperature, top_k, top_p, seed, mask = args
    values = logits[row].double()
    if mask is not None:
        values = values.masked_fill(~allowed(mask[row], logits.shape[1]), -torch.inf)
    ordered, ids = values.sort(descending=True, stable=True)
    if top_k[row] > 0:
        ordered = ordered[: int(top_k[row])]
    running = torch.exp((ordered - ordered[0]) / float(temperature[row])).cumsum(0)
    cuts = running / running[-1] - float(top_p[row])
    if top_p[row] < 1 and float(cuts.abs().min()) < 1e-6:
        return True
    kept = min(int((cuts < 0).sum()) + 1, len(running))
    draws = running / running[kept - 1] - uniform(int(seed[row]), int(positions[int(rows[row])]))
    place = int((ids == found).nonzero())
    borders = draws[max(place - 1, 0) : place + 1].abs()
    return place < kept and float(borders.min()) < 1e-6


@pytest.mark.parametrize("temperature", (0.0, 0.3, 1.0, 2.5))
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (5, 1.0), (1, 0.3), (100_000, 0.0), (20, 0.5)])
def test_settings(runner: Runner, temperature: float, top_k: int, top_p: float) -> None:
    options = settings(12, temperature, top_k, top_p)
    check(runner, normal(12, 101), options)
    for share in (0.3, 0.01):
        check(runner, normal(12, 101), options, random_mask(12, 101, share))


@pytest.mark.parametrize("vocab", [129280, 5003])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "spread"),
    [(0.0, 0, 1.0, 3.0), (1.0, 0, 1.0, 2.0), (0.7, 50, 0.95, 3.0), (1.0, 3000, 0.9, 0.01), (50.0, 0, 0.5, 3.0)],
)
def test_a_whole_vocabulary(
    runner: Runner, vocab: int, temperature: float, top_k: int, top_p: float, spread: float
) -> None:
    logits = normal(3, vocab, spread)
    check(runner, logits, settings(3, temperature, top_k, top_p, 7))
    check(runner, logits, settings(3, temperature, top_k, top_p, 8), random_mask(3, vocab, 0.5))


@pytest.mark.parametrize("levels", [1, 3, 400])
def test_many_ties(runner: Runner, levels: int) -> None:
    """More equal logits than the list of a search holds: the lower ids come first."""
    logits = (normal(4, 12000, 1.0) * levels).round() / levels * 0.01 if levels > 1 else torch.zeros(4, 12000)
    for top_k, top_p in ((0, 1.0), (7001, 1.0), (0, 0.37), (5000, 0.5)):
        check(runner, logits, settings(4, 1.0, top_k, top_p, top_k))


def test_an_outlier_far_above(runner: Runner) -> None:
    """All but a few candidates are in one bin of the first level."""
    logits = normal(3, 20000, 0.001)
    logits[:, 77] = 9.0
    logits[1, 78] = -1e30
    for temperature in (1.0, 3.0):
        check(runner, logits, settings(3, temperature, 0, 1.0, 3))
        check(runner, logits, settings(3, temperature, 9000, 0.8, 4))


def test_ties_and_missing_candidates(runner: Runner) -> None:
    logits = torch.full((4, 40), -torch.inf)
    logits[0, 3:30] = 2.0
    logits[1] = 0.0
    logits[2, 7] = -50.0
    greedy = check(runner, logits, settings(4, 0.0, 3, 0.5))
    assert greedy.tolist() == [3, 0, 7, -1]
    assert check(runner, logits, settings(4, 1.0, 3, 0.5))[2:].tolist() == [7, -1]
    nothing = torch.zeros(4, 2, dtype=torch.int32)
    assert check(runner, logits, settings(4, 1.0, 3, 0.5), nothing).tolist() == [-1] * 4


def test_zeros_of_both_signs_are_equal(runner: Runner) -> None:
    logits = torch.full((2, 9), -1.0)
    logits[0, 4], logits[0, 6] = -0.0, 0.0
    logits[1, 4], logits[1, 6] = 0.0, -0.0
    assert check(runner, logits, settings(2, 0.0, 0, 1.0)).tolist() == [4, 4]
    assert check(runner, logits, settings(2, 0.1, 1, 1.0)).tolist() == [4, 4]


def test_top_p_that_a_prefix_reaches_exactly(runner: Runner) -> None:
    """Four equal logits: half of the probability is two candidates, not three."""
    ids = check(runner, torch.zeros(40, 4), settings(40, 1.0, 0, 0.5))
    assert set(ids.tolist()) == {0, 1}


def test_draw_on_the_border_of_two_candidates_takes_the_second(runner: Runner) -> None:
    draws = ((seed, uniform(seed, 0) * 1024) for seed in range(100_000))
    seed, border = next((seed, draw) for seed, draw in draws if draw >= 1 and draw == int(draw))
    assert check(runner, torch.zeros(1, 1024), settings(1, 1.0, 0, 1.0, seed)).tolist() == [int(border)]


def test_nan_and_infinity_do_not_crash(runner: Runner) -> None:
    logits = normal(6, 40)
    logits[0, 5], logits[1, 9], logits[2] = torch.nan, torch.inf, torch.nan
    logits[3, 7:9] = torch.inf
    for temperature in (0.0, 1.0):
        check(runner, logits, settings(6, temperature, 0, 0.9))


def test_extreme_temperatures(runner: Runner) -> None:
    logits = normal(3, 300)
    for temperature in (1e-38, 1e-6, 1e4, 3e38):
        check(runner, logits, settings(3, temperature, 0, 0.9, 5))


def test_a_step_that_does_not_use_its_mask(runner: Runner) -> None:
    """The pointer is there, and nothing behind it is read: the results are those without a mask."""
    logits, options = normal(3, 101), settings(3, 1.0, 0, 0.9)
    args = (logits, *step_of(3), *options)
    (plain,) = run_operator("sample", *args, None, on=runner)
    (masked,) = run_operator("sample", *args, torch.full((3, 4), -1, dtype=torch.int32), on=runner)
    assert torch.equal(plain, masked)
