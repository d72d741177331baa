"""Quantising weights in a build: the rules against plain Python, searches, and values at the edges of the formats."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4c.checkpoint.formats import (
    Encoding,
    decode_e8m0,
    dequantize_int4,
    dequantize_int8,
    int4_scales,
    int8_scales,
    pack_fp4,
    quantize_fp4,
    quantize_fp8,
)
from dsv4c.checkpoint.quantization import Quantization, bands, dequantize, quantize
from dsv4c.errors import CheckpointError

FORMATS = [
    (Encoding.FP8_BLOCK, (128, 128)),
    (Encoding.FP8_BLOCK, (40, 24)),
    (Encoding.FP4_GROUP, (1, 32)),
    (Encoding.INT8_GROUP, (1, 64)),
    (Encoding.INT4_GROUP, (1, 32)),
    (Encoding.INT4_GROUP, (1, 64)),
]


def values_of(rows: int = 37, columns: int = 192, seed: int = 0) -> Tensor:
    """Heavy tails, so that scales matter; one row of zeros."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=rng) ** 3 * 0.02
    values[3] = 0
    return values


def relative_error(values: Tensor, how: Quantization) -> float:
    restored = dequantize(*quantize(values, how), how)
    return float((restored - values).norm() / values.norm())


@pytest.mark.parametrize("group", [32, 64])
def test_int8_by_hand(group: int) -> None:
    values = values_of()
    codes, scales = quantize(values, Quantization(Encoding.INT8_GROUP, (1, group)))
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    assert scales.shape == (37, 192 // group)
    for row, run in ((0, 0), (3, 1), (36, 192 // group - 1)):
        part = values[row, run * group : (run + 1) * group].tolist()
        scale = float(scales[row, run])
        exact = max(map(abs, part)) / 127
        # The float16 at or just above the exact scale.
        assert exact <= scale <= max(exact * (1 + 2**-10), 2.0**-24)
        assert codes[row, run * group : (run + 1) * group].tolist() == [round(value / scale) for value in part]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int4_gives_its_lowest_code_to_the_largest_value(sign: float) -> None:
    values = values_of() * sign
    packed, scales = quantize(values, Quantization(Encoding.INT4_GROUP, (1, 32)))
    assert packed.dtype == torch.uint8 and packed.shape == (37, 96) and scales.shape == (37, 6)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).tolist()
    codes = [[nibble - 16 if nibble > 7 else nibble for nibble in row] for row in nibbles]
    for row in (0, 3, 36):
        for run in range(6):
            part = values[row, 32 * run : 32 * run + 32].tolist()
            scale = float(scales[row, run])
            wanted = [max(-8, min(7, round(value / scale))) for value in part]
            assert codes[row][32 * run : 32 * run + 32] == wanted
            if any(part):
                largest = max(part, key=abs)
                assert scale * largest < 0 and wanted[part.index(largest)] == -8
            assert part.count(0.0) <= wanted.count(0)


def test_integers_decode_as_code_times_scale() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(1, 4)  # [1, 64]
    scales = torch.tensor([[0.5, -2.0]], dtype=torch.float16)
    wanted = torch.cat([codes[0, :32] * 0.5, codes[0, 32:] * -2.0]).unsqueeze(0)
    assert torch.equal(dequantize_int8(codes, scales), wanted)
    assert torch.equal(dequantize_int4(pack_fp4(codes.view(torch.uint8) & 15), scales), wanted)


@pytest.mark.parametrize(("encoding", "block"), FORMATS)
def test_search_is_never_worse_in_any_block(encoding: Encoding, block: tuple[int, int]) -> None:
    values = values_of()
    errors = []
    for search in (False, True):
        how = Quantization(encoding, block, search)
        squares = (dequantize(*quantize(values, how), how) - values).double().square()
        padded = torch.nn.functional.pad(squares, (0, -192 % block[1], 0, -37 % block[0]))
        tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
        errors.append(tiles.sum((1, 3)))
    nearest, searched = errors
    assert bool((searched <= nearest * (1 + 1e-5)).all())
    if encoding in (Encoding.FP4_GROUP, Encoding.INT4_GROUP):
        assert float(searched.sum()) < float(nearest.sum())


def test_rules_of_the_released_form_without_a_search() -> None:
    values = values_of()
    for encoding, block, (codes, scales) in (
        (Encoding.FP8_BLOCK, (128, 128), quantize_fp8(values, (128, 128))),
        (Encoding.FP4_GROUP, (1, 32), quantize_fp4(values)),
    ):
        found = quantize(values, Quantization(encoding, block))
        assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(found[1], scales)


def test_a_searched_fp8_scale_saturates() -> None:
    """One value needs a scale twice as large as suits 16,383 others, which it makes subnormal: better cut off."""
    values = torch.full((128, 128), 1.125 * 2.0**-6)
    values[0, 0] = 448.1
    how = Quantization(Encoding.FP8_BLOCK, (128, 128), search=True)
    codes, scales = quantize(values, how)
    assert decode_e8m0(scales).item() == 1.0
    assert float(dequantize(codes, scales, how)[0, 0]) == 448.0


@pytest.mark.parametrize(("encoding", "block"), FORMATS)
def test_bands_change_nothing(encoding: Encoding, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    values, how = values_of(400, 192), Quantization(encoding, block, True)
    whole = quantize(values, how)
    monkeypatch.setattr("dsv4c.checkpoint.quantization._BAND_VALUES", 50 * 192)
    assert len(bands(values, how)) > 2 and torch.equal(torch.cat(bands(values, how)), values)
    for a, b in zip(whole, quantize(values, how), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("encoding", "block"), FORMATS)
@pytest.mark.parametrize("search", [False, True])
def test_one_result_for_any_number_of_threads(encoding: Encoding, block: tuple[int, int], search: bool) -> None:
    values, how = values_of(400, 384), Quantization(encoding, block, search)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append([part.view(torch.uint8) for part in quantize(values, how)])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("encoding", "block"), FORMATS)
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-30, 3e-7, 1e-4, 1e4])
def test_any_magnitude_is_finite(encoding: Encoding, block: tuple[int, int], search: bool, magnitude: float) -> None:
    values = values_of().sign() * magnitude
    how = Quantization(encoding, block, search)
    restored = dequantize(*quantize(values, how), how)
    assert bool(torch.isfinite(restored).all())
    # float16 scales end at 2^-24; below, integers are worth nothing but harm nothing either.
    assert float((restored - values).abs().max()) <= float(values.abs().max())


@pytest.mark.parametrize("scales", [int8_scales, int4_scales])
def test_float16_scales_cut_nothing_off(scales: object) -> None:
    steps = 127 if scales is int8_scales else 8
    rng = np.random.default_rng(0)
    amax = torch.from_numpy(np.exp2(rng.uniform(-30, 15, (1000, 1))).astype(np.float32))
    found = scales(amax.expand(-1, 32).contiguous(), 32).float().abs()  # type: ignore[operator]
    assert bool((found * steps >= amax).all())


def test_refusals() -> None:
    int8, int4 = (Quantization(encoding, (1, 32)) for encoding in (Encoding.INT8_GROUP, Encoding.INT4_GROUP))
    with pytest.raises(CheckpointError, match="INT4 needs an input size divisible by 32, got 48"):
        quantize(torch.zeros(1, 48), int4)
    for how in (int8, int4):
        for bad in (math.nan, math.inf, -math.inf):
            with pytest.raises(CheckpointError, match="NaN or infinity"):
                quantize(torch.full((1, 32), bad), how)
    with pytest.raises(CheckpointError, match="too large for float16 scales"):
        quantize(torch.full((1, 32), 1e6), int4)
