"""The CPU kernels with state against their reference bodies: interleaved slots, chunks, every storage format."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4c.graph.ops import fp8_rounded
from dsv4c.graph.state_ops import Rounding
from tests.runtime.kernel_runner import assert_close, reference, run_kernel, same_bits
from tests.runtime.state_planes import Plane, Positions, block_table, key_plane, kv_plane, poisoned
from tests.runtime.test_kernels import column_slice, normal

SLOTS = 3
# Rows of each slot in a step: below the window, one row each, above it, longer than the ring.
STEPS = ((5, 1, 0), (1, 1, 1), (0, 40, 2), (3, 0, 1), (29, 7, 30), (1, 1, 1), (1, 1, 0))
WINDOW, DEPTH = 8, 11
HEAD_DIM, ROTARY = 86, 6  # 80 plain channels: one whole group and a part
KV_STORAGES = (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("packed", torch.bfloat16))


def kv_rows(count: int, dtype: torch.dtype, seed: int, storage: str) -> Tensor:
    """Keys of a step; before packed storage they are rounded, as in the graph."""
    x = normal(count, HEAD_DIM, dtype=dtype, seed=seed)
    return fp8_rounded(x, 64, HEAD_DIM - ROTARY).to(dtype) if storage == "packed" else x


@pytest.mark.parametrize(
    ("storage", "dtype"),
    (*KV_STORAGES, ("float32", torch.bfloat16), ("bfloat16", torch.float32), ("packed", torch.float32)),
)
def test_commit_ring_gives_the_same_bytes(storage: str, dtype: torch.dtype) -> None:
    positions = Positions(SLOTS)
    ring = kv_plane(SLOTS, DEPTH, HEAD_DIM, ROTARY, storage)
    for number, counts in enumerate(STEPS):
        slots, at = positions.step(counts)
        # Not rounded before: packing must round as the reference does.
        kv = column_slice(normal(sum(counts), HEAD_DIM, dtype=dtype, seed=number) * 10.0 ** (number - 3))
        for threads in (1, 2, 3):
            actual, expected = ring.clone(), ring.clone()
            run_kernel("commit_ring", kv, actual.data, actual.scales, slots, at, ROTARY, threads=threads)
            reference("commit_ring", kv, expected.data, expected.scales, slots, at, ROTARY)
            for ours, theirs in zip(actual.tensors(), expected.tensors(), strict=True):
                assert same_bits(ours, theirs)
        ring = expected


class AttentionState:
    """Ring and entries of a layer; entries are written before they become visible, the rest stays poisoned."""

    RATIO = 4

    def __init__(self, storage: str, dtype: torch.dtype, *, with_entries: bool) -> None:
        self.storage, self.dtype = storage, dtype
        self.ring = kv_plane(SLOTS, DEPTH, HEAD_DIM, ROTARY, storage)
        self.table = block_table(SLOTS, 8)
        self.entries = kv_plane(SLOTS * 8, 3, HEAD_DIM, ROTARY, storage) if with_entries else None
        self.positions = Positions(SLOTS)

    def step(self, counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, positions and keys of the next step; writes the entries that it may see."""
        slots, at = self.positions.step(counts)
        if self.entries is not None:
            for slot, length in enumerate(self.positions.lengths):
                for entry in range(length // self.RATIO):
                    row = kv_rows(1, self.dtype, 100 * slot + entry, self.storage)
                    block, offset = int(self.table[slot, entry // 3]), entry % 3
                    # One entry is a ring of one row.
                    plane = Plane(
                        self.entries.data[block : block + 1, offset : offset + 1],
                        None
                        if self.entries.scales is None
                        else self.entries.scales[block : block + 1, offset : offset + 1],
                    )
                    zero = torch.zeros(1, dtype=torch.int32)
                    reference("commit_ring", row, plane.data, plane.scales, zero, zero, ROTARY)
        return slots, at, kv_rows(len(slots), self.dtype, seed, self.storage)

    def commit(self, kv: Tensor, slots: Tensor, at: Tensor) -> None:
        reference("commit_ring", kv, self.ring.data, self.ring.scales, slots, at, ROTARY)

    def args(
        self, q: Tensor, kv: Tensor, selected: Tensor | None, sink: Tensor, slots: Tensor, at: Tensor
    ) -> list[Any]:
        entries, scales = (None, None) if self.entries is None else (self.entries.data, self.entries.scales)
        planes = [self.ring.data, self.ring.scales, entries, scales, selected, sink]
        return [q, kv, *planes, slots, at, self.table, WINDOW, self.RATIO, ROTARY, HEAD_DIM**-0.5]


def selection(at: Tensor, seed: int) -> Tensor:
    """Some visible entries of each row, int32 [T, 6]; sometimes none."""
    chosen = torch.full((len(at), 6), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    for row, position in enumerate(at.tolist()):
        visible = (position + 1) // AttentionState.RATIO
        some = torch.randperm(visible, generator=generator)[: (row * 5) % 7].sort().values
        chosen[row, : len(some)] = some.to(torch.int32)
    return chosen


@pytest.mark.parametrize("mode", ("window", "all entries", "selected entries"))
@pytest.mark.parametrize("heads", (1, 5, 19))
@pytest.mark.parametrize(("storage", "dtype"), (*KV_STORAGES, ("packed", torch.float32)))
def test_attention(storage: str, dtype: torch.dtype, heads: int, mode: str) -> None:
    state = AttentionState(storage, dtype, with_entries=mode != "window")
    sink = normal(heads, seed=77)
    sink[0] = 40.0  # above every score
    for number, counts in enumerate(STEPS):
        slots, at, kv = state.step(counts, number)
        q = column_slice(normal(len(slots), heads, HEAD_DIM, dtype=dtype, seed=50 + number) * 3)
        selected = selection(at, number) if mode == "selected entries" else None
        args = state.args(q, column_slice(kv), selected, sink, slots, at)
        (expected,) = reference("attention", *args)
        (actual,) = run_kernel("attention", *args)
        # A weight on the border of two bfloat16 values may round to either, which moves a sum by 2^-9 of that weight.
        assert_close(actual, expected, 1e-5 if dtype is torch.float32 else 4e-3)
        for threads in (1, 3):
            assert same_bits(run_kernel("attention", *args, threads=threads)[0], actual)
        state.commit(kv, slots, at)


@pytest.mark.parametrize(("storage", "dtype"), KV_STORAGES)
def test_attention_does_not_depend_on_the_chunks(storage: str, dtype: torch.dtype) -> None:
    """One step of three interleaved slots gives the bits of one step per token."""
    counts = (21, 5, 34)
    heads, sink = 5, normal(5, seed=77)
    whole = AttentionState(storage, dtype, with_entries=True)
    slots, at, kv = whole.step(counts, 1)
    q = normal(len(slots), heads, HEAD_DIM, dtype=dtype, seed=2)
    (expected,) = run_kernel("attention", *whole.args(q, kv, None, sink, slots, at))
    assert not bool(expected.isnan().any())
    for row in range(len(slots)):
        one = slice(row, row + 1)
        (alone,) = run_kernel("attention", *whole.args(q[one], kv[one], None, sink, slots[one], at[one]))
        assert same_bits(alone, expected[one])
        whole.commit(kv[one], slots[one], at[one])


KEY_STORAGES = (
    ("float32", torch.float32),
    ("bfloat16", torch.bfloat16),
    ("fp4", torch.bfloat16),
    ("fp8", torch.bfloat16),
)


def key_table(storage: str, rows: Tensor, table: Tensor, per_block: int) -> Plane:
    """Index keys [S, N, width] of e2m1 values, stored through `compress` of groups of one token."""
    slots, count, width = rows.shape
    plane = key_plane(table.numel(), per_block, width, storage)
    gate = torch.zeros(count, width)
    for slot in range(slots):
        write_entries(plane, rows[slot], gate, table, slot)
    return plane


def write_entries(plane: Plane, rows: Tensor, gate: Tensor, table: Tensor, slot: int) -> None:
    """Every token is an entry; norm and rotation leave rows of equal mean square unchanged up to a factor."""
    count, width = rows.shape
    state = poisoned(table.shape[0], 2, 2, width, dtype=torch.float32)
    slots = torch.full((count,), slot, dtype=torch.int32)
    at = torch.arange(count, dtype=torch.int32)
    args = (rows, gate, torch.zeros(1, width), torch.ones(width), torch.zeros(2), slots, at, table, state)
    tail = (plane.data, plane.scales, 1, False, 1e-6, Rounding.NONE, torch.float32)
    reference("compress", *args, *tail)


@pytest.mark.parametrize(("storage", "dtype"), KEY_STORAGES)
@pytest.mark.parametrize(("heads", "width", "topk"), ((1, 32, 1), (7, 96, 5), (4, 64, 16)))
def test_select_entries(storage: str, dtype: torch.dtype, heads: int, width: int, topk: int) -> None:
    count, ratio, per_block = 300, 4, 8
    table = block_table(SLOTS, 40)
    keys = key_table(storage, normal(SLOTS, count, width, seed=1), table, per_block)
    positions = torch.tensor([0, 2, 3, 4 * topk - 2, 4 * topk + 3, 500, 1199, 4 * topk - 1], dtype=torch.int32)
    slots = torch.arange(8, dtype=torch.int32) % SLOTS
    q = column_slice(normal(8, heads, width, dtype=dtype, seed=2))
    weights = column_slice(normal(8, heads, dtype=dtype, seed=3))
    args = (q, weights, keys.data, keys.scales, slots, positions, table, topk, ratio, 0.1)
    (expected,) = reference("select_entries", *args)
    for threads in (1, 2, 3):
        (actual,) = run_kernel("select_entries", *args, threads=threads)
        assert torch.equal(actual, expected)
    for row in range(8):
        one = slice(row, row + 1)
        (alone,) = run_kernel("select_entries", q[one], weights[one], *args[2:4], slots[one], positions[one], *args[6:])
        assert torch.equal(alone, expected[one])


def test_select_entries_breaks_ties_to_the_lower_entry() -> None:
    keys = torch.ones(4, 8, 32)
    keys[0, 3] = 2.0
    keys[1, 1:] = -1.0  # relu gives zero
    table = torch.arange(4, dtype=torch.int32).view(1, 4)
    zero, last = torch.zeros(2, dtype=torch.int32), torch.tensor([31, 30], dtype=torch.int32)
    q = torch.ones(2, 2, 32)
    for weight in (1.0, -1.0, 0.0):
        args = (q, torch.full((2, 2), weight), keys, None, zero, last, table, 6, 1, 1.0)
        assert torch.equal(run_kernel("select_entries", *args)[0], reference("select_entries", *args)[0])
    assert run_kernel("select_entries", *args)[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
