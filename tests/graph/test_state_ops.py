"""The state operators, fed in every way a session may feed them, against attention over the whole sequence at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.formats import unpack_fp4
from dsv4c.graph import ops, state_ops
from dsv4c.graph.state_ops import INDEX_GROUP, KV_GROUP, Rounding, pack_kv_rows, unpack_kv_rows

dsv4 = torch.ops.dsv4

WINDOW, ROLLBACK, HEADS, HEAD_DIM, ROTARY, LENGTH = 5, 3, 2, 12, 4, 26
SLOTS, BLOCKS_PER_SLOT, ROWS_PER_BLOCK = 3, 5, 2
EPS, SCALE = 1e-6, 0.3
FREQS = torch.tensor([1.0, 0.3])
SINK = torch.tensor([0.5, -1.0])
# No plane lies in the order of its entries.
BLOCK_TABLE = torch.randperm(SLOTS * BLOCKS_PER_SLOT, generator=torch.Generator().manual_seed(1)).int().view(SLOTS, -1)
# (ratio, groups overlap): that of CSA, odd ones, and the overlap of an odd one.
GROUPINGS = [(4, True), (4, False), (3, False), (7, False), (3, True)]

Step = list[tuple[int, int]]  # (slot, position) of each row


@dataclass(frozen=True)
class Projected:
    """The projected values of one sequence of LENGTH positions."""

    q: Tensor
    kv: Tensor
    pooled: Tensor
    gate: Tensor

    @staticmethod
    def random(seed: int, width: int, length: int = LENGTH) -> "Projected":
        rng = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(length, *shape, generator=rng)

        return Projected(draw(HEADS, HEAD_DIM), draw(HEAD_DIM), draw(width), draw(width))

    def spliced(self, other: "Projected", at: int) -> "Projected":
        """This sequence up to position `at`, the other from there on."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("q", "kv", "pooled", "gate"))
        return Projected(*(torch.cat([mine[:at], theirs[at:]]) for mine, theirs in pairs))


@dataclass
class Session:
    """The state planes of one layer, NaN until written, and the operators over them in the order of the graph."""

    ratio: int
    overlap: bool
    ape: Tensor = field(init=False)
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        depth = self.ratio * (2 if self.overlap else 1) + ROLLBACK
        self.ring = torch.full((SLOTS, WINDOW + ROLLBACK, HEAD_DIM), torch.nan)
        self.groups = torch.full((SLOTS, depth, 2, self.width), torch.nan)
        self.entries = torch.full((SLOTS * BLOCKS_PER_SLOT, ROWS_PER_BLOCK, HEAD_DIM), torch.nan)
        rng = torch.Generator().manual_seed(2)
        self.ape = torch.randn(self.ratio, self.width, generator=rng)
        self.norm = torch.rand(HEAD_DIM, generator=rng) + 0.5

    @property
    def width(self) -> int:
        return HEAD_DIM * (2 if self.overlap else 1)

    def step(self, sequences: dict[int, Projected], rows: Step) -> Tensor:
        """The attention output of each row."""
        slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int32)
        positions = torch.tensor([position for _, position in rows], dtype=torch.int32)
        q, kv, pooled, gate = (
            torch.stack([getattr(sequences[slot], name)[position] for slot, position in rows])
            for name in ("q", "kv", "pooled", "gate")
        )
        at = (slots, positions, BLOCK_TABLE)
        planes = (self.groups, self.entries, None)
        settings = (self.ratio, self.overlap, EPS, Rounding.NONE, torch.float32)
        dsv4.compress(pooled, gate, self.ape, self.norm, FREQS, *at, *planes, *settings)
        out = dsv4.attention(
            q, kv, self.ring, None, self.entries, None, None, SINK, *at, WINDOW, self.ratio, ROTARY, SCALE
        )
        dsv4.commit_ring(kv, self.ring, None, slots, positions, ROTARY)
        return out

    def dense_entries(self, sequence: Projected) -> Tensor:
        """Every complete group of a sequence as one entry, in float64."""
        pooled, gate = sequence.pooled.double(), sequence.gate.double()
        entries = []
        for start in range(0, len(pooled) - self.ratio + 1, self.ratio):
            # (position, first channel): the group's own half, then the other half of the group before.
            members = [(start + i, self.width - HEAD_DIM) for i in range(self.ratio)]
            if self.overlap and start:
                members += [(start - self.ratio + i, 0) for i in range(self.ratio)]
            values = torch.stack([pooled[p, c : c + HEAD_DIM] for p, c in members])
            biases = torch.stack([self.ape[p % self.ratio, c : c + HEAD_DIM] for p, c in members])
            logits = torch.stack([gate[p, c : c + HEAD_DIM] for p, c in members]) + biases
            mean = (logits.exp() / logits.exp().sum(0) * values).sum(0)
            row = mean / (mean.square().mean() + EPS).sqrt() * self.norm.double()
            tail = torch.view_as_complex(row[-ROTARY:].view(-1, 2))
            turned = tail * torch.polar(torch.ones(2, dtype=torch.float64), start * FREQS.double())
            entries.append(torch.cat([row[:-ROTARY], torch.view_as_real(turned).flatten()]))
        return torch.stack(entries)

    def dense(self, sequence: Projected) -> Tensor:
        """Attention of the whole sequence: one mask over all positions and all entries, a sink as one more column."""
        entries = self.dense_entries(sequence)
        length = len(sequence.q)
        at, key = torch.arange(length)[:, None], torch.arange(length)[None]
        near = (key <= at) & (key > at - WINDOW)
        closed = (torch.arange(len(entries))[None] + 1) * self.ratio <= at + 1
        keys = torch.cat([sequence.kv.double(), entries])
        scores = torch.einsum("thd,kd->htk", sequence.q.double(), keys) * SCALE
        scores = scores.masked_fill(~torch.cat([near, closed], 1), -torch.inf)
        sink = SINK.double()[:, None, None].expand(-1, length, 1)
        weights = torch.cat([scores, sink], 2).softmax(2)[..., :-1]
        return torch.einsum("htk,kd->thd", weights, keys).float()


def chunks(sizes: Sequence[int], slot: int = 0, start: int = 0) -> list[Step]:
    steps = []
    for size in sizes:
        steps.append([(slot, position) for position in range(start, start + size)])
        start += size
    return steps


def interleaved() -> list[Step]:
    """Slots 0 and 2 row by row, then in uneven runs, then one of them alone."""
    first = [(slot, position) for position in range(3) for slot in (2, 0)]
    second = [(0, p) for p in range(3, 12)] + [(2, 3)] + [(0, p) for p in range(12, 14)] + [(2, p) for p in range(4, 9)]
    third = [(2, p) for p in range(9, LENGTH)]
    return [first, second, third, *chunks([1] * (LENGTH - 14), start=14)]


SCHEDULES = {
    "single rows": chunks([1] * LENGTH),
    "one chunk, longer than every ring": chunks([LENGTH]),
    "growing chunks": chunks([1, 2, 3, 5, 8, 7]),
    "a long chunk after a short one": chunks([4, 21, 1]),
    "interleaved slots": interleaved(),
}


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_way_to_feed_equals_the_whole(schedule: str, grouping: tuple[int, bool]) -> None:
    session = Session(*grouping)
    sequences = {slot: Projected.random(slot, session.width) for slot in (0, 2)}
    dense = {slot: session.dense(sequence) for slot, sequence in sequences.items()}
    for rows in SCHEDULES[schedule]:
        found = session.step(sequences, rows)
        wanted = torch.stack([dense[slot][position] for slot, position in rows])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # Nobody wrote to the slot that was not used.
    assert session.ring[1].isnan().all() and session.groups[1].isnan().all()
    assert session.entries[BLOCK_TABLE[1].long()].isnan().all()


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("high", [13, 16, 19, 21])
@pytest.mark.parametrize("back", range(1, ROLLBACK + 1))
@pytest.mark.parametrize("chunk", [1, 4, 30])
def test_positions_may_be_rewritten(grouping: tuple[int, bool], high: int, back: int, chunk: int) -> None:
    session = Session(*grouping)
    first, second = (Projected.random(seed, session.width) for seed in (0, 1))
    for rows in chunks([high - 6, 6]):
        session.step({0: first}, rows)
    low = high - back
    spliced = first.spliced(second, low)
    dense = session.dense(spliced)
    for start in range(low, LENGTH, chunk):
        rows = [(0, position) for position in range(start, min(start + chunk, LENGTH))]
        wanted = torch.stack([dense[position] for _, position in rows])
        torch.testing.assert_close(session.step({0: spliced}, rows), wanted, rtol=1e-5, atol=1e-5)


def test_a_slot_starts_over_on_what_it_left() -> None:
    session = Session(4, True)
    first, second = (Projected.random(seed, session.width) for seed in (0, 1))
    for sequence in (first, second):
        dense = session.dense(sequence)
        for rows in chunks([3, 11, 12]):
            wanted = torch.stack([dense[position] for _, position in rows])
            torch.testing.assert_close(session.step({0: sequence}, rows), wanted, rtol=1e-5, atol=1e-5)


# Selection


def select(q: Tensor, weights: Tensor, keys: Tensor, position: int, topk: int, ratio: int) -> list[int]:
    """The selection of one row of slot 1; `keys` [N, W] are put where the block table says, all else is NaN."""
    plane = torch.full((SLOTS * BLOCKS_PER_SLOT, ROWS_PER_BLOCK, keys.shape[1]), torch.nan)
    for entry, key in enumerate(keys):
        plane[BLOCK_TABLE[1, entry // ROWS_PER_BLOCK], entry % ROWS_PER_BLOCK] = key
    at = (torch.tensor([1], dtype=torch.int32), torch.tensor([position], dtype=torch.int32), BLOCK_TABLE)
    found: list[int] = dsv4.select_entries(q[None], weights[None], plane, None, *at, topk, ratio, 0.25)[0].tolist()
    return found


@pytest.mark.parametrize("ratio", [4, 3])
def test_selection_is_the_top_of_the_dense_scores(ratio: int) -> None:
    rng = torch.Generator().manual_seed(3)
    q, weights = torch.randn(4, 8, generator=rng), torch.randn(4, generator=rng)
    keys = torch.randn(8, 8, generator=rng)
    for position in range(8 * ratio):
        visible = (position + 1) // ratio
        scores = torch.tensor(
            [sum(w * max(float(h @ key), 0.0) for h, w in zip(q, weights, strict=True)) for key in keys[:visible]]
        )
        best = sorted(scores.topk(min(3, visible)).indices.tolist()) if visible else []
        assert select(q, weights, keys[:visible], position, 3, ratio) == best + [-1] * (3 - len(best))


def test_equal_scores_go_to_the_lower_entry() -> None:
    q, weights = torch.ones(1, 2), torch.ones(1)
    keys = torch.tensor([[1.0, 0], [2, 0], [0, 1], [0, 2], [1, 1], [-1, 0]])
    assert select(q, weights, keys, 23, 4, 4) == [0, 1, 3, 4]
    assert select(q, weights, torch.zeros(6, 2), 23, 4, 4) == [0, 1, 2, 3]
    # A negative weight prefers entries that score nothing.
    assert select(q, -weights, keys, 23, 2, 4) == [0, 5]


def test_attention_reads_the_selected_entries_only() -> None:
    rng = torch.Generator().manual_seed(4)
    q, kv = torch.randn(1, HEADS, HEAD_DIM, generator=rng), torch.randn(1, HEAD_DIM, generator=rng)
    chosen = torch.randn(2, HEAD_DIM, generator=rng)
    entries = torch.full((SLOTS * BLOCKS_PER_SLOT, ROWS_PER_BLOCK, HEAD_DIM), torch.nan)
    for entry, key in zip((2, 5), chosen, strict=True):
        entries[BLOCK_TABLE[1, entry // ROWS_PER_BLOCK], entry % ROWS_PER_BLOCK] = key
    selected = torch.tensor([[2, 5, -1, -1]], dtype=torch.int32)
    ring = torch.full((SLOTS, 8, HEAD_DIM), torch.nan)
    at = (torch.tensor([1], dtype=torch.int32), torch.tensor([23], dtype=torch.int32), BLOCK_TABLE)
    out = dsv4.attention(q, kv, ring, None, entries, None, selected, SINK, *at, 1, 4, ROTARY, SCALE)
    keys = torch.cat([kv, chosen])
    scores = torch.cat([q[0] @ keys.T * SCALE, SINK[:, None]], 1)
    torch.testing.assert_close(out[0], scores.softmax(1)[:, :-1] @ keys)


# Packed planes


def test_a_packed_row_has_the_documented_bytes() -> None:
    x = torch.cat([torch.full((1, 64), 448.0), torch.full((1, 6), -(2.0**-130)), torch.tensor([[1.0, -2.0]])], 1)
    data, exponents = pack_kv_rows(x, 2)
    assert data.shape == (1, 80) and exponents.shape == (1, 8)
    # e4m3 448 is 0x7E; -0 keeps its sign; bf16 1.0 is 0x3F80, -2.0 is 0xC000, little endian; then padding.
    assert data[0].tolist() == [0x7E] * 64 + [0x80] * 6 + [0x80, 0x3F, 0x00, 0xC0] + [0] * 6
    # Scales 1 and the floor's 2^-22.
    assert exponents[0].tolist() == [127, 105] + [0] * 6


@pytest.mark.parametrize(("head_dim", "rotary"), [(128, 64), (40, 8), (96, 32), (200, 64), (12, 4)])
def test_rounded_rows_survive_packing_bit_for_bit(head_dim: int, rotary: int) -> None:
    rng = torch.Generator().manual_seed(head_dim)
    x = torch.randn(6, head_dim, generator=rng) * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1e4, 0.0])[:, None]
    rounded = ops.fp8_rounded(x.bfloat16(), KV_GROUP, head_dim - rotary).bfloat16()
    data, exponents = pack_kv_rows(rounded, rotary)
    unpacked = unpack_kv_rows(data, exponents, head_dim, rotary).bfloat16()
    assert torch.equal(unpacked.view(torch.int16), rounded.view(torch.int16))
    again = pack_kv_rows(unpacked, rotary)
    assert torch.equal(again[0], data) and torch.equal(again[1], exponents)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [128, 64, 16, 40])
def test_rounded_index_keys_survive_storage_bit_for_bit(width: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=rng) * torch.tensor([1e-4, 1.0, 1e4])[:, None]
    rounded = ops.fp4_rounded(x.bfloat16(), INDEX_GROUP).bfloat16()
    assert len(rounded[1].unique()) > 4
    stored = width // 2 if dtype == torch.float4_e2m1fn_x2 else width
    plane = torch.full((3, 1, stored), 0xFF, dtype=torch.uint8).view(dtype)
    scales = torch.full((3, 1, -(-width // INDEX_GROUP)), 0xFF, dtype=torch.uint8)
    for row in range(3):
        state_ops._store(plane, scales, (row, 0), rounded[row], 4)
    read = state_ops._key_rows(plane[:, 0], scales[:, 0]).bfloat16()
    assert torch.equal(read.view(torch.int16), rounded.view(torch.int16))


def test_e2m1_codes_keep_the_sign_of_zero() -> None:
    values = torch.tensor([0.0, -0.0, 0.5, -0.5, 6.0, -6.0, 1.5, -4.0])
    codes = state_ops._e2m1_codes(values)
    assert codes.tolist() == [0, 8, 1, 9, 7, 15, 3, 14]
    assert unpack_fp4(state_ops.pack_fp4(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("rounding", [Rounding.FP8, Rounding.HADAMARD_FP4])
def test_packed_planes_equal_rounded_ones(rounding: Rounding) -> None:
    """A whole session in bf16 planes and in packed ones: the same attention and selection, bit for bit."""
    head_dim, rotary, ratio, length, topk = 80, 16, 4, 23, 2
    rng = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=rng)

    width = 64 if rounding is Rounding.HADAMARD_FP4 else head_dim
    freqs, ape = torch.rand(rotary // 2, generator=rng), torch.randn(ratio, 2 * width, generator=rng)
    norm = torch.rand(width, generator=rng) + 0.5
    q, kv = draw(HEADS, head_dim).bfloat16(), ops.fp8_rounded(draw(head_dim), KV_GROUP, head_dim - rotary).bfloat16()
    pooled, gate = draw(2 * width), draw(2 * width)
    index_q, index_weights = draw(3, width).bfloat16(), draw(3).bfloat16()
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)

    def planes(units: int, rows: int, packed: bool) -> tuple[Tensor, Tensor | None]:
        if not packed:
            return torch.full((units, rows, width if units == 3 else head_dim), torch.nan).bfloat16(), None
        if units == 3 and rounding is Rounding.HADAMARD_FP4:
            shapes = (width // 2, width // INDEX_GROUP)
        else:
            shapes = (state_ops.packed_row_bytes(head_dim, rotary), state_ops.packed_scale_bytes(head_dim, rotary))
        data, scales = (torch.full((units, rows, size), 0xFF, dtype=torch.uint8) for size in shapes)
        if units == 3 and rounding is Rounding.HADAMARD_FP4:
            data = data.view(torch.float4_e2m1fn_x2)
        return data, scales

    results: list[list[Tensor]] = []
    for packed in (False, True):
        ring, entries = planes(1, 9, packed and rounding is Rounding.FP8), planes(3, 2, packed)
        groups = torch.full((1, 11, 2, 2 * width), torch.nan)
        found = []
        for start, stop in ((0, 9), (9, 10), (10, 22), (22, 23)):
            rows = slice(start, stop)
            at = (torch.zeros(stop - start, dtype=torch.int32), torch.arange(start, stop, dtype=torch.int32), table)
            settings = (ratio, True, EPS, rounding, torch.bfloat16)
            dsv4.compress(pooled[rows], gate[rows], ape, norm, freqs, *at, groups, *entries, *settings)
            if rounding is Rounding.HADAMARD_FP4:
                found.append(dsv4.select_entries(index_q[rows], index_weights[rows], *entries, *at, topk, ratio, 0.2))
                continue
            numbers = (6, ratio, rotary, 0.2)
            found.append(dsv4.attention(q[rows], kv[rows], *ring, *entries, None, SINK, *at, *numbers))
            dsv4.commit_ring(kv[rows], *ring, *at[:2], rotary)
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.cat(results[0]).isnan().any()
