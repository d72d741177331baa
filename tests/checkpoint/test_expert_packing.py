"""The packed form of an expert: where each code lies, bit for bit, and back."""

import time

import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.expert_packing import (
    LARGEST_SCALE,
    LEAST_SCALE,
    TILE_BYTES,
    StoredMatrix,
    pack_fp4,
    pack_fp8,
    record_bytes,
    unpack_fp4,
    unpack_fp8,
)
from dsv4c.checkpoint.formats import Encoding, decode_e8m0
from dsv4c.checkpoint.formats import unpack_fp4 as nibbles
from dsv4c.errors import CheckpointError

SHAPES = [(128, 128), (256, 128), (128, 384), (384, 256)]  # hidden, inner
Expert = tuple[StoredMatrix, StoredMatrix, StoredMatrix]


def _fp4_expert(hidden: int, inner: int, seed: int = 0) -> Expert:
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> StoredMatrix:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=random)
        scales = torch.randint(
            LEAST_SCALE, LARGEST_SCALE + 1, (rows, columns // 32), dtype=torch.uint8, generator=random
        )
        return StoredMatrix(codes, scales)

    return matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)


def _fp8_expert(hidden: int, inner: int) -> Expert:
    random = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> StoredMatrix:
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random)
        scales = torch.randint(0, 255, (rows // 128, columns // 128), dtype=torch.uint8, generator=random)
        return StoredMatrix(codes, scales)

    return matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)


def _slot_row(paired: bool, panel: int, group: int, slot: int) -> tuple[int, int]:
    """(matrix of the panel, row in it) of a slot."""
    if paired:
        return slot // 8, 32 * panel + 8 * group + slot % 8
    return 0, 64 * panel + 16 * group + 2 * (slot % 8) + slot // 8


def _packed_word(codes: Tensor) -> int:
    """Eight 4-bit codes as one word, bit by bit as the format says."""
    word = 0
    for e, code in enumerate(codes.tolist()):
        m0, m1, m2, sign = (code >> bit & 1 for bit in range(4))
        if e < 4:
            word |= sign << 8 * e + 7 | m2 << 8 * e + 4 | m1 << 8 * e + 3 | m0 << 8 * e + 2
        else:
            j = e - 4
            word |= sign << 8 * j + 5 | m2 << 8 * j | m1 << 8 * j + 1 | m0 << (8 * j - 2) % 32
    return word


def _panels(matrices: Expert):  # type: ignore[no-untyped-def]
    """(paired, panel, its matrices, tile count) in the order of a record."""
    gate, up, down = matrices
    inner, hidden = gate.codes.shape[0], down.codes.shape[0]
    for panel in range(inner // 32):
        yield True, panel, (gate, up), hidden // 128
    for panel in range(hidden // 64):
        yield False, panel, (down,), inner // 128


@pytest.mark.parametrize(("hidden", "inner"), SHAPES[:2])
def test_every_fp4_code_and_scale_lies_where_the_format_says(hidden: int, inner: int) -> None:
    matrices = _fp4_expert(hidden, inner)
    record = pack_fp4(*matrices).numpy().tobytes()
    start = 0
    for paired, panel, parts, tiles in _panels(matrices):
        codes = [nibbles(part.codes) for part in parts]
        for tile in range(tiles):
            for group in range(4):
                for slot in range(16):
                    which, row = _slot_row(paired, panel, group, slot)
                    g, half = slot % 8, slot // 8
                    for q in range(4):
                        for t in range(4):
                            column = 128 * tile + 32 * q + 8 * t
                            at = start + (q >> 1) * 512 + (4 * g + t) * 16 + (q & 1) * 8 + half * 4
                            found = int.from_bytes(record[at : at + 4], "little")
                            assert found == _packed_word(codes[which][row, column : column + 8])
                        scale = record[start + 1024 + g * 8 + half * 4 + q]
                        assert scale == parts[which].scales[row, 4 * tile + q]
                start += 1088
    assert start == len(record) == record_bytes(Encoding.FP4_GROUP, hidden, inner)


def test_two_masks_make_e4m3_numbers_of_a_word() -> None:
    gate, up, down = _fp4_expert(128, 128)
    word = int.from_bytes(pack_fp4(gate, up, down)[:4].numpy().tobytes(), "little")
    first = word & 0x9C9C9C9C
    rotated = (word << 4 | word >> 28) & 0xFFFFFFFF
    second = (word << 2) & 0x88888888 | rotated & 0x14141414
    found = torch.tensor([*first.to_bytes(4, "little"), *second.to_bytes(4, "little")], dtype=torch.uint8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = nibbles(gate.codes)[0, :8].int()
    expected = torch.where(codes > 7, -1.0, 1.0) * values[codes & 7] * 2.0**-6
    assert torch.equal(found.view(torch.float8_e4m3fn).float(), expected)


@pytest.mark.parametrize(("hidden", "inner"), SHAPES[:2])
def test_every_fp8_code_and_scale_lies_where_the_format_says(hidden: int, inner: int) -> None:
    matrices = _fp8_expert(hidden, inner)
    record = pack_fp8(*matrices)
    start = 0
    for paired, panel, parts, tiles in _panels(matrices):
        for tile in range(tiles):
            for group in range(4):
                for slot in range(16):
                    which, row = _slot_row(paired, panel, group, slot)
                    for q in range(4):
                        for t in range(4):
                            column = 128 * tile + 32 * q + 8 * t
                            at = start + group * 2048 + q * 512 + (4 * (slot % 8) + t) * 16 + slot // 8 * 8
                            assert torch.equal(record[at : at + 8], parts[which].codes[row, column : column + 8])
            block = (32 if paired else 64) * panel // 128
            scales = [decode_e8m0(part.scales[block, tile]) for part in (parts[0], parts[-1])]
            expected = torch.stack([*scales, torch.tensor(0.0), torch.tensor(0.0)])
            assert torch.equal(record[start + 8192 : start + 8208].view(torch.float32), expected)
            start += TILE_BYTES[Encoding.FP8_BLOCK]
    assert start == len(record)


@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
def test_unpacking_gives_the_fp4_bytes_back(hidden: int, inner: int) -> None:
    matrices = _fp4_expert(hidden, inner)
    for before, after in zip(matrices, unpack_fp4(pack_fp4(*matrices), hidden, inner), strict=True):
        assert torch.equal(before.codes, after.codes)
        assert torch.equal(before.scales, after.scales)


@pytest.mark.parametrize(("hidden", "inner"), SHAPES)
@pytest.mark.parametrize("floats", [False, True])
def test_unpacking_gives_the_fp8_bytes_back(hidden: int, inner: int, floats: bool) -> None:
    matrices = _fp8_expert(hidden, inner)
    if floats:
        gate, up, down = (StoredMatrix(codes, torch.rand(scales.shape)) for codes, scales in matrices)
        matrices = (gate, up, down)
    for before, after in zip(matrices, unpack_fp8(pack_fp8(*matrices), hidden, inner), strict=True):
        assert torch.equal(before.codes, after.codes.view(torch.uint8))
        assert torch.equal(before.scales if floats else decode_e8m0(before.scales), after.scales)


def test_element_types_of_a_checkpoint() -> None:
    matrices = _fp4_expert(128, 128)
    typed = [
        StoredMatrix(codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu))
        for codes, scales in matrices
    ]
    assert torch.equal(pack_fp4(*typed), pack_fp4(*matrices))
    matrices = _fp8_expert(128, 128)
    typed = [
        StoredMatrix(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)) for codes, scales in matrices
    ]
    assert torch.equal(pack_fp8(*typed), pack_fp8(*matrices))


@pytest.mark.parametrize(("scale", "power"), [(LEAST_SCALE - 1, -27), (LARGEST_SCALE + 1, 4), (0, -127), (255, 128)])
def test_scales_out_of_range_are_refused_with_their_place(scale: int, power: int) -> None:
    gate, up, down = _fp4_expert(256, 128)
    up.scales[5, 6] = scale
    up.codes[5, 96:112] = 0x01
    with pytest.raises(CheckpointError) as caught:
        pack_fp4(gate, up, down, ("a.w1", "a.w3", "a.w2"))
    assert f"`a.w3` cannot be packed: the scale of row 5, columns 192 to 223, is 2^{power}; " in str(caught.value)
    assert "the kernels are exact from 2^-26 to 2^3" in str(caught.value)
    assert 'layout = "checkpoint"' in str(caught.value.hint)


def test_scales_of_zeros_may_lie_anywhere() -> None:
    gate, up, down = _fp4_expert(128, 128)
    down.scales[7] = torch.tensor([120, 7, 250, 130], dtype=torch.uint8)
    # Zeros of both signs.
    down.codes[7, 16:48] = torch.tensor([0x00, 0x80, 0x08, 0x88], dtype=torch.uint8).repeat(8)
    unpacked = unpack_fp4(pack_fp4(gate, up, down), 128, 128)[2]
    assert torch.equal(unpacked.codes, down.codes)
    assert unpacked.scales[7].tolist() == [120, LEAST_SCALE, LARGEST_SCALE, 130]
    down.codes[7, 20] = 0x10
    with pytest.raises(CheckpointError, match="row 7, columns 32 to 63, is 2\\^-120"):
        pack_fp4(gate, up, down)


def test_other_widths_are_refused() -> None:
    gate, up, down = _fp4_expert(128, 64)
    with pytest.raises(CheckpointError, match="no multiples of 128"):
        pack_fp4(gate, up, down)


@pytest.mark.slow
def test_packing_keeps_up_with_a_disk() -> None:
    matrices = _fp4_expert(4096, 2048)
    pack_fp4(*matrices)
    start = time.perf_counter()
    record = pack_fp4(*matrices)
    assert len(record) / (time.perf_counter() - start) > 100e6
