"""Number formats of weights: bf16/fp16/fp32, FP8 e4m3 with a scale per block, FP4 e2m1 with a scale per 32 inputs,
and INT8 and INT4 with a float16 scale per group of inputs, which builds make and checkpoints do not hold.

A UE8M0 scale is an exponent byte: value = 2^(byte - 127). Scales always multiply.
"""

import enum

import torch
from torch import Tensor

from dsv4c.errors import CheckpointError

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_GROUP = 32
INT8_MAX = 127
INT4_MIN, INT4_MAX = -8, 7
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
    INT8_GROUP = "int8_group"
    INT4_GROUP = "int4_group"
    INT64 = "int64"
    INT32 = "int32"  # tables that a build makes


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


def fp8_scales(values: Tensor, block: tuple[int, int]) -> Tensor:
    """The smallest power of two with amax / scale <= 448 in each block, as UE8M0 bytes [ceil(O/bo), ceil(I/bi)]."""
    return (_scale_exponents(_tiles(values, block).abs().amax(dim=(1, 3)), FP8_MAX) + E8M0_BIAS).to(torch.uint8)


def _tiles(values: Tensor, block: tuple[int, int]) -> Tensor:
    """[O, I] -> [ceil(O/bo), bo, ceil(I/bi), bi]; edge blocks are padded with zeros."""
    rows, columns = values.shape
    block_rows, block_columns = block
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block_columns, 0, -rows % block_rows))
    return padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns)


def encode_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [O, I] over its UE8M0 scales -> the nearest e4m3 codes, ties to even; beyond 448 the largest."""
    rows, columns = values.shape
    tiles = _tiles(values, block)
    scaled = (tiles / decode_e8m0(scales)[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    flat = scaled.view(tiles.shape[0] * tiles.shape[1], -1)
    return flat[:rows, :columns].to(torch.float8_e4m3fn).contiguous()


def quantize_fp8(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """float32 [O, I] -> (codes float8_e4m3fn [O, I], UE8M0 scales uint8 [ceil(O/bo), ceil(I/bi)]).

    Scale = smallest power of two with amax / scale <= 448 in each block; edge blocks count as padded with zeros.
    Raises CheckpointError on NaN or infinity.
    """
    scales = fp8_scales(values, block)
    return encode_fp8(values, scales, block), scales


def _groups(values: Tensor, group: int, what: str) -> Tensor:
    """[O, I] -> [O, I/group, group]. Raises CheckpointError where the group does not divide I."""
    rows, columns = values.shape
    if columns % group:
        raise CheckpointError(f"{what} needs an input size divisible by {group}, got {columns}")
    return values.float().view(rows, columns // group, group)


def fp4_scales(values: Tensor) -> Tensor:
    """The smallest power of two with amax / scale <= 6 in each group of 32 inputs, as UE8M0 bytes [O, I/32]."""
    amax = _groups(values, FP4_GROUP, "FP4").abs().amax(dim=-1)
    return (_scale_exponents(amax, FP4_MAX) + E8M0_BIAS).to(torch.uint8)


def encode_fp4(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] over its UE8M0 scales -> the nearest e2m1 codes, ties to the even one, packed [O, I/2].

    Beyond 6 the largest; zero keeps its sign.
    """
    groups = _groups(values, FP4_GROUP, "FP4")
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
    return pack_fp4(codes.view(values.shape))


def quantize_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [O, I], I a multiple of 32 -> (packed uint8 [O, I/2], UE8M0 scales uint8 [O, I/32]).

    Scale = smallest power of two with amax / scale <= 6 in each group; ties go to the even code; zero keeps its sign.
    Raises CheckpointError on NaN, infinity, or I not a multiple of 32.
    """
    scales = fp4_scales(values)
    return encode_fp4(values, scales), scales


def _float16_scales(exact: Tensor) -> Tensor:
    """Scales rounded to float16, away from zero, so that no value is cut off; the sign is kept."""
    if not bool(torch.isfinite(exact).all()):
        raise CheckpointError("a weight holds NaN or infinity and cannot be quantised")
    scales = exact.to(torch.float16)
    # The next float16 away from zero is the next bit pattern, of either sign. 0 becomes the smallest one: a group of
    # zeros may have any scale but 0, which has no quotients.
    short = (scales.float().abs() < exact.abs()) | (scales == 0)
    scales = (scales.view(torch.int16) + short.to(torch.int16)).view(torch.float16)
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError("a weight is too large for float16 scales and cannot be quantised to integers")
    return scales


def int8_scales(values: Tensor, group: int, steps: float = INT8_MAX) -> Tensor:
    """amax / steps of each group of inputs, float16 [O, I/group]."""
    return _float16_scales(_groups(values, group, "INT8").abs().amax(dim=-1) / steps)


def encode_int8(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] over float16 scales [O, G] -> codes int8 [O, I] in -127..127, ties to even."""
    groups = _groups(values, values.shape[1] // scales.shape[1], "INT8")
    codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8).view(values.shape)


def int4_scales(values: Tensor, group: int, steps: float = -INT4_MIN) -> Tensor:
    """|largest| / steps of each group of inputs, float16 [O, I/group], with the sign that makes its code negative.

    There is a code -8 and none for 8: the largest value of a group gets it, and the steps are an eighth finer than
    with codes of -7..7 (11 % less error on the experts of the trained test model).
    """
    groups = _groups(values, group, "INT4")
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    return _float16_scales(largest / -steps)


def encode_int4(values: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] over float16 scales [O, G] -> two's-complement codes in -8..7, ties to even, packed [O, I/2]."""
    groups = _groups(values, values.shape[1] // scales.shape[1], "INT4")
    codes = (groups / scales.float().unsqueeze(-1)).round_().clamp_(INT4_MIN, INT4_MAX)
    return pack_fp4((codes.to(torch.int8).view(torch.uint8) & 0xF).view(values.shape))


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes int8 [O, I] and float16 scales [O, G], one per I/G inputs -> float32 [O, I]."""
    grouped = codes.float().view(*scales.shape, -1)
    return (grouped * scales.float().unsqueeze(-1)).view(codes.shape)


def dequantize_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Packed uint8 [O, I/2], low nibble = even column, and float16 scales [O, G] -> float32 [O, I]."""
    codes = unpack_fp4(packed)
    return dequantize_int8((codes ^ 8).to(torch.int8) - 8, scales)
