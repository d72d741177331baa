"""The `dsv4::` operators with state: open groups, compressed entries, the KV ring, selection, attention.

State planes, one set per layer (S slots, B blocks of the session, hd head size, rd rotary channels):

- ring [S, R, hd]: row `position % R` of a slot holds the key of that position; R is the window plus the rollback rows.
- group state float32 [S, G, 2, W]: row `position % G` holds a token's projected value and its gate (position bias
  included); W is the entry width, twice that where groups overlap.
- entries [B, rows, hd] and index keys [B, rows, width]: entry j of a slot is row `j % rows` of block
  `block_table[slot, j // rows]`.

A ring or entries plane is float32 or bfloat16, or packed: uint8 rows of hd - rd e4m3 codes, then rd bfloat16 channels
(little endian), padded to 16 bytes, with a plane of scale exponents per 64 channels padded to 8 bytes. Index keys are
float32, bfloat16, float4_e2m1fn_x2 or float8_e4m3fn with a plane of exponents per 32 channels.

The rows of one slot are consecutive positions in the order of the step; `compress` runs before the attention of a
layer, `commit_ring` after it, so a step may be longer than the window.
"""

import enum

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import FP4_VALUES, decode_e8m0, dequantize_fp4, pack_fp4
from dsv4c.graph.ops import (
    expand_groups,
    fp4_rounded,
    fp8_rounded,
    hadamard_transformed,
    normalized,
    quantize_fp4_groups,
    quantize_fp8_groups,
    rotated,
)

KV_GROUP = 64
INDEX_GROUP = 32
ROW_ALIGN = 16
SCALE_ALIGN = 8


class Rounding(enum.IntEnum):
    """How a compressed entry is rounded before it is stored (spec 2.9)."""

    NONE = 0
    FP8 = 1
    HADAMARD_FP4 = 2


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def packed_row_bytes(head_dim: int, rotary_dim: int) -> int:
    """Bytes of one packed KV row: e4m3 codes and bfloat16 rotary channels, padded."""
    return _align(head_dim + rotary_dim, ROW_ALIGN)


def packed_scale_bytes(head_dim: int, rotary_dim: int) -> int:
    """Bytes of one row of KV scale exponents, padded."""
    return _align(-(-(head_dim - rotary_dim) // KV_GROUP), SCALE_ALIGN)


def _exponents(scale: Tensor) -> Tensor:
    return (torch.frexp(scale).exponent + 126).to(torch.uint8)


def pack_kv_rows(x: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Rows [N, hd] as packed bytes uint8 [N, packed_row_bytes] and exponents uint8 [N, packed_scale_bytes]."""
    rows, head_dim = x.shape
    plain = head_dim - rotary_dim
    codes, scale = quantize_fp8_groups(x[:, :plain], KV_GROUP)
    tail = x[:, plain:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data = torch.zeros((rows, packed_row_bytes(head_dim, rotary_dim)), dtype=torch.uint8)
    data[:, :plain] = codes.view(torch.uint8)
    data[:, plain : plain + 2 * rotary_dim] = tail
    exponents = torch.zeros((rows, packed_scale_bytes(head_dim, rotary_dim)), dtype=torch.uint8)
    exponents[:, : scale.shape[1]] = _exponents(scale)
    return data, exponents


def unpack_kv_rows(data: Tensor, exponents: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Float32 rows [N, hd] of `pack_kv_rows`."""
    plain = head_dim - rotary_dim
    scale = expand_groups(decode_e8m0(exponents), KV_GROUP, plain)
    tail = data[:, plain : plain + 2 * rotary_dim].clone().view(torch.bfloat16).float()  # a copy is aligned
    codes = data[:, :plain].contiguous().view(torch.float8_e4m3fn).float()
    return torch.cat([codes * scale, tail], 1)


def _kv_rows(plane: Tensor, scales: Tensor | None, head_dim: int, rotary_dim: int) -> Tensor:
    return plane.float() if scales is None else unpack_kv_rows(plane, scales, head_dim, rotary_dim)


def _key_rows(plane: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        return plane.float()
    if plane.dtype == torch.float8_e4m3fn:
        return plane.float() * expand_groups(decode_e8m0(scales), INDEX_GROUP, plane.shape[-1])
    return dequantize_fp4(plane.view(torch.uint8), scales)


def _e2m1_codes(values: Tensor) -> Tensor:
    """4-bit codes, uint8, of values that are e2m1 already; -0 keeps its sign."""
    magnitudes = torch.tensor(FP4_VALUES[:8])
    codes = torch.searchsorted(magnitudes, values.abs()).to(torch.uint8)
    return codes | torch.signbit(values).to(torch.uint8) << 3


def _store(plane: Tensor, scales: Tensor | None, at: tuple[int, int], row: Tensor, rotary_dim: int) -> None:
    """Write one rounded entry [W] into row `at` of a plane, in the plane's format."""
    if scales is None:
        plane[at] = row.to(plane.dtype)
    elif plane.dtype == torch.uint8:
        data, exponents = pack_kv_rows(row.unsqueeze(0), rotary_dim)
        plane[at], scales[at] = data[0], exponents[0]
    else:
        values, scale = quantize_fp4_groups(row, INDEX_GROUP)
        packed = values.to(plane.dtype) if plane.dtype == torch.float8_e4m3fn else pack_fp4(_e2m1_codes(values))
        plane.view(torch.uint8)[at] = packed.view(torch.uint8)
        scales[at] = _exponents(scale)


def step_runs(slots: Tensor, positions: Tensor) -> list[tuple[int, list[int], int]]:
    """(slot, rows of that slot in step order, first position), in the order the slots appear."""
    runs: dict[int, list[int]] = {}
    for row, slot in enumerate(slots.tolist()):
        runs.setdefault(slot, []).append(row)
    return [(slot, rows, int(positions[rows[0]])) for slot, rows in runs.items()]


@torch.library.custom_op("dsv4::compress", mutates_args=("group_state", "entries", "entry_scales"))
def compress(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    group_state: Tensor,
    entries: Tensor,
    entry_scales: Tensor | None,
    ratio: int,
    overlap: bool,
    eps: float,
    rounding: int,
    dtype: torch.dtype,
) -> None:
    """Pool the groups that close in this step into entries, then remember the step's tokens (spec 2.7).

    kv, gate float32 [T, W] (W = 2d where groups overlap, else d); ape [ratio, W]; norm_weight [d]. Entry j pools the
    tokens of group j with channels W-d.. and, where groups overlap, those of group j-1 with channels 0..d; its rotary
    position is ratio*j. The pooled value is rounded to `dtype`, normalised, rotated and rounded as `rounding` says,
    each step rounded to `dtype`.
    """
    depth = group_state.shape[1]
    width = norm_weight.shape[0]
    per_block = entries.shape[1]
    rotary_dim = 2 * inv_freq.shape[0]
    for slot, rows, first in step_runs(slots, positions):
        last = first + len(rows) - 1
        index = torch.tensor(rows)
        biased = gate[index] + ape.float()[positions[index].long() % ratio]
        fresh = torch.stack([kv[index].float(), biased.float()], 1)

        def token(position: int, fresh: Tensor = fresh, first: int = first, slot: int = slot) -> Tensor:
            return fresh[position - first] if position >= first else group_state[slot, position % depth]

        for entry in range(first // ratio, (last + 1) // ratio):
            start = entry * ratio
            members = torch.stack([token(p)[:, -width:] for p in range(start, start + ratio)])
            if overlap and entry > 0:
                previous = torch.stack([token(p)[:, :width] for p in range(start - ratio, start)])
                members = torch.cat([previous, members])
            pooled = (members[:, 0] * members[:, 1].softmax(0)).sum(0).to(dtype)
            row = normalized(pooled, norm_weight, eps).to(dtype).unsqueeze(0)
            row = rotated(row, torch.tensor([start]), inv_freq, False).to(dtype)
            if rounding == Rounding.FP8:
                row = fp8_rounded(row, KV_GROUP, width - rotary_dim).to(dtype)
            elif rounding == Rounding.HADAMARD_FP4:
                row = fp4_rounded(hadamard_transformed(row).to(dtype), INDEX_GROUP).to(dtype)
            block = int(block_table[slot, entry // per_block])
            _store(entries, entry_scales, (block, entry % per_block), row[0], rotary_dim)
        for position in range(max(first, last + 1 - depth), last + 1):
            group_state[slot, position % depth] = fresh[position - first]


@compress.register_fake
def _(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    group_state: Tensor,
    entries: Tensor,
    entry_scales: Tensor | None,
    ratio: int,
    overlap: bool,
    eps: float,
    rounding: int,
    dtype: torch.dtype,
) -> None:
    return None


@torch.library.custom_op("dsv4::select_entries", mutates_args=())
def select_entries(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    topk: int,
    ratio: int,
    scale: float,
) -> Tensor:
    """The `topk` best visible entries of each row, ascending, -1 where there are fewer: int32 [T, topk] (spec 2.8).

    q [T, Hi, di]; weights [T, Hi]. Score of entry j: sum over heads of weight * scale * relu(q_h . key_j), float32;
    entry j is visible at position t iff j < (t + 1) // ratio. Ties go to the lower entry.
    """
    per_block = keys.shape[1]
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        visible = (position + 1) // ratio
        if visible <= topk:
            out[row, :visible] = torch.arange(visible, dtype=torch.int32)
            continue
        entry = torch.arange(visible)
        at = (block_table[slot].long()[entry // per_block], entry % per_block)
        rows = _key_rows(_gather(keys, at), None if key_scales is None else key_scales[at])
        scores = torch.relu(q[row].float() @ rows.T)
        scores = ((weights[row].float() * scale).unsqueeze(1) * scores).sum(0)
        best = scores.sort(descending=True, stable=True).indices[:topk]
        out[row] = best.sort().values.to(torch.int32)
    return out


def _gather(plane: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
    if plane.element_size() == 1:  # torch indexes no eight-bit floats
        return plane.view(torch.uint8)[at].view(plane.dtype)
    return plane[at]


@select_entries.register_fake
def _(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    topk: int,
    ratio: int,
    scale: float,
) -> Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


@torch.library.custom_op("dsv4::attention", mutates_args=())
def attention(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    ring_scales: Tensor | None,
    entries: Tensor | None,
    entry_scales: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    window: int,
    ratio: int,
    rotary_dim: int,
    scale: float,
) -> Tensor:
    """Attention of q [T, H, hd] with one shared key = value head and a sink per head (spec 2.6).

    Keys of the row at position t: positions max(0, t-window+1)..t, from `kv` [T, hd] where this step has them and from
    the ring before that; then the `selected` entries int32 [T, K] (-1: none), or with entries but no selection every
    visible one. sink float32 [H] takes part in the denominator only. Scores and sums float32; the exponentials are
    rounded to the dtype of q for the product with the values. Returns the dtype of q, [T, H, hd].
    """
    head_dim = q.shape[2]
    depth = ring.shape[1]
    out = torch.empty_like(q)
    for slot, rows, first in step_runs(slots, positions):
        for offset, row in enumerate(rows):
            position = first + offset
            start = max(0, position - window + 1)
            old = torch.arange(start, first) % depth if start < first else torch.arange(0)
            scales = None if ring_scales is None else ring_scales[slot, old]
            keys = [_kv_rows(ring[slot, old], scales, head_dim, rotary_dim)]
            keys.append(kv[torch.tensor(rows[max(0, start - first) : offset + 1])].float())
            if entries is not None:
                visible = (position + 1) // ratio
                entry = torch.arange(visible) if selected is None else selected[row][selected[row] >= 0].long()
                at = (block_table[slot].long()[entry // entries.shape[1]], entry % entries.shape[1])
                scales = None if entry_scales is None else entry_scales[at]
                keys.append(_kv_rows(entries[at], scales, head_dim, rotary_dim))
            k = torch.cat(keys)
            scores = q[row].float() @ k.T * scale
            peak = torch.maximum(scores.amax(1), sink.float())
            weight = torch.exp(scores - peak.unsqueeze(1))
            total = weight.sum(1) + torch.exp(sink.float() - peak)
            out[row] = (weight.to(q.dtype).float() @ k / total.unsqueeze(1)).to(q.dtype)
    return out


@attention.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    ring_scales: Tensor | None,
    entries: Tensor | None,
    entry_scales: Tensor | None,
    selected: Tensor | None,
    sink: Tensor,
    slots: Tensor,
    positions: Tensor,
    block_table: Tensor,
    window: int,
    ratio: int,
    rotary_dim: int,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("dsv4::commit_ring", mutates_args=("ring", "ring_scales"))
def commit_ring(
    kv: Tensor, ring: Tensor, ring_scales: Tensor | None, slots: Tensor, positions: Tensor, rotary_dim: int
) -> None:
    """Write this step's keys [T, hd] into the ring, after its attention; the last R rows of a slot stay."""
    depth = ring.shape[1]
    for slot, rows, first in step_runs(slots, positions):
        for offset in range(max(0, len(rows) - depth), len(rows)):
            _store(ring, ring_scales, (slot, (first + offset) % depth), kv[rows[offset]], rotary_dim)


@commit_ring.register_fake
def _(kv: Tensor, ring: Tensor, ring_scales: Tensor | None, slots: Tensor, positions: Tensor, rotary_dim: int) -> None:
    return None
