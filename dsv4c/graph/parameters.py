"""The numbers behind a placeholder: decoded values, codes, scales or packed experts, as the checkpoint has them or the
build makes."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.checkpoint.expert_packing import StoredMatrix, pack_fp4, pack_fp8
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.quantization import Quantization, bands, dequantize, quantize
from dsv4c.errors import CheckpointError
from dsv4c.graph.annotations import Constant, Parameter

STORED_DTYPE = {
    Encoding.F32: torch.float32,
    Encoding.BF16: torch.bfloat16,
    Encoding.F16: torch.float16,
    Encoding.INT64: torch.int64,
    Encoding.FP8_BLOCK: torch.float8_e4m3fn,
    Encoding.FP4_GROUP: torch.float4_e2m1fn_x2,
    Encoding.INT8_GROUP: torch.int8,
    Encoding.INT4_GROUP: torch.uint8,  # two codes a byte
}

INTEGERS = (Encoding.INT8_GROUP, Encoding.INT4_GROUP)
PACKED = (Encoding.FP4_GROUP, Encoding.INT4_GROUP)

# A source, some rows of its values and what was made of them: called for every row of what the build quantises.
Measure = Callable[[str, Parameter, Tensor, Tensor], None]


def part_dtype(parameter: Parameter) -> torch.dtype:
    """The dtype of the codes, the scales or the records of a stored weight."""
    if parameter.part != "scales":  # a record has the type of its codes
        return STORED_DTYPE[parameter.stored_as]
    if parameter.stored_as in INTEGERS:
        return torch.float16
    return torch.float32 if parameter.float_scales else torch.float8_e8m0fnu


def unstraddled_block(block: tuple[int, int] | None, rows: tuple[int, ...]) -> tuple[int, int] | None:
    """The scale block of sources of `rows` stacked into one matrix: none may straddle the border of two sources."""
    if block is None:
        return None
    borders = [sum(rows[:i]) for i in range(1, len(rows))]
    return math.gcd(block[0], *borders), block[1]


def scale_rows(scales: Tensor, rows: int, block_rows: int, wanted: int) -> Tensor:
    """Scales [ceil(rows/block_rows), C] with one row for every `wanted` weight rows; `wanted` divides `block_rows`."""
    if wanted == block_rows:
        return scales
    return scales.repeat_interleave(block_rows // wanted, 0)[: -(-rows // wanted)]


class WeightReader:
    """The parts of weights as an engine stores them, one source tensor at a time.

    What the recipe quantises is quantised here, when its codes are asked for. Its scales, a sixteenth of the codes or
    less, wait for the question that follows. `measure` sees the values before and after.
    """

    def __init__(self, checkpoint: Checkpoint, measure: Measure | None = None) -> None:
        self._checkpoint = checkpoint
        self._measure = measure
        self._scales: dict[tuple[str, Quantization], Tensor] = {}

    def source_part(self, name: str, parameter: Parameter) -> Tensor:
        """One source tensor of a parameter: float32 (int64) values, codes, or scales."""
        how = parameter.quantization
        if parameter.part == "values":
            return self._checkpoint.values(name)
        if parameter.part == "codes":
            return self._checkpoint.codes(name) if how is None else self._quantized(name, parameter, how)[0]
        info = self._checkpoint.weights[name]
        if how is None:
            scales, block = self._checkpoint.scales(name), info.block
        else:
            waiting = self._scales.pop((name, how), None)
            scales, block = self._quantized(name, parameter, how)[1] if waiting is None else waiting, how.block
        assert scales is not None and block is not None and parameter.block is not None, name
        return scale_rows(scales, info.shape[0], block[0], parameter.block[0])

    def packed(self, parameter: Parameter, expert: int) -> Tensor:
        """The record of one expert, uint8."""
        names = parameter.source_names(expert)
        gate, up, down = (
            StoredMatrix(*(self.source_part(name, replace(parameter, part=part)) for part in ("codes", "scales")))
            for name in names
        )
        if parameter.stored_as is Encoding.FP4_GROUP:
            return pack_fp4(gate, up, down, (names[0], names[1], names[2]))
        return pack_fp8(gate, up, down)

    def _quantized(self, name: str, parameter: Parameter, how: Quantization) -> tuple[Tensor, Tensor]:
        made = []
        try:
            for values in bands(self._checkpoint.values(name), how):
                made.append(quantize(values, how))
                if self._measure is not None and parameter.part == "codes":
                    self._measure(name, parameter, values, dequantize(*made[-1], how))
        except CheckpointError as error:
            stored = self._checkpoint.weights[name].stored
            raise CheckpointError(f"{stored.shard}: tensor `{stored.name}`: {error.message}", error.hint) from None
        codes, scales = (torch.cat(parts) for parts in zip(*made, strict=True))
        if parameter.part == "codes":
            self._scales[name, how] = scales
        return codes, scales

    def load(self, parameter: Parameter) -> Tensor:
        """The whole parameter in memory; for the oracle and for tests. All but values come as their stored bytes."""
        if parameter.part == "packed":
            return torch.stack([self.packed(parameter, expert) for expert in range(parameter.experts)])

        def stack(expert: int | None) -> Tensor:
            return torch.cat([self.source_part(name, parameter) for name in parameter.source_names(expert)])

        if not parameter.experts:
            return stack(None)
        return torch.stack([stack(expert) for expert in range(parameter.experts)])


def load_parameter(checkpoint: Checkpoint, parameter: Parameter) -> Tensor:
    """One parameter by itself; see `WeightReader.load`."""
    return WeightReader(checkpoint).load(parameter)


def load_constant(constant: Constant) -> Tensor:
    return torch.tensor(constant.values, dtype=constant.dtype)
