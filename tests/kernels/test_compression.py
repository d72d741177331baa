"""Compression and selection kernels against their reference bodies, over groups that close in many ways."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.graph.state_ops import Rounding, _key_rows, unpack_kv_rows
from tests.kernels.comparison import assert_same_bits
from tests.kernels.runner import Runner, run_operator
from tests.kernels.state_cases import Run, draw, entries_plane, interleaved, plane, shuffled_table
from tests.kernels.step_memory import bits

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """A compressor. `spare`: rows of the open groups beside those that a group can need."""

    ratio: int
    overlap: bool
    width: int = 40
    rotary: int = 8
    per_block: int = 3
    spare: int = 3
    rounding: Rounding = Rounding.NONE
    form: str = "f32"  # of the entries

    @property
    def projected(self) -> int:
        return self.width * (2 if self.overlap else 1)

    @property
    def span(self) -> int:
        return self.ratio * (2 if self.overlap else 1)

    def arguments(self, runs: Sequence[Run], slots: int = 3) -> tuple[Any, ...]:
        slot_of, positions = interleaved(runs)
        projected = draw(len(slot_of), 2 * self.projected + 8, seed=3)  # columns of a merged projection
        entries_of = max(first + count for _, first, count in runs) // self.ratio
        table = shuffled_table(slots, entries_of // self.per_block + 1)
        open_groups = torch.full((slots, self.span + self.spare, 2, self.projected), torch.nan)
        for slot, first, _ in runs:
            for position in range(max(0, first - self.span), first):
                open_groups[slot, position % open_groups.shape[1]] = draw(2, self.projected, seed=position)
        before = [(slot, first, 0) for slot, first, _ in runs]
        entries = entries_plane(table, self.per_block, self.width, self.ratio, before, self.form, self.rotary)
        return (
            projected[:, 4 : 4 + self.projected],
            projected[:, -self.projected :],
            draw(self.ratio, self.projected, seed=4),
            (draw(self.width, seed=5).abs() + 0.5).to(F32 if self.form == "f32" else BF16),
            100.0 ** -(torch.arange(0, self.rotary, 2) / self.rotary),
            slot_of,
            positions,
            table,
            open_groups,
            *entries,
            self.ratio,
            self.overlap,
            EPS,
            int(self.rounding),
            F32 if self.form == "f32" else BF16,
        )


LAYERS = {
    "ratio 4": Layer(4, True),
    "ratio 4, one half": Layer(4, False),
    "ratio 3": Layer(3, True, per_block=5),
    "ratio 17": Layer(17, False),
    "ratio 4, packed": Layer(4, True, width=200, rotary=64, rounding=Rounding.FP8, form="kv"),
    "ratio 4, bf16": Layer(4, True, width=72, rotary=16, rounding=Rounding.FP8, form="bf16"),
    "tiny-v4, ratio 4": Layer(4, True, 128, 64, 64, 16, Rounding.FP8, "kv"),
    "tiny-v4, ratio 128": Layer(128, False, 128, 64, 2, 16, Rounding.FP8, "kv"),
    "tiny-v4, index": Layer(4, True, 128, 64, 64, 16, Rounding.HADAMARD_FP4, "e2m1"),
    "index in e4m3": Layer(4, True, 16, 8, 64, 16, Rounding.HADAMARD_FP4, "e4m3"),
}
RUNS = {
    "rows that close and rows that do not": [(0, 11, 1), (2, 12, 1), (1, 127, 1)],
    "the first tokens": [(1, 0, 9)],
    "longer than the open groups": [(0, 5, 40), (2, 30, 23)],
    "a large group": [(0, 100, 30), (1, 250, 8)],
}


def decoded(entries: Tensor, scales: Tensor | None, layer: Layer) -> Tensor:
    """Float32 [rows, width]."""
    if layer.form == "kv":
        assert scales is not None
        return unpack_kv_rows(entries.flatten(0, 1), scales.flatten(0, 1), layer.width, layer.rotary)
    return _key_rows(entries.flatten(0, 1), None if scales is None else scales.flatten(0, 1))


def check_entries(found: Sequence[Tensor], expected: Sequence[Tensor], before: Tensor, layer: Layer) -> None:
    """Float32 entries differ by the order of sums. A bf16 value at a rounding border may come out one unit away, and
    from there on fall into another code: a few do."""
    closed = (bits(expected[0]) != bits(before)).any(2).flatten()
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(bits(actual).flatten(0, 1)[~closed], bits(wanted).flatten(0, 1)[~closed])
    actual, wanted = (
        decoded(planes[0], planes[1] if len(planes) > 1 else None, layer)[closed] for planes in (found, expected)
    )
    assert not actual.isnan().any()
    if layer.form == "f32":
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
        return
    if not wanted.numel():
        return
    step = 0.5 if layer.rounding is Rounding.HADAMARD_FP4 else 2.0**-3
    torch.testing.assert_close(actual, wanted, rtol=step, atol=0.02 * float(wanted.abs().max()))
    assert float((actual != wanted).float().mean()) < 0.03


def check_compress(layer: Layer, args: tuple[Any, ...], on: Runner, capacity: int | None = None) -> None:
    state, entries, scales = args[8:11]
    before = entries.clone() if entries.element_size() > 1 else bits(entries).clone().view(entries.dtype)
    found = run_operator("compress", *args, on=on, capacity=capacity)
    torch.ops.dsv4.compress(*args)
    assert_same_bits(found[0], state)
    check_entries(found[1:], (entries,) if scales is None else (entries, scales), before, layer)


@pytest.mark.parametrize("runs", list(RUNS))
@pytest.mark.parametrize("layer", list(LAYERS))
def test_compress(runner: Runner, layer: str, runs: str) -> None:
    check_compress(LAYERS[layer], LAYERS[layer].arguments(RUNS[runs]), runner)


@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("first", [63, 64, 67])
def test_one_call_where_a_step_is_short(runner: Runner, first: int, rows: int) -> None:
    """Up to 17 rows nobody takes the place of a token that another row pools."""
    layer = LAYERS["tiny-v4, ratio 4"]
    check_compress(layer, layer.arguments([(1, first, rows)]), runner, capacity=17)


# Selection


@dataclass(frozen=True)
class Indexer:
    """The indexer of a layer: its heads, the format of its keys."""

    heads: int
    width: int
    topk: int
    form: str
    ratio: int = 4
    per_block: int = 64
    numerics: torch.dtype = BF16

    def arguments(self, runs: Sequence[Run], slots: int = 3, exact: bool = False) -> tuple[Any, ...]:
        """With `exact` all numbers are small integers: scores are exact, and many of them equal."""
        slot_of, positions = interleaved(runs)
        rows = len(slot_of)
        entries_of = max(first + count for _, first, count in runs) // self.ratio
        table = shuffled_table(slots, entries_of // self.per_block + 1)
        q, weights = draw(rows, self.heads, self.width, seed=1), draw(rows, self.heads, seed=4)
        keys = entries_plane(table, self.per_block, self.width, self.ratio, runs, self.form)
        if exact:
            q, weights = q.round(), weights.sign()
            written = ~bits(keys[0]).eq(-1 if keys[0].element_size() > 1 else 255).all(2)
            whole = draw(*written.shape, self.width, seed=3).round().clamp(-2, 2)
            keys = plane(whole, written, self.form)
        # About heads * width to the power of -1/2, but so that products are exact; a constant of the kernels.
        scale = 1.25 * 2.0 ** -round(math.log2(self.heads * self.width) / 2)
        return (
            q.to(self.numerics),
            weights.to(self.numerics),
            *keys,
            slot_of,
            positions,
            table,
            self.topk,
            self.ratio,
            scale,
        )


INDEXERS = {
    "tiny-v4": Indexer(8, 128, 16, "e2m1"),
    "e4m3 keys": Indexer(3, 64, 7, "e4m3", per_block=5),
    "bf16 keys": Indexer(18, 32, 16, "bf16"),
    "narrow e2m1 keys": Indexer(33, 64, 20, "e2m1", ratio=3),
    "more heads than registers": Indexer(70, 32, 16, "e2m1"),
    "odd widths": Indexer(5, 40, 9, "e2m1", per_block=3),
    "exact": Indexer(8, 24, 16, "f32", numerics=F32),
}
SELECTIONS = {
    "fewer than wanted": [(0, 0, 2), (1, 30, 1)],
    "around the number wanted": [(0, 60, 8)],
    "interleaved": [(0, 600, 3), (2, 411, 5), (1, 127, 1)],
}


def check_selection(actual: Tensor, args: tuple[Any, ...], exact: bool) -> None:
    """Scores that a sum in another order brings closer than it errs may change places."""
    expected = torch.ops.dsv4.select_entries(*args)
    if exact or torch.equal(actual, expected):
        assert torch.equal(actual, expected)
        return
    q, weights, keys, key_scales, slots, positions, table, topk, ratio, scale = args
    for row in (actual != expected).any(1).nonzero().flatten().tolist():
        chosen = actual[row].long()
        visible = (int(positions[row]) + 1) // ratio
        entry = torch.arange(visible)
        at = table[slots[row]].long()[entry // keys.shape[1]], entry % keys.shape[1]
        stored = bits(keys)[at].view(keys.dtype)
        rows = _key_rows(stored, None if key_scales is None else key_scales[at]).double()
        scores = (weights[row].double()[:, None] * scale * torch.relu(q[row].double() @ rows.T)).sum(0)
        assert chosen[0] >= 0 and chosen[-1] < visible and bool((chosen.diff() > 0).all())
        least = scores.topk(topk).values[-1]
        assert scores[chosen].min() >= least - 1e-5 * scores.abs().max()


@pytest.mark.parametrize("exact", [False, True], ids=["real", "ties"])
@pytest.mark.parametrize("runs", list(SELECTIONS))
@pytest.mark.parametrize("indexer", list(INDEXERS))
def test_select_entries(runner: Runner, indexer: str, runs: str, exact: bool) -> None:
    args = INDEXERS[indexer].arguments(SELECTIONS[runs], exact=exact)
    (actual,) = run_operator("select_entries", *args, on=runner)
    check_selection(actual, args, exact)


@pytest.mark.parametrize("exact", [False, True], ids=["real", "ties"])
@pytest.mark.parametrize("sm_count", [1, 3, 132])
@pytest.mark.parametrize("indexer", ["narrow e2m1 keys", "exact"])
def test_more_entries_than_a_block_holds(runner: Runner, indexer: str, sm_count: int, exact: bool) -> None:
    """In one block, in a few splits that choose anew, in splits that each have less than they could hold."""
    args = INDEXERS[indexer].arguments([(1, 21_000, 1)], slots=2, exact=exact)
    (actual,) = run_operator("select_entries", *args, on=runner, sm_count=sm_count, capacity=1)
    check_selection(actual, args, exact)


@pytest.mark.parametrize("score", [0.0, -1.0])
def test_all_scores_equal(runner: Runner, score: float) -> None:
    args = list(INDEXERS["tiny-v4"].arguments([(0, 8191, 1)], slots=1, exact=True))
    args[0] = torch.zeros_like(args[0])
    args[1] = torch.full_like(args[1], score)
    (actual,) = run_operator("select_entries", *args, on=runner)
    assert actual[0].tolist() == list(range(16))


def test_queries_in_wider_rows(runner: Runner) -> None:
    args = list(INDEXERS["tiny-v4"].arguments(SELECTIONS["interleaved"]))
    wide = torch.full((*args[0].shape[:-1], 134), torch.nan, dtype=BF16)
    wide[..., 3:-3] = args[0]
    args[0] = wide[..., 3:-3]
    (actual,) = run_operator("select_entries", *args, on=runner)
    check_selection(actual, tuple(args), exact=False)


# At V4-Flash widths, on a GPU

FLASH_LAYERS = {
    "ratio 4": Layer(4, True, 512, 64, 64, 16, Rounding.FP8, "kv"),
    "ratio 128": Layer(128, False, 512, 64, 2, 16, Rounding.FP8, "kv"),
    "index": Layer(4, True, 128, 64, 64, 16, Rounding.HADAMARD_FP4, "e2m1"),
    "exact": Layer(4, True, 512, 64, 64, 16),
}
FLASH_RUNS = {
    "decode": [(0, 65_535, 1), (1, 4095, 1), (2, 126, 1)],
    "a chunk": [(0, 1000, 300), (1, 0, 131)],
}


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("runs", list(FLASH_RUNS))
@pytest.mark.parametrize("layer", list(FLASH_LAYERS))
def test_flash_compressors(on_device: Runner, layer: str, runs: str) -> None:
    check_compress(FLASH_LAYERS[layer], FLASH_LAYERS[layer].arguments(FLASH_RUNS[runs]), on_device)


FLASH_INDEXERS = {
    "e2m1": Indexer(64, 128, 512, "e2m1"),
    "e4m3": Indexer(64, 128, 512, "e4m3"),
    "exact": Indexer(64, 128, 512, "f32", numerics=F32),
    "pro": Indexer(64, 128, 1024, "e2m1"),
}


@pytest.mark.gpu
@pytest.mark.sm90a
@pytest.mark.parametrize("exact", [False, True], ids=["real", "ties"])
@pytest.mark.parametrize("capacity", [1, 256])
@pytest.mark.parametrize("indexer", list(FLASH_INDEXERS))
def test_flash_indexers(on_device: Runner, indexer: str, capacity: int, exact: bool) -> None:
    runs = [(0, 65_535, 1)] if capacity == 1 else [(0, 65_500, 12), (1, 2040, 20)]
    args = FLASH_INDEXERS[indexer].arguments(runs, slots=2, exact=exact)
    (actual,) = run_operator("select_entries", *args, on=on_device, capacity=capacity)
    check_selection(actual, args, exact)


@pytest.mark.gpu
@pytest.mark.sm90a
def test_a_million_positions(on_device: Runner) -> None:
    """More candidates of the splits than a merge holds."""
    args = FLASH_INDEXERS["e2m1"].arguments([(0, (1 << 20) - 1, 1)], slots=1)
    (actual,) = run_operator("select_entries", *args, on=on_device, capacity=1)
    check_selection(actual, args, exact=False)
