"""Packed experts made on the GPU, and read back tile by tile as the layout says (dsv4c/checkpoint/expert_packing.py).

Written from the layout's description alone, apart from the compiler's packing: what the kernels are compared with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.benchmarks.experts.manifest import Shape

PANEL_ROWS, TILE_COLUMNS, ROW_GROUPS = 64, 128, 4
FP4_GROUP_BYTES, FP4_CODE_BYTES, FP8_GROUP_BYTES, FP8_SCALE_BYTES = 1088, 1024, 2048, 16
# Exponents of FP4 scales: with codes of all kinds, gate and up have a standard deviation of about 1.5.
_LOWEST_EXPONENT, _EXPONENTS = 117, 5
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tile_bytes(weights: str) -> int:
    return ROW_GROUPS * FP4_GROUP_BYTES if weights == "fp4" else ROW_GROUPS * FP8_GROUP_BYTES + FP8_SCALE_BYTES


def matrix_tiles(shape: Shape) -> tuple[int, int]:
    """Tiles of w13 and of w2."""
    first = 2 * shape.inner // PANEL_ROWS * (shape.hidden // TILE_COLUMNS)
    return first, shape.hidden // PANEL_ROWS * (shape.inner // TILE_COLUMNS)


def record_bytes(shape: Shape, weights: str) -> int:
    """Of an expert, without what aligns the next one."""
    return sum(matrix_tiles(shape)) * tile_bytes(weights)


@dataclass(frozen=True)
class Records:
    """The experts of a layer, each `stride` bytes behind the one before."""

    shape: Shape
    weights: str
    data: Tensor  # u8 [E, stride]

    def unpack(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate and up [I, D], down [D, I]; float64."""
        shape = self.shape
        first, second = matrix_tiles(shape)
        size = tile_bytes(self.weights)
        record = self.data[expert]
        w13 = record[: first * size].view(-1, shape.hidden // TILE_COLUMNS, size)
        w2 = record[first * size : (first + second) * size].view(-1, shape.inner // TILE_COLUMNS, size)
        unpack = _unpack_fp4 if self.weights == "fp4" else _unpack_fp8
        # [panel, row group, half, slot, column]
        w13, w2 = unpack(w13), unpack(w2)
        gate, up = (w13[:, :, half].reshape(shape.inner, shape.hidden) for half in range(2))
        # The halves of a slot of w2 are neighbouring rows.
        return gate, up, w2.transpose(2, 3).reshape(shape.hidden, shape.inner)


def random_records(shape: Shape, weights: str, stride: int, seed: int = 1, device: str = "cuda") -> Records:
    """All FP4 codes with scales of five neighbouring exponents; e4m3 of normal numbers with any scales."""
    generator = torch.Generator(device).manual_seed(seed)
    data = torch.zeros((shape.experts, stride), dtype=torch.uint8, device=device)
    size = record_bytes(shape, weights)
    assert size <= stride
    for expert in range(shape.experts):
        if weights == "fp4":
            _fill_fp4(data[expert, :size], generator)
        else:
            _fill_fp8(data[expert, :size], shape, generator)
    return Records(shape, weights, data)


def random_stored(dtype: str, sizes: tuple[int, ...]) -> Tensor:
    """u8: codes or scales as a checkpoint has them, with values as in the records."""
    generator = torch.Generator("cuda").manual_seed(2)
    data = torch.empty(sizes, dtype=torch.uint8, device="cuda")
    for part in data:
        part.random_(0, 256, generator=generator)
        if dtype == "F8E8M0":
            part.copy_(part % _EXPONENTS + _LOWEST_EXPONENT)
        if dtype == "F8E4M3":
            # Magnitudes of 0.5 to 1.875, either sign.
            part.copy_(part & 0x8F | 0x30)
    return data


def _fill_fp4(record: Tensor, generator: torch.Generator) -> None:
    record.random_(0, 256, generator=generator)
    scales = record.view(-1, FP4_GROUP_BYTES)[:, FP4_CODE_BYTES:]
    scales.copy_(scales % _EXPONENTS + _LOWEST_EXPONENT)


def _fill_fp8(record: Tensor, shape: Shape, generator: torch.Generator) -> None:
    tiles = record.view(-1, tile_bytes("fp8"))
    codes = tiles[:, : ROW_GROUPS * FP8_GROUP_BYTES]
    normal = torch.empty(codes.shape, dtype=torch.bfloat16, device=record.device).normal_(generator=generator)
    codes.copy_(normal.to(torch.float8_e4m3fn).view(torch.uint8))
    # Of blocks of 128 rows, not powers of two: 1/64 to 1/32. Four panels of w13 have the same two blocks.
    down = torch.empty((shape.hidden // 128, 1, shape.inner // 128, 1), device=record.device)
    gate_up = torch.empty((shape.inner // 128, 1, shape.hidden // 128, 2), device=record.device)
    for scales in (gate_up, down):
        scales.uniform_(1 / 64, 1 / 32, generator=generator)
    by_tile = torch.cat([gate_up.expand(-1, 4, -1, -1).reshape(-1, 2), down.expand(-1, 2, -1, 2).reshape(-1, 2)])
    tiles[:, ROW_GROUPS * FP8_GROUP_BYTES :] = torch.nn.functional.pad(by_tile, (0, 2)).view(torch.uint8)


def _unpack_fp4(matrix: Tensor) -> Tensor:
    """Tiles [panel, tile, bytes] -> [panel, row group, half, slot, column]."""
    panels, tiles, _ = matrix.shape
    groups = matrix.view(panels, tiles, ROW_GROUPS, FP4_GROUP_BYTES)
    # A group: [q / 2, slot, t, q % 2, half] words of eight codes.
    words = groups[..., :FP4_CODE_BYTES].contiguous().view(torch.int32)
    words = words.view(panels, tiles, ROW_GROUPS, 2, 8, 4, 2, 2)
    codes = torch.stack([_code(words, e) for e in range(8)], -1).long()
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=torch.float64, device=matrix.device)
    values = table[codes]
    # p, tile, r, q / 2, slot, t, q % 2, half, e -> p, r, half, slot, tile, q / 2, q % 2, t, e
    values = values.permute(0, 2, 7, 4, 1, 3, 6, 5, 8).reshape(panels, ROW_GROUPS, 2, 8, tiles, 4, 32)
    scales = groups[..., FP4_CODE_BYTES:].view(panels, tiles, ROW_GROUPS, 8, 2, 4).permute(0, 2, 4, 3, 1, 5)
    return (values * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(4)


def _code(words: Tensor, e: int) -> Tensor:
    """Code e of words: the sign is bit 3."""

    def bit(place: int) -> Tensor:
        return words >> place % 32 & 1

    if e < 4:
        return bit(8 * e + 7) << 3 | bit(8 * e + 4) << 2 | bit(8 * e + 3) << 1 | bit(8 * e + 2)
    j = e - 4
    return bit(8 * j + 5) << 3 | bit(8 * j) << 2 | bit(8 * j + 1) << 1 | bit(8 * j - 2)


def _unpack_fp8(matrix: Tensor) -> Tensor:
    panels, tiles, _ = matrix.shape
    codes = matrix[..., : ROW_GROUPS * FP8_GROUP_BYTES].contiguous().view(torch.float8_e4m3fn)
    # A group: [q, slot, t, half, 8 columns].
    values = codes.double().view(panels, tiles, ROW_GROUPS, 4, 8, 4, 2, 8)
    values = values.permute(0, 2, 6, 4, 1, 3, 5, 7).reshape(panels, ROW_GROUPS, 2, 8, tiles, TILE_COLUMNS)
    scales = matrix[..., ROW_GROUPS * FP8_GROUP_BYTES :].contiguous().view(torch.float32)[..., :2].double()
    # [panel, 1, half, 1, tile, 1]
    return (values * scales.permute(0, 2, 1)[:, None, :, None, :, None]).flatten(4)
