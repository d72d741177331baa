"""Quantising a weight in a build: from its values to codes and scales.

The same bytes on every machine: scales come from exact operations (a maximum, one division), and the errors that a
search compares are summed in a fixed order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4c.checkpoint import formats
from dsv4c.checkpoint.formats import Encoding

# What a search tries after the rule. Powers of two next to it: half of it cuts off the largest values and is finer for
# all others, twice of it rarely helps. For integers: into how many steps the largest value is divided.
_EXPONENT_OFFSETS = (-1, 1)
_INT8_STEPS = (129.0, 131.0, 134.0, 137.0, 140.0)
_INT4_STEPS = (7.0, 7.25, 7.5, 7.75, 8.25, 8.5, 8.75, 9.0, 9.25, 9.5, 9.75, 10.0)
_LARGEST_EXPONENT = 254  # 255 is NaN
# Values that are worked on at a time: a few copies of them are needed, and a tensor may have a hundred million.
_BAND_VALUES = 1 << 22


@dataclass(frozen=True)
class Quantization:
    """What a build makes of a weight. `block`: the rows and columns of one source tensor that share a scale.

    `search` tries a few scales for each block and keeps the one of least squared error.
    """

    encoding: Encoding
    block: tuple[int, int]
    search: bool = False


@dataclass(frozen=True)
class _Format:
    candidates: Callable[[Tensor], Iterator[Tensor]]  # values -> scales; the rule's own first
    encode: Callable[[Tensor, Tensor], Tensor]  # values, scales -> codes
    decode: Callable[[Tensor, Tensor], Tensor]  # codes, scales -> values


def quantize(values: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    """float32 [O, I] -> (codes, scales) in the layout of `formats`.

    Raises CheckpointError on NaN or infinity, and where a group does not divide I.
    """
    codes, scales = zip(*(_quantize_band(band, how) for band in bands(values, how)), strict=True)
    return torch.cat(codes), torch.cat(scales)


def bands(values: Tensor, how: Quantization) -> list[Tensor]:
    """Views of some rows each, in order; no block straddles two of them."""
    block_rows = how.block[0]
    rows = max(_BAND_VALUES // values.shape[1] // block_rows, 1) * block_rows
    return [values[first : first + rows] for first in range(0, values.shape[0], rows)]


def _quantize_band(values: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    form = _format(how)
    candidates = form.candidates(values)
    best = next(candidates)
    codes = form.encode(values, best)
    if not how.search:
        return codes, best
    least = _block_errors(values, form.decode(codes, best), how.block)
    for scales in candidates:
        error = _block_errors(values, form.decode(form.encode(values, scales), scales), how.block)
        # Equal errors keep the earlier candidate.
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return form.encode(values, best), best


def dequantize(codes: Tensor, scales: Tensor, how: Quantization) -> Tensor:
    """The inverse of `quantize`, float32 [O, I]."""
    return _format(how).decode(codes, scales)


def _format(how: Quantization) -> _Format:
    group = how.block[1]
    match how.encoding:
        case Encoding.FP8_BLOCK:
            return _Format(
                lambda values: _neighbours(formats.fp8_scales(values, how.block)),
                lambda values, scales: formats.encode_fp8(values, scales, how.block),
                lambda codes, scales: formats.dequantize_fp8(codes, scales, how.block),
            )
        case Encoding.FP4_GROUP:
            return _Format(
                lambda values: _neighbours(formats.fp4_scales(values)), formats.encode_fp4, formats.dequantize_fp4
            )
        case Encoding.INT8_GROUP:
            return _Format(
                lambda values: (formats.int8_scales(values, group, n) for n in (formats.INT8_MAX, *_INT8_STEPS)),
                formats.encode_int8,
                formats.dequantize_int8,
            )
        case Encoding.INT4_GROUP:
            return _Format(
                lambda values: (formats.int4_scales(values, group, n) for n in (-formats.INT4_MIN, *_INT4_STEPS)),
                formats.encode_int4,
                formats.dequantize_int4,
            )
        case _:
            raise AssertionError(how.encoding)


def _neighbours(scales: Tensor) -> Iterator[Tensor]:
    yield scales
    for offset in _EXPONENT_OFFSETS:
        yield (scales.int() + offset).clamp_(0, _LARGEST_EXPONENT).to(torch.uint8)


def _block_errors(values: Tensor, decoded: Tensor, block: tuple[int, int]) -> Tensor:
    """Squared error of every block, float32 [ceil(O/bo), ceil(I/bi)]."""
    squares = (decoded - values).square_()
    return _sum_runs(_sum_runs(squares, block[1]).T, block[0]).T


def _sum_runs(x: Tensor, run: int) -> Tensor:
    """[O, I] -> [O, ceil(I/run)]: sums of `run` neighbours, by halves.

    Element-wise additions have one result everywhere; `sum` adds in an order that depends on the vector width.
    """
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % run)).view(x.shape[0], -1, run)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x.squeeze(-1)
