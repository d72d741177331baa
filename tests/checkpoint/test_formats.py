"""FP8, FP4 and UE8M0: the codes one by one, blocks that do not divide, and the released bytes."""

from pathlib import Path

import pytest
import torch

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.checkpoint.formats import (
    FP4_VALUES,
    Encoding,
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8,
    pack_fp4,
    quantize_fp4,
    quantize_fp8,
    unpack_fp4,
)
from dsv4c.errors import CheckpointError
from tests.fixtures import TINY_OFFICIAL

TRAINED = Path(__file__).parents[3] / "shared" / "data" / "tiny-v4"


def test_e8m0_bytes_are_exponents() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(codes)
    assert values[127] == 1.0 and values[130] == 8.0 and values[0] == 2.0**-127 and values[254] == 2.0**127
    assert torch.isnan(values[255]) and not torch.isnan(values[:255]).any()
    # torch's own decoding; it has byte 0 as 2^-127 too.
    torch.testing.assert_close(values, codes.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(decode_e8m0(codes.view(torch.float8_e8m0fnu))[:255], values[:255])
    with pytest.raises(CheckpointError, match="exponent bytes"):
        decode_e8m0(torch.ones(3))


@pytest.mark.parametrize("shape", [(1, 1), (64, 256), (128, 128), (129, 127), (300, 130)])
@pytest.mark.parametrize("block", [(128, 128), (32, 64), (1, 7)])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
def test_fp8_blocks(shape: tuple[int, int], block: tuple[int, int], scale_dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    exponents = torch.randint(110, 140, grid, generator=rng, dtype=torch.uint8)
    scales = exponents if scale_dtype is torch.uint8 else exponents.view(torch.float8_e8m0fnu)
    if scale_dtype is torch.float32:
        scales = decode_e8m0(exponents) * 1.3
    each = scales.float() if scale_dtype is not torch.uint8 else decode_e8m0(scales)
    rows = torch.arange(shape[0])[:, None] // block[0]
    columns = torch.arange(shape[1])[None, :] // block[1]
    expected = codes.float() * each[rows, columns]
    assert torch.equal(dequantize_fp8(codes, scales, block), expected)
    assert torch.equal(dequantize_fp8(codes.view(torch.uint8), scales, block), expected)


def test_fp8_refuses_what_does_not_fit() -> None:
    codes = torch.zeros(64, 256, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"scales have shape \(1, 1\), expected \(1, 2\)"):
        dequantize_fp8(codes, torch.zeros(1, 1, dtype=torch.uint8), (128, 128))
    with pytest.raises(CheckpointError, match="FP8 codes are"):
        dequantize_fp8(codes.float(), torch.zeros(1, 2, dtype=torch.uint8), (128, 128))


def test_fp8_quantisation_rule() -> None:
    # 448 * 2^k fits scale 2^k exactly; the next float above needs 2^(k+1).
    values = torch.zeros(2, 6)
    values[0, 0], values[0, 4] = 448.0, -448.0 * 2.0**-106
    values[0, 2] = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    codes, scales = quantize_fp8(values, (2, 2))
    assert scales.tolist() == [[127, 128, 127 - 106]]
    assert codes.dtype is torch.float8_e4m3fn and codes.float()[0, 0] == 448.0 and codes.float()[0, 2] == 224.0
    # An all-zero block has the smallest scale, not a zero one.
    assert quantize_fp8(torch.zeros(1, 1), (128, 128))[1].item() == 127 - 120


@pytest.mark.parametrize("shape", [(5, 3), (64, 256), (130, 129)])
def test_fp8_round_trip(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize_fp8(values, (128, 128))
    restored = dequantize_fp8(codes, scales, (128, 128))
    # e4m3 has three mantissa bits: half a step is 1/16 of the value, or of the smallest normal of the block.
    smallest = 2.0**-6 * decode_e8m0(scales).max()
    assert ((restored - values).abs() <= values.abs().clamp_min(smallest) / 16).all()
    # Once more loses nothing; a scale may halve where the block's largest value was rounded down.
    again_codes, again_scales = quantize_fp8(restored, (128, 128))
    assert torch.equal(dequantize_fp8(again_codes, again_scales, (128, 128)), restored)


def test_fp4_codes_and_nibble_order() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 2)
    packed = pack_fp4(codes)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]
    assert torch.equal(unpack_fp4(packed), codes)
    values = dequantize_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :16].tolist() == [2 * value for value in FP4_VALUES]
    assert torch.signbit(values[0, 8])
    half = dequantize_fp4(packed, torch.tensor([[0.75]]))
    assert half[0, 7] == 4.5


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = torch.zeros(1, 32)
    ties[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties[0, 8:16] = -ties[0, :8]
    ties[0, 16] = -0.0
    ties[0, 17] = -0.1
    packed, scales = quantize_fp4(ties)
    assert scales.item() == 127
    codes = unpack_fp4(packed)[0].tolist()
    assert codes[:8] == [0, 2, 2, 4, 4, 6, 6, 7]
    assert codes[8:16] == [8, 10, 10, 12, 12, 14, 14, 15]
    assert codes[16] == 8 and codes[17] == 8 and codes[18] == 0


def test_fp4_nearest_by_search() -> None:
    values = torch.randn(16, 96, generator=torch.Generator().manual_seed(2))
    packed, scales = quantize_fp4(values)
    restored = dequantize_fp4(packed, scales)
    each = decode_e8m0(scales).repeat_interleave(32, dim=1)
    grid = torch.tensor(FP4_VALUES)
    best = ((values / each)[..., None] - grid).abs().amin(dim=-1)
    assert torch.equal((restored - values).abs() / each, best)
    assert (values.abs() / each).max() <= 6 and (values.view(16, 3, 32).abs().amax(2) / decode_e8m0(scales)).min() > 3


def test_fp4_partial_group_reads() -> None:
    codes = torch.full((2, 40), 2, dtype=torch.uint8)
    values = dequantize_fp4(pack_fp4(codes), torch.tensor([[127, 129], [128, 126]], dtype=torch.uint8))
    assert values[:, [0, 31, 32, 39]].tolist() == [[1.0, 1.0, 4.0, 4.0], [2.0, 2.0, 0.5, 0.5]]


def test_quantisation_refusals() -> None:
    with pytest.raises(CheckpointError, match="divisible by 32, got 48"):
        quantize_fp4(torch.zeros(1, 48))
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_fp8(torch.tensor([[float("nan")]]), (128, 128))
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_fp4(torch.full((1, 32), float("inf")))
    with pytest.raises(CheckpointError, match="is odd"):
        pack_fp4(torch.zeros(1, 3, dtype=torch.uint8))


@pytest.mark.skipif(not TRAINED.is_dir(), reason=f"{TRAINED} (the bf16 form of the trained model) is missing")
def test_released_bytes_are_reproduced() -> None:
    trained, released = open_checkpoint(TRAINED), open_checkpoint(TINY_OFFICIAL)
    encodings = set()
    for name, info in released.weights.items():
        values = trained.values(name)
        encodings.add(info.encoding)
        if info.encoding is Encoding.FP8_BLOCK:
            assert info.block is not None
            codes, scales = quantize_fp8(values, info.block)
            codes = codes.view(torch.uint8)
        elif info.encoding is Encoding.FP4_GROUP:
            codes, scales = quantize_fp4(values)
        else:
            assert torch.equal(values, released.values(name)), name
            continue
        stored_scales = released.scales(name)
        assert stored_scales is not None
        assert torch.equal(codes, released.codes(name).view(torch.uint8)), name
        assert torch.equal(scales, stored_scales), name
    assert encodings == {Encoding.F32, Encoding.BF16, Encoding.FP8_BLOCK, Encoding.FP4_GROUP, Encoding.INT64}
