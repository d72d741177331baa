"""The packed form of a routed expert: its three matrices as one record, in the order in which Hopper's matrix
instructions take them. The codes and scales are those of the checkpoint in another order; nothing is rounded. (Only
FP4 blocks of zeros get another scale where theirs is out of the kernels' range.)

A record is the panels of w1 and w3, then the panels of w2. A panel is 64 rows by all columns, as tiles of 128 columns
in their order: panel p of w1 and w3 has rows 32p.. of both, panel p of w2 rows 64p... A tile is four groups of 16 rows.
Slots g and g + 8 of group r are rows 32p + 8r + g of w1 and of w3, or rows 64p + 16r + 2g and 64p + 16r + 2g + 1 of w2.
Lane 4g + t of a warp owns columns 32q + 8t .. + 7 of both slots, for each block q of 32 columns:

    FP4 group (1,088 bytes)  words [q / 2][lane][q % 2][slot half], then scale bytes [g][slot half][q]
    FP8 group (2,048 bytes)  8 codes [q][lane][slot half]; behind the four groups of a tile 16 bytes: the float32 scales
                             of slots g and of slots g + 8, and 8 zeros

The bits of an FP4 word lie so that two masks make e4m3 numbers of its eight codes (see `_PACKED_BIT`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4c.checkpoint.formats import FP4_GROUP, Encoding, decode_e8m0
from dsv4c.errors import CheckpointError

PANEL_ROWS = 64
TILE_COLUMNS = 128
FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, FP4_GROUP)
TILE_BYTES = {Encoding.FP4_GROUP: 4 * 1088, Encoding.FP8_BLOCK: 4 * 2048 + 16}
# The kernel of large steps multiplies FP4 codes by their scales in f16, exactly from 2^-26 to 2^3.
LEAST_SCALE, LARGEST_SCALE = 101, 130  # UE8M0

_CODES = 8  # of a row, that a lane takes at once


class StoredMatrix(NamedTuple):
    """A matrix [O, I] as the checkpoint has it.

    FP4: codes [O, I/2] and UE8M0 scales [O, I/32], both uint8. FP8: codes float8_e4m3fn [O, I], scales float32 or UE8M0
    bytes [O/128, I/128]. Other element types of a byte are taken for these.
    """

    codes: Tensor
    scales: Tensor


def record_bytes(encoding: Encoding, hidden: int, inner: int) -> int:
    """Bytes of one expert."""
    rows_by_columns = 2 * inner * hidden + hidden * inner
    return rows_by_columns // (PANEL_ROWS * TILE_COLUMNS) * TILE_BYTES[encoding]


def fits(encoding: Encoding, block: tuple[int, int] | None, hidden: int, inner: int) -> bool:
    """Whether experts of this storage have a packed form."""
    blocks = {Encoding.FP4_GROUP: FP4_BLOCK, Encoding.FP8_BLOCK: FP8_BLOCK}
    return blocks.get(encoding) == block and hidden % TILE_COLUMNS == 0 and inner % TILE_COLUMNS == 0


def _packed_bits(code: int) -> tuple[int, int, int, int]:
    """Where bits 0 to 3 (mantissa, exponent, exponent, sign) of code `code` of 8 lie in a packed word.

    As e4m3, the sign is bit 7, the exponent bits 4 and 3, the mantissa bit 2: the value is 2^-6 of the code's. The
    first four codes lie there in their bytes. The others take the bits in between: a shift left by 2 brings sign and
    low exponent bit into place, a rotation by 4 the other two.
    """
    if code < 4:
        return 8 * code + 2, 8 * code + 3, 8 * code + 4, 8 * code + 7
    byte = 8 * (code - 4)
    return (byte - 2) % 32, byte + 1, byte, byte + 5


_PACKED_BIT = [bit for code in range(_CODES) for bit in _packed_bits(code)]


def _bit_tables(targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A permutation of the bits of a word, as int32 tables of its low and its high half; bit i goes to targets[i]."""
    halves = torch.arange(1 << 16)
    tables = []
    for first in (0, 16):
        moved = torch.zeros_like(halves)
        for bit in range(16):
            moved |= (halves >> bit & 1) << targets[first + bit]
        tables.append(moved.to(torch.int32))
    return tables[0], tables[1]


@functools.cache
def _packing_tables() -> tuple[Tensor, Tensor]:
    return _bit_tables(_PACKED_BIT)


@functools.cache
def _unpacking_tables() -> tuple[Tensor, Tensor]:
    return _bit_tables([_PACKED_BIT.index(bit) for bit in range(32)])


def _permute_bits(words: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    flat = words.flatten()
    low, high = (torch.index_select(table, 0, half) for table, half in zip(tables, _halves(flat), strict=True))
    return low.bitwise_or_(high).view(words.shape)


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    return words & 0xFFFF, words >> 16 & 0xFFFF


def _lane_words(paired: bool, columns: int) -> tuple[Tensor, Tensor]:
    """The places in a panel of its 8-code words, [tile, group, q, g, t, half], and of the rows [group, g, half]."""
    group, g, half = torch.arange(4).view(4, 1, 1), torch.arange(8).view(1, 8, 1), torch.arange(2)
    rows = 32 * half + 8 * group + g if paired else 16 * group + 2 * g + half
    of_row = torch.arange(columns // _CODES).view(-1, 1, 4, 1, 4, 1)
    return rows.view(1, 4, 1, 8, 1, 2) * (columns // _CODES) + of_row, rows


@functools.cache
def _fp4_order(paired: bool, columns: int) -> Tensor:
    """For each int32 of a packed panel its place in the panel's source: code words by row, then scale words by row."""
    words, rows = _lane_words(paired, columns)
    tiles = columns // TILE_COLUMNS
    by_lane = words.view(tiles, 4, 2, 2, 8, 4, 2).permute(0, 1, 2, 4, 5, 3, 6).reshape(tiles, 4, -1)
    # The four scales of a row and 128 columns are one word.
    scales = PANEL_ROWS * columns // _CODES + rows.reshape(1, 4, 16) * tiles + torch.arange(tiles).view(-1, 1, 1)
    return torch.cat([by_lane, scales], 2).flatten()


@functools.cache
def _fp8_order(paired: bool, columns: int) -> Tensor:
    """For each int64 of a packed panel its place in the panel's source: code words by row, scale pairs, one zero."""
    words, _ = _lane_words(paired, columns)
    tiles = columns // TILE_COLUMNS
    first = PANEL_ROWS * columns // _CODES
    pairs = first + torch.arange(tiles).view(-1, 1)
    return torch.cat([words.reshape(tiles, -1), pairs, torch.full_like(pairs, first + tiles)], 1).flatten()


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty(int(order.max()) + 1, dtype=torch.int64)
    inverse[order] = torch.arange(len(order))
    return inverse


@functools.cache
def _inverse_order(encoding: Encoding, paired: bool, columns: int) -> Tensor:
    return _inverse((_fp4_order if encoding is Encoding.FP4_GROUP else _fp8_order)(paired, columns))


def pack_fp4(
    gate: StoredMatrix, up: StoredMatrix, down: StoredMatrix, names: tuple[str, str, str] = ("w1", "w3", "w2")
) -> Tensor:
    """The record of an expert, uint8 [record_bytes]: gate (w1) and up (w3) [I, D], down (w2) [D, I].

    Raises CheckpointError, with the matrix of `names`, where a scale is too small or too large for the kernels.
    """
    inner, hidden = gate.codes.shape[0], down.codes.shape[0]
    _require_fit(Encoding.FP4_GROUP, hidden, inner)
    gate, up, down = (
        StoredMatrix(matrix.codes, _usable_scales(matrix, name))
        for matrix, name in zip((gate, up, down), names, strict=True)
    )
    record = torch.empty(record_bytes(Encoding.FP4_GROUP, hidden, inner), dtype=torch.uint8)
    words = record.view(torch.int32)
    taken = 0
    for paired, columns, panel in _panels((gate, up, down)):
        order = _fp4_order(paired, columns)
        codes = torch.cat([_bytes(part.codes).view(torch.int32).flatten() for part in panel])
        scales = [_bytes(part.scales).view(torch.int32).flatten() for part in panel]
        source = torch.cat([_permute_bits(codes, _packing_tables()), *scales])
        torch.index_select(source, 0, order, out=words[taken : taken + len(order)])
        taken += len(order)
    assert taken == len(words)
    return record


def unpack_fp4(record: Tensor, hidden: int, inner: int) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
    """(gate, up, down) of a record: codes and scales as uint8."""
    words = _bytes(record).view(torch.int32)
    assert len(words) * 4 == record_bytes(Encoding.FP4_GROUP, hidden, inner), (record.shape, hidden, inner)
    matrices = []
    for paired, rows, columns, source in _sources(Encoding.FP4_GROUP, words, hidden, inner):
        split = PANEL_ROWS * columns // _CODES
        codes = _permute_bits(source[:, :split], _unpacking_tables()).view(torch.uint8)
        scales = source[:, split:].contiguous().view(torch.uint8)
        matrices += [
            StoredMatrix(half.reshape(rows, columns // 2), half_scales.reshape(rows, columns // FP4_GROUP))
            for half, half_scales in zip(_split(codes, paired), _split(scales, paired), strict=True)
        ]
    return matrices[0], matrices[1], matrices[2]


def pack_fp8(gate: StoredMatrix, up: StoredMatrix, down: StoredMatrix) -> Tensor:
    """The record of an expert, uint8 [record_bytes]: gate (w1) and up (w3) [I, D], down (w2) [D, I]."""
    inner, hidden = gate.codes.shape[0], down.codes.shape[0]
    _require_fit(Encoding.FP8_BLOCK, hidden, inner)
    record = torch.empty(record_bytes(Encoding.FP8_BLOCK, hidden, inner), dtype=torch.uint8)
    words = record.view(torch.int64)
    zero = torch.zeros(1, dtype=torch.int64)
    taken = 0
    for paired, columns, panel in _panels((gate, up, down)):
        order = _fp8_order(paired, columns)
        codes = [_bytes(part.codes).view(torch.int64).flatten() for part in panel]
        # One row of scales a matrix; w2 has the same for both halves of the slots.
        first, second = _float_scales(panel[0].scales), _float_scales(panel[-1].scales)
        pairs = torch.stack([first, second], -1).view(torch.int64).flatten()
        torch.index_select(torch.cat([*codes, pairs, zero]), 0, order, out=words[taken : taken + len(order)])
        taken += len(order)
    assert taken == len(words)
    return record


def unpack_fp8(record: Tensor, hidden: int, inner: int) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
    """(gate, up, down) of a record: codes float8_e4m3fn, scales float32."""
    words = _bytes(record).view(torch.int64)
    assert len(words) * 8 == record_bytes(Encoding.FP8_BLOCK, hidden, inner), (record.shape, hidden, inner)
    matrices = []
    for paired, rows, columns, source in _sources(Encoding.FP8_BLOCK, words, hidden, inner):
        split = PANEL_ROWS * columns // _CODES
        codes = source[:, :split].contiguous().view(torch.float8_e4m3fn)
        pairs = source[:, split:-1].contiguous().view(torch.float32).view(len(source), -1, 2)
        panels_of_block = FP8_BLOCK[0] * len(source) // rows
        matrices += [
            StoredMatrix(half.reshape(rows, columns), pairs[::panels_of_block, :, which].contiguous())
            for which, half in enumerate(_split(codes, paired))
        ]
    return matrices[0], matrices[1], matrices[2]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _float_scales(scales: Tensor) -> Tensor:
    return scales.flatten() if scales.dtype is torch.float32 else decode_e8m0(scales).flatten()


def _require_fit(encoding: Encoding, hidden: int, inner: int) -> None:
    block = FP4_BLOCK if encoding is Encoding.FP4_GROUP else FP8_BLOCK
    if not fits(encoding, block, hidden, inner):
        raise CheckpointError(f"experts of {inner} rows and {hidden} columns have no packed form: no multiples of 128")


def _panels(
    matrices: tuple[StoredMatrix, StoredMatrix, StoredMatrix],
) -> Iterator[tuple[bool, int, tuple[StoredMatrix, ...]]]:
    """(paired, columns, parts) of every panel of a record: 32 rows of gate and of up, then 64 rows of down.

    The scales of a part are those of its rows, one row of them where a block has more.
    """
    gate, up, down = matrices
    inner, hidden = gate.codes.shape[0], down.codes.shape[0]
    half = PANEL_ROWS // 2
    for row in range(0, inner, half):
        yield True, hidden, (_rows(gate, row, half), _rows(up, row, half))
    for row in range(0, hidden, PANEL_ROWS):
        yield False, inner, (_rows(down, row, PANEL_ROWS),)


def _rows(matrix: StoredMatrix, first: int, count: int) -> StoredMatrix:
    block = matrix.codes.shape[0] // matrix.scales.shape[0]
    scales = matrix.scales[first // block : -(-(first + count) // block)]
    return StoredMatrix(matrix.codes[first : first + count], scales)


def _sources(encoding: Encoding, words: Tensor, hidden: int, inner: int) -> Iterator[tuple[bool, int, int, Tensor]]:
    """(paired, rows of a matrix, columns, panels as `_panels` had them, [panel, words]) of w1 and w3, then of w2."""
    taken = 0
    for paired, rows, columns in ((True, inner, hidden), (False, hidden, inner)):
        inverse = _inverse_order(encoding, paired, columns)
        panels = (2 if paired else 1) * rows // PANEL_ROWS
        size = columns // TILE_COLUMNS * TILE_BYTES[encoding] // words.element_size()
        yield paired, rows, columns, words[taken : taken + panels * size].view(panels, size).index_select(1, inverse)
        taken += panels * size


def _split(panels: Tensor, paired: bool) -> tuple[Tensor, ...]:
    """The parts of every panel: of gate and up, or of down alone."""
    return panels.chunk(2, 1) if paired else (panels,)


def _usable_scales(matrix: StoredMatrix, name: str) -> Tensor:
    """The scales of an FP4 matrix, as uint8. Blocks of zeros, which they do not change, get one that kernels can use.

    Raises CheckpointError, with the matrix's name, where they cannot use the scale of another block.
    """
    scales = _bytes(matrix.scales)
    unusable = (scales < LEAST_SCALE) | (scales > LARGEST_SCALE)
    if not unusable.any():
        return scales
    blocks = _bytes(matrix.codes).view(*scales.shape, FP4_GROUP // 2)
    wrong = (unusable & ((blocks & 0x77) != 0).any(2)).nonzero()
    if len(wrong):
        row, block = (int(index) for index in wrong[0])
        raise CheckpointError(
            f"`{name}` cannot be packed: the scale of row {row}, columns {block * FP4_GROUP} to "
            f"{(block + 1) * FP4_GROUP - 1}, is 2^{int(scales[row, block]) - 127}; the kernels are exact from "
            f"2^{LEAST_SCALE - 127} to 2^{LARGEST_SCALE - 127}; blocks like it: {len(wrong)}",
            hint='set `layout = "checkpoint"` in the table `[experts]` of the recipe: kernels of several launches, for '
            "experts as the checkpoint has them",
        )
    return scales.clamp(LEAST_SCALE, LARGEST_SCALE)
