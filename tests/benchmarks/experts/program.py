"""A variant on the card: its operands, its scratch memory and its launches."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tests.benchmarks.experts.driver import Launcher, load_function
from tests.benchmarks.experts.manifest import Call, Operand, Shape, Variant
from tests.benchmarks.experts.records import Records, random_stored
from tests.benchmarks.experts.routing import Routing, f16_rows, make_lists, permuted, quantized

HEADER_BYTES = 64  # of a StepHeader (dsv4c/kernels/cuda/step.cuh)
GUARD_BYTES = 4096
POISON = 0xFF  # NaN in every floating-point type here
TARGET_SM_COUNTS = (132, 114)  # rows of the topology
# What the lists' kernel writes for that of the experts; the rest of the scratch memory is the experts' own.
LIST_NAMES = ("xq", "xs", "pair_weights", "list", "places", "heads", "counters")
# Operands that come with the inputs or belong to a program.
_GIVEN = ("x", "logits", "table", "token_ids", "out")

Pointers = Mapping[str, int]


def poisoned(size_bytes: int) -> Tensor:
    """u8, with a guard behind it."""
    return torch.full((size_bytes + GUARD_BYTES,), POISON, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class Layer:
    """What all variants of a worker share."""

    folder: Path  # with the cubins
    shape: Shape
    records: Records
    bias: Tensor
    read: float  # bytes a second that can be read; 0 where nobody asks
    stored: dict[str, Tensor] = field(default_factory=dict)  # weights as a checkpoint has them, by operand


class Program:
    """One variant for steps of `tokens` rows."""

    def __init__(self, layer: Layer, variant: Variant, tokens: int) -> None:
        assert tokens <= variant.bucket
        shape = layer.shape
        self.variant, self.shape, self.records, self.tokens = variant, shape, layer.records, tokens
        self.bias = layer.bias
        self._functions = [_function(layer.folder, call) for call in variant.calls]
        # T, R, S, B, M, no mask, nobody arrived; no kernel here reads the runs.
        header = struct.pack("<8i4Q", tokens, tokens, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0)
        assert len(header) == HEADER_BYTES
        self.header = torch.frombuffer(bytearray(header), dtype=torch.uint8).cuda()
        self.scratch = poisoned(variant.scratch_bytes)
        self.out = poisoned(variant.bucket * shape.hidden * 4)
        self.x = poisoned(variant.bucket * shape.hidden * 2)
        self.fixed = {
            operand.name: _fixed(layer, operand) for operand in variant.operands if operand.name not in _GIVEN
        }

    @property
    def has_lists(self) -> bool:
        return len(self.variant.calls) > 1

    def set_x(self, x: Tensor) -> None:
        """bf16 [T, D]; the bucket's other rows stay NaN."""
        self.x[: x.nbytes].copy_(x.contiguous().view(torch.uint8).flatten())

    def capacity(self, rows: Tensor) -> Tensor:
        """Rows of the step as the bucket has them, NaN or -1 behind."""
        size = self.variant.bucket * prod(rows.shape[1:]) * rows.element_size()
        found = poisoned(size)
        found[: rows.nbytes].copy_(rows.contiguous().view(torch.uint8).flatten())
        return found

    def launchers(
        self,
        routed: Mapping[str, Tensor],
        scratch: Tensor | None = None,
        out: Tensor | None = None,
        lists: Mapping[str, Tensor] | None = None,
        header: Tensor | None = None,
    ) -> list[Launcher]:
        """Of the calls in order. `routed`: logits, and token_ids and table with hash routing. `lists`: in other memory
        than the scratch's. `header`: of its own for a step that runs beside others, since the blocks of a launch count
        in it."""
        scratch = self.scratch if scratch is None else scratch
        header = self.header if header is None else header
        operands = {**self.fixed, **routed, "x": self.x, "out": self.out if out is None else out}
        found = []
        for call, function in zip(self.variant.calls, self._functions, strict=True):
            pointers = []
            for argument in call.arguments:
                if argument.operand is not None:
                    memory = operands[argument.operand]
                elif lists is not None and argument.name in lists:
                    pointers.append(lists[argument.name].data_ptr())
                    continue
                else:
                    memory = scratch
                pointers.append(memory.data_ptr() + argument.offset)
            pointers.append(header.data_ptr())
            found.append(Launcher(function, call.grid, call.block, call.shared_bytes, pointers, call.programmatic))
        return found

    def region(self, name: str, scratch: Tensor | None = None) -> Tensor:
        """The bytes of a scratch argument of the experts' call."""
        scratch = self.scratch if scratch is None else scratch
        argument = next(a for a in self.variant.experts_call.arguments if a.name == name)
        return scratch[argument.offset : argument.offset + argument.size_bytes]

    def list_contents(self, routing: Routing, x: Tensor) -> dict[str, Tensor]:
        """What the lists' kernel should write for the step, made with torch."""
        variant = self.variant
        topology = variant.operand("topology")
        table = None
        if topology is not None and topology.values is not None:
            row = TARGET_SM_COUNTS.index(variant.sm_count) * topology.sizes[1]
            table = topology.values[row : row + topology.sizes[1]]
        lists = make_lists(routing.ids, self.shape.experts, variant.tile, variant.groups, table)
        codes, scales = quantized(x)
        rows, factors = f16_rows(codes, scales) if variant.kernel == "experts_prefill" else (permuted(codes), scales)
        return {
            "xq": rows,
            "xs": factors,
            "pair_weights": routing.weights.float(),
            "list": lists.list,
            "places": lists.places,
            "heads": lists.heads,
        }

    def fill_lists(self, contents: Mapping[str, Tensor], regions: Mapping[str, Tensor]) -> None:
        """Writes them where the experts' kernel reads them, and zeros its counters."""
        for name, values in contents.items():
            regions[name][: values.nbytes].copy_(values.contiguous().view(torch.uint8).flatten())
        regions["counters"].zero_()

    def result(self, out: Tensor | None = None) -> Tensor:
        """float32 [bucket, D]."""
        out = self.out if out is None else out
        return out[:-GUARD_BYTES].view(torch.float32).view(self.variant.bucket, self.shape.hidden)


def _fixed(layer: Layer, operand: Operand) -> Tensor:
    """An operand that is the same in every launch."""
    if operand.name == "experts":
        return layer.records.data
    if operand.name == "bias":
        return layer.bias
    if operand.values is not None:
        return torch.tensor(operand.values, dtype=torch.int32, device="cuda")
    if operand.name in ("ids", "weights"):  # from the first call to the others
        return poisoned(prod(operand.sizes) * 4)
    if operand.name not in layer.stored:
        layer.stored[operand.name] = random_stored(operand.dtype, operand.sizes)
    return layer.stored[operand.name]


def _function(folder: Path, call: Call) -> object:
    return load_function((folder / call.cubin).read_bytes(), call.symbol, call.shared_bytes)


def load_tool(folder: Path, call: Call, pointers: Sequence[int]) -> Callable[[], None]:
    function = load_function((folder / call.cubin).read_bytes(), call.symbol, call.shared_bytes)
    return Launcher(function, call.grid, call.block, call.shared_bytes, [*pointers, 0])
