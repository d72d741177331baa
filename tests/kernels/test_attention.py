"""Attention and commit kernels against their reference bodies: contexts around the window, runs longer than it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.comparison import assert_same_bits
from tests.kernels.runner import Runner, run_operator
from tests.kernels.state_cases import Run, draw, entries_plane, interleaved, ring_plane, shuffled_table

BF16, F32 = torch.bfloat16, torch.float32
FREE_ROWS = 4  # of the ring, beside the window


@dataclass(frozen=True)
class Case:
    """An attention layer and the runs of a step. `ratio` 0: window only; `selected` 0: every visible entry."""

    runs: Sequence[Run]
    heads: int = 3
    width: int = 40
    rotary: int = 8
    window: int = 12
    ratio: int = 0
    per_block: int = 4
    selected: int = 0
    slots: int = 3
    capacity: int | None = None
    sm_count: int = 132

    def arguments(self, numerics: str) -> tuple[Any, ...]:
        slots, positions = interleaved(self.runs)
        rows = len(slots)
        act, ring_form = (F32, "f32") if numerics == "f32" else (BF16, numerics)
        longest = max(first + count for _, first, count in self.runs)
        blocks = -(-longest // (max(self.ratio, 1) * self.per_block)) + 1 if self.ratio else 1
        table = shuffled_table(self.slots, blocks)
        ring = ring_plane(
            self.slots, self.window + FREE_ROWS, self.width, self.window, self.runs, ring_form, self.rotary
        )
        entries: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.ratio:
            entries = entries_plane(table, self.per_block, self.width, self.ratio, self.runs, ring_form, self.rotary)
        return (
            draw(rows, self.heads, self.width, seed=3, dtype=act),
            draw(rows, self.width, seed=4, dtype=act),
            *ring,
            *entries,
            self._selected(positions) if self.selected else None,
            draw(self.heads, seed=5),
            slots,
            positions,
            table,
            self.window,
            max(self.ratio, 1),
            self.rotary,
            self.width**-0.5,
        )

    def _selected(self, positions: Tensor) -> Tensor:
        """Ascending choices of each row's visible entries, then -1."""
        chosen = torch.full((len(positions), self.selected), -1, dtype=torch.int32)
        for row, position in enumerate(positions.tolist()):
            visible = (position + 1) // self.ratio
            order = torch.randperm(visible, generator=torch.Generator().manual_seed(row))
            some = order[: self.selected].sort().values.int()
            chosen[row, : len(some)] = some
        return chosen


CASES = {
    "the first token": Case([(1, 0, 1)]),
    "one before the window is full": Case([(0, 11, 1)]),
    "a full window": Case([(0, 12, 1), (2, 13, 1)]),
    "far on, the ring wrapped": Case([(2, 4095, 1), (0, 129, 2), (1, 128, 1)]),
    "a run longer than the ring": Case([(1, 5, 40)]),
    "three interleaved runs": Case([(0, 0, 7), (2, 30, 20), (1, 11, 3)], ratio=4, selected=5),
    "entries, none visible": Case([(0, 0, 2)], ratio=4, selected=6),
    "entries, all visible": Case([(0, 127, 1), (1, 128, 1), (2, 6, 2)], ratio=4, per_block=3),
    "many entries, several tiles": Case([(1, 700, 2)], ratio=4, per_block=16),
    "selection, several tiles": Case([(1, 700, 2), (0, 90, 1)], ratio=4, per_block=16, selected=150),
    "tiny-v4": Case([(0, 127, 2), (1, 70, 1)], 8, 128, 64, 64, 4, 64, 16),
    "tiny-v4, ratio 128": Case([(0, 4095, 1), (1, 129, 1)], 8, 128, 64, 64, 128, 2),
    "heads over two tiles": Case([(0, 127, 1)], 70, 64, 16, 100, 4, 8),
    "two tiles of heads, split": Case([(0, 400, 1)], 33, 72, 16, 30, 4, 16, 100, capacity=1),
    "more splits than tiles": Case([(0, 20, 1)], 20, 64, 16, 10, 4, 16, 200, capacity=1),
    "no split": Case([(0, 400, 1)], 17, 64, 16, 30, 4, 16, 100, capacity=64),
    "one head of odd groups": Case([(2, 33, 3)], 1, 200, 64, 8),
}
# In float32 there are no tiles.
OF_TILES = ("heads over two tiles", "two tiles of heads, split", "more splits than tiles", "no split")
# A kernel takes a second to compile; planes of bf16 differ from packed ones by how a row is read.
IN_BF16 = ("three interleaved runs", "many entries, several tiles", "tiny-v4", "one head of odd groups")


def reference(name: str, *args: Any) -> Any:
    return getattr(torch.ops.dsv4, name)(*args)


def check(actual: Tensor, expected: Tensor) -> None:
    """In bf16 the weights are rounded relative to another maximum than the reference's: 2^-9 of each, which averages
    out over the keys; then the result is rounded. In float32 the order of the sums differs."""
    assert actual.dtype == expected.dtype
    scale = float(expected.float().abs().max())
    relative, absolute = (2.0**-7, 2.0**-8) if actual.dtype is BF16 else (1e-5, 1e-5)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=absolute * scale)


@pytest.mark.parametrize(
    ("case", "numerics"),
    [(case, "kv") for case in CASES]
    + [(case, "f32") for case in CASES if case not in OF_TILES]
    + [(case, "bf16") for case in IN_BF16],
)
def test_attention(runner: Runner, case: str, numerics: str) -> None:
    what = CASES[case]
    args = what.arguments(numerics)
    (actual,) = run_operator("attention", *args, on=runner, capacity=what.capacity, sm_count=what.sm_count)
    check(actual, reference("attention", *args))


@pytest.mark.parametrize(
    ("case", "numerics"),
    [(case, "kv") for case in ("three interleaved runs", "tiny-v4", "two tiles of heads, split", "no split")]
    + [(case, "f32") for case in ("three interleaved runs", "tiny-v4")],
)
def test_attention_unrotated(runner: Runner, case: str, numerics: str) -> None:
    what = CASES[case]
    args = (*what.arguments(numerics), 10000.0 ** -(torch.arange(0, what.rotary, 2) / what.rotary))
    (actual,) = run_operator("attention_unrotated", *args, on=runner, capacity=what.capacity)
    check(actual, reference("attention_unrotated", *args))


def test_every_stored_value_comes_through(runner: Runner) -> None:
    """Equal weights of a key of zeros and one entry give half of the entry, exactly: all e4m3 codes but NaN, under
    scales small and large."""
    rows, width, rotary = 8, 128, 64
    rng = torch.Generator().manual_seed(8)
    entries = torch.full((1, rows, 192), 0xFF, dtype=torch.uint8)
    codes = torch.tensor([code for code in range(256) if code % 128 != 127])
    for row in range(rows):
        entries[0, row, :64] = codes[(torch.arange(64) + 64 * row) % len(codes)]
    entries[..., 64:] = draw(1, rows, rotary, seed=9, dtype=BF16).view(torch.uint8)
    exponents = torch.randint(40, 160, (1, rows, 8), generator=rng, dtype=torch.uint8)
    slots, positions = torch.zeros(1, dtype=torch.int32), torch.tensor([rows - 1], dtype=torch.int32)
    ring = torch.full((1, 5, 192), 0xFF, dtype=torch.uint8), torch.full((1, 5, 8), 0xFF, dtype=torch.uint8)
    for entry in range(rows):
        args = (
            *(torch.zeros(1, 2, width, dtype=BF16), torch.zeros(1, width, dtype=BF16), *ring, entries, exponents),
            *(torch.tensor([[entry]], dtype=torch.int32), torch.full((2,), -1e30), slots, positions),
            *(torch.zeros(1, 1, dtype=torch.int32), 1, 1, rotary, 1.0),
        )
        (actual,) = run_operator("attention", *args, on=runner)
        assert torch.equal(actual, reference("attention", *args))


@pytest.mark.parametrize("sm_count", [2, 5, 114])
def test_splits_differ_by_the_order_of_sums(runner: Runner, sm_count: int) -> None:
    args = CASES["selection, several tiles"].arguments("kv")
    (actual,) = run_operator("attention", *args, on=runner, sm_count=sm_count, capacity=4)
    check(actual, reference("attention", *args))


def test_queries_and_keys_in_wider_rows(runner: Runner) -> None:
    """Columns of merged projections, at addresses that no vector load can take."""
    args = list(CASES["tiny-v4"].arguments("kv"))
    for index in (0, 1):
        value = args[index]
        wide = torch.full((*value.shape[:-1], value.shape[-1] + 6), torch.nan, dtype=value.dtype)
        wide[..., 3:-3] = value
        args[index] = wide[..., 3:-3]
    (actual,) = run_operator("attention", *args, on=runner)
    check(actual, reference("attention", *args))


def test_a_sink_above_all_scores(runner: Runner) -> None:
    args = list(CASES["three interleaved runs"].arguments("kv"))
    args[7] = torch.tensor([50.0, -1e30, 0.0])
    (actual,) = run_operator("attention", *args, on=runner)
    check(actual, reference("attention", *args))


RING_RUNS = {
    "a row each": [(0, 127, 1), (2, 0, 1), (1, 4095, 1)],
    "wraps": [(0, 10, 9), (2, 30, 3)],
    "longer than the ring": [(1, 5, 40), (0, 3, 20)],
}


@pytest.mark.parametrize("form", ["kv", "bf16", "f32"])
@pytest.mark.parametrize(("width", "rotary"), [(40, 8), (128, 64), (200, 64), (12, 4), (512, 64)])
@pytest.mark.parametrize("runs", list(RING_RUNS))
def test_commit_ring(runner: Runner, runs: str, width: int, rotary: int, form: str) -> None:
    slots, positions = interleaved(RING_RUNS[runs])
    ring, scales = ring_plane(3, 16, width, 12, RING_RUNS[runs], form, rotary)
    # Magnitudes from below the smallest scale's to large ones, and zero.
    sizes = torch.tensor([1.0, 1e-7, 300.0, 0.0, 1e-3])[torch.arange(len(slots)) % 5, None]
    kv = (draw(len(slots), width, seed=6) * sizes).to(F32 if form == "f32" else BF16)
    found = run_operator("commit_ring", kv, ring, scales, slots, positions, rotary, on=runner)
    reference("commit_ring", kv, ring, scales, slots, positions, rotary)
    for actual, expected in zip(found, (ring, scales) if scales is not None else (ring,), strict=True):
        assert_same_bits(actual, expected)


FLASH = {"heads": 64, "width": 512, "rotary": 64, "window": 128}
DEVICE_CASES = {
    "window": Case([(0, 65536, 1), (1, 127, 1), (2, 0, 1)], **FLASH),
    "ratio 4": Case([(0, 65535, 1), (1, 4095, 1)], **FLASH, ratio=4, per_block=64, selected=512),
    "ratio 4, one row": Case([(0, 65535, 1)], **FLASH, ratio=4, per_block=64, selected=512, capacity=1),
    "ratio 4, a chunk": Case([(0, 2000, 90), (1, 0, 150)], **FLASH, ratio=4, per_block=64, selected=512, slots=2),
    "ratio 128": Case([(0, 65535, 1), (1, 129, 3)], **FLASH, ratio=128, per_block=2),
    "ratio 128, one row": Case([(0, 65535, 1)], **FLASH, ratio=128, per_block=2, capacity=1),
}


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("numerics", ["kv", "f32"])
@pytest.mark.parametrize("case", list(DEVICE_CASES))
def test_flash_widths(on_device: Runner, case: str, numerics: str) -> None:
    what = DEVICE_CASES[case]
    args = (*what.arguments(numerics), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    (actual,) = run_operator("attention_unrotated", *args, on=on_device, capacity=what.capacity)
    check(actual, reference("attention_unrotated", *args))
