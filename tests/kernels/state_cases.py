"""Steps over state for kernel tests: slots at different contexts, planes in every format, poison where nobody wrote."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import pack_fp4
from dsv4c.graph.ops import quantize_fp4_groups
from dsv4c.graph.state_ops import (
    INDEX_GROUP,
    _e2m1_codes,
    _exponents,
    pack_kv_rows,
    packed_row_bytes,
    packed_scale_bytes,
)

POISON = 0xFF  # NaN in every format
Run = tuple[int, int, int]  # slot, first position, rows


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def interleaved(runs: Sequence[Run]) -> tuple[Tensor, Tensor]:
    """Slots and positions of a step whose runs take turns, row by row."""
    rows = [(slot, first + i, i, turn) for turn, (slot, first, count) in enumerate(runs) for i in range(count)]
    rows.sort(key=lambda row: row[2:])
    slots, positions = (torch.tensor([row[axis] for row in rows], dtype=torch.int32) for axis in (0, 1))
    return slots, positions


def shuffled_table(slots: int, per_slot: int) -> Tensor:
    """A block table [S, M] in which no slot's blocks are in order."""
    order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(7))
    return order.int().view(slots, per_slot)


def plane(values: Tensor, written: Tensor, form: str, rotary: int = 0) -> tuple[Tensor, Tensor | None]:
    """A plane of `values` [U, R, W] in a format, and its exponents; poison where `written` [U, R] is not set."""
    units, rows, width = values.shape
    every = values.flatten(0, 1)
    if form in ("f32", "bf16"):
        dtype = torch.float32 if form == "f32" else torch.bfloat16
        stored = torch.full((units, rows, width), torch.nan, dtype=dtype)
        stored[written] = values[written].to(dtype)
        return stored, None
    if form == "kv":
        sizes = packed_row_bytes(width, rotary), packed_scale_bytes(width, rotary)
        packed, exponents = pack_kv_rows(every, rotary)
    else:
        codes, scale = quantize_fp4_groups(every, INDEX_GROUP)
        exponents = _exponents(scale)
        packed = pack_fp4(_e2m1_codes(codes)) if form == "e2m1" else codes.to(torch.float8_e4m3fn).view(torch.uint8)
        sizes = packed.shape[1], exponents.shape[1]
    data, scales = (torch.full((units, rows, size), POISON, dtype=torch.uint8) for size in sizes)
    data[written], scales[written] = packed[written.flatten()], exponents[written.flatten()]
    dtype = {"kv": torch.uint8, "e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn}[form]
    return data.view(dtype), scales


def ring_plane(
    slots: int, rows: int, width: int, window: int, runs: Sequence[Run], form: str, rotary: int
) -> tuple[Tensor, Tensor | None]:
    """The ring before a step: the window of every slot of it; all else, stale rows too, is poison."""
    written = torch.zeros((slots, rows), dtype=torch.bool)
    for slot, first, _ in runs:
        for position in range(max(0, first - window + 1), first):
            written[slot, position % rows] = True
    return plane(draw(slots, rows, width, seed=1), written, form, rotary)


def entries_plane(
    table: Tensor, per_block: int, width: int, ratio: int, runs: Sequence[Run], form: str, rotary: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Compressed entries as attention and selection see them: those of the step are written, later ones are poison."""
    written = torch.zeros((table.numel(), per_block), dtype=torch.bool)
    for slot, first, count in runs:
        entry = torch.arange((first + count) // ratio)
        written[table[slot].long()[entry // per_block], entry % per_block] = True
    return plane(draw(table.numel(), per_block, width, seed=2), written, form, rotary)
