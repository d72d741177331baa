"""Number formats of weights: bf16/fp16/fp32, FP8 e4m3 with a scale per block, FP4 e2m1 with a scale per 32 inputs.

A UE8M0 scale is an exponent byte: value = 2^(byte - 127). Scales always multiply.
"""

import enum

import torch
from torch import Tensor

from dsv4c.errors import CheckpointError

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_GROUP = 32
# Index = 4-bit code: sign in bit 3, magnitude in the rest. Code 8 is -0.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Keeps an all-zero block at a normal scale.
MIN_SCALE = 2.0**-120
E8M0_BIAS = 127


class Encoding(enum.Enum):
    """How a logical tensor is stored."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    FP8_BLOCK = "fp8_block"
    FP4_GROUP = "fp4_group"
    INT64 = "int64"


_E8M0 = torch.tensor([2.0 ** (byte - E8M0_BIAS) for byte in range(255)] + [float("nan")], dtype=torch.float32)
_FP4 = torch.tensor(FP4_VALUES, dtype=torch.float32)
# Byte -> its two values, as one 8-byte element: a gather of elements is several times faster than one of rows.
_FP4_PAIRS = torch.stack([_FP4.repeat(16), _FP4.repeat_interleave(16)], dim=1).view(torch.int64).flatten()


def decode_e8m0(bytes_u8: Tensor) -> Tensor:
    """UE8M0 bytes (uint8 or float8_e8m0fnu, any shape) -> float32 of that shape; byte 255 is NaN."""
    codes = bytes_u8.view(torch.uint8) if bytes_u8.dtype is torch.float8_e8m0fnu else bytes_u8
    if codes.dtype is not torch.uint8:
        raise CheckpointError(f"UE8M0 scales are exponent bytes, got {codes.dtype}")
    return _E8M0[codes.int()]


def _decode_scales(scales: Tensor, expected: tuple[int, int]) -> Tensor:
    if tuple(scales.shape) != expected:
        raise CheckpointError(f"scales have shape {tuple(scales.shape)}, expected {expected}")
    return scales if scales.dtype is torch.float32 else decode_e8m0(scales)


def dequantize_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 e4m3 weight -> float32 [O, I].

    codes: [O, I], float8_e4m3fn, or its bytes as uint8. scales: [ceil(O/bo), ceil(I/bi)], UE8M0 bytes (uint8 or
    float8_e8m0fnu) or float32. block: (bo, bi). Raises CheckpointError when the shapes or dtypes do not fit.
    """
    rows, columns = codes.shape
    block_rows, block_columns = block
    grid = _decode_scales(scales, (-(-rows // block_rows), -(-columns // block_columns)))
    if codes.dtype is torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    if codes.dtype is not torch.float8_e4m3fn:
        raise CheckpointError(f"FP8 codes are float8_e4m3fn or uint8, got {codes.dtype}")
    values = codes.to(torch.float32)
    # One block row at a time: no second tensor of full size.
    for index, row_scales in enumerate(grid):
        band = values[index * block_rows : (index + 1) * block_rows]
        band.mul_(row_scales.repeat_interleave(block_columns)[:columns])
    return values


def dequantize_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    """FP4 e2m1 weight -> float32 [O, I].

    packed: uint8 [O, I/2], low nibble = even column. scales: [O, ceil(I/32)], UE8M0 bytes or float32.
    Raises CheckpointError when the shapes or dtypes do not fit.
    """
    if packed.dtype is not torch.uint8:
        raise CheckpointError(f"packed FP4 codes are uint8, got {packed.dtype}")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    grid = _decode_scales(scales, (rows, -(-columns // FP4_GROUP)))
    values = _FP4_PAIRS.index_select(0, packed.flatten().int()).view(torch.float32).view(rows, columns)
    if columns % FP4_GROUP == 0:
        values.view(rows, -1, FP4_GROUP).mul_(grid.unsqueeze(-1))
    else:
        values.mul_(grid.repeat_interleave(FP4_GROUP, dim=1)[:, :columns])
    return values


def pack_fp4(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 [..., I] -> packed uint8 [..., I/2], even column in the low nibble."""
    if codes.shape[-1] % 2:
        raise CheckpointError(f"FP4 packs two columns a byte; {codes.shape[-1]} columns is odd")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Packed uint8 [..., I/2] -> 4-bit codes, uint8 [..., I]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def _scale_exponents(amax: Tensor, largest: float) -> Tensor:
    """ceil(log2(max(amax / largest, 2^-120))) as int32, exactly: log2 in float32 may differ between machines."""
    if not bool(torch.isfinite(amax).all()):
        raise CheckpointError("a weight holds NaN or infinity and cannot be quantised")
    mantissa, exponent = torch.frexp((amax / largest).clamp_min(MIN_SCALE))
    return exponent - (mantissa == 0.5).to(torch.int32)


def quantize_fp8(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """float32 [O, I] -> (codes float8_e4m3fn [O, I], UE8M0 scales uint8 [ceil(O/bo), ceil(I/bi)]).

    Scale = smallest power of two with amax / scale <= 448 in each block; edge blocks count as padded with zeros.
    Raises CheckpointError on NaN or infinity.
    """
    rows, columns = values.shape
    block_rows, block_columns = block
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block_columns, 0, -rows % block_rows))
    tiles = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns)
    exponents = _scale_exponents(tiles.abs().amax(dim=(1, 3)), FP8_MAX)
    scales = (exponents + E8M0_BIAS).to(torch.uint8)
    scaled = tiles / decode_e8m0(scales)[:, None, :, None]
    codes = scaled.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return codes.contiguous(), scales


def quantize_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [O, I], I a multiple of 32 -> (packed uint8 [O, I/2], UE8M0 scales uint8 [O, I/32]).

    Scale = smallest power of two with amax / scale <= 6 in each group; ties go to the even code; zero keeps its sign.
    Raises CheckpointError on NaN, infinity, or I not a multiple of 32.
    """
    rows, columns = values.shape
    if columns % FP4_GROUP:
        raise CheckpointError(f"FP4 needs an input size divisible by {FP4_GROUP}, got {columns}")
    groups = values.float().view(rows, columns // FP4_GROUP, FP4_GROUP)
    scales = (_scale_exponents(groups.abs().amax(dim=-1), FP4_MAX) + E8M0_BIAS).to(torch.uint8)
    magnitude = (groups / decode_e8m0(scales).unsqueeze(-1)).abs()
    # Each step is the midpoint below a code; an even code takes the tie (>=), an odd one does not (>).
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5.0
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    return pack_fp4(codes.view(rows, columns)), scales
