"""Running a plan in Python on the reference bodies.

The arena is one byte buffer that starts as NaN, so that a wrong lifetime shows; launches see views of it exactly as a
kernel does. It tests memory reuse without a GPU, and `verify --replay` compares an engine with it launch by launch.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4c.checkpoint.checkpoint import Checkpoint
from dsv4c.graph.annotations import Constant, Parameter
from dsv4c.graph.parameters import WeightReader, load_constant
from dsv4c.plan.execution_plan import DENSE, TORCH_DTYPES, Arg, BucketPlan, ExecutionPlan, Extent, Launch, TensorRef
from dsv4c.step_abi import Dim, Input, LaunchFlag, Output, Space, StateKind

Watch = Callable[[int, Launch, list[Tensor]], None]


def extent_bytes(weights: WeightReader, extent: Extent) -> Tensor:
    """The stored bytes of one extent, uint8."""
    if isinstance(extent.what, Constant):
        return load_constant(extent.what).view(torch.uint8)
    if extent.expert is not None:
        return weights.packed(extent.what, extent.expert)
    return weights.source_part(extent.source, extent.what).contiguous().view(torch.uint8).flatten()


class ReferenceRun:
    """State for `slots` sequences, and `step`. Weights are read as the engine stores them."""

    def __init__(self, plan: ExecutionPlan, checkpoint: Checkpoint, slots: int = 1, context: int = 1024) -> None:
        self.plan = plan
        per_slot = -(-context // plan.block_tokens)
        self._counts = {Dim.SLOTS: slots, Dim.BLOCKS: slots * per_slot, Dim.TABLE: per_slot}
        self._block_table = torch.arange(slots * per_slot, dtype=torch.int32).view(slots, per_slot)
        self._weights = WeightReader(checkpoint)
        # What this launch has quantised: its operands are read one by one, and those of experts interleave.
        self._quantized: dict[int, Tensor] = {}
        self._extents = {extent.offset: index for index, extent in enumerate(plan.weights.extents)}
        self._state = []
        for plane in plan.state.planes:
            size = plane.kind.units(slots, slots * per_slot) * plane.unit_bytes
            fill = 0 if plane.kind is StateKind.ROUTING_COUNTS else 0xFF
            self._state.append(torch.full((size,), fill, dtype=torch.uint8))

    @torch.no_grad()
    def step(
        self,
        bucket: BucketPlan,
        token_ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        watch: Watch | None = None,
    ) -> Tensor:
        """Float32 logits of every row. `watch` sees each launch with its outputs, in order."""
        rows = len(token_ids)
        assert rows <= bucket.tokens
        counts = {**self._counts, Dim.TOKENS: rows, Dim.LOGITS: rows}
        arena = torch.full((bucket.arena_bytes,), 0xFF, dtype=torch.uint8)
        inputs = {
            Input.TOKEN_IDS: torch.tensor(token_ids, dtype=torch.int32),
            Input.SLOTS: torch.tensor(slots, dtype=torch.int32),
            Input.POSITIONS: torch.tensor(positions, dtype=torch.int32),
            Input.BLOCK_TABLE: self._block_table,
            Input.LOGITS_ROWS: torch.arange(rows, dtype=torch.int32),
        }
        logits = torch.full((rows, self.plan.vocab_size), torch.nan)
        outputs = {Output.LOGITS: logits}

        def tensor(ref: TensorRef) -> Tensor:
            return self._tensor(ref, counts, arena, inputs, outputs)

        def argument(arg: Arg, wants_dtype: bool) -> object:
            if isinstance(arg, TensorRef):
                return tensor(arg)
            return _dtype(arg) if wants_dtype else arg

        for number, launch in enumerate(bucket.launches):
            if launch.flags & LaunchFlag.SAMPLE:
                continue
            self._quantized.clear()
            op = getattr(torch.ops.dsv4, launch.kernel).default
            schema = op._schema.arguments
            args = [argument(arg, str(s.real_type) == "ScalarType") for arg, s in zip(launch.args, schema, strict=True)]
            results = op(*args)
            found = [tensor(ref) for ref in launch.outputs]
            for place, result in zip(found, results if len(found) > 1 else [results], strict=False):
                place.copy_(result)
            if watch is not None:
                watch(number, launch, found)
        return logits

    def _tensor(
        self,
        ref: TensorRef,
        counts: dict[Dim, int],
        arena: Tensor,
        inputs: dict[Input, Tensor],
        outputs: dict[Output, Tensor],
    ) -> Tensor:
        sizes = [counts.get(dim, size) for dim, size in zip(ref.dims, ref.sizes, strict=True)]
        if ref.space is Space.INPUT:
            return inputs[Input(ref.index)]
        if ref.space is Space.OUTPUT:
            return outputs[Output(ref.index)]
        if ref.space is Space.WEIGHT:
            base, offset = self._weight_bytes(ref)
        else:
            base, offset = (self._state[ref.index] if ref.space is Space.STATE else arena), ref.offset
        strides = list(ref.strides)
        for axis, stride in enumerate(strides):
            if stride == DENSE:
                strides[axis] = math.prod(sizes[axis + 1 :])
        size = ref.dtype.size_bytes
        typed = base[offset : offset + (len(base) - offset) // size * size].view(TORCH_DTYPES[ref.dtype])
        return typed.as_strided(sizes, strides)

    def _weight_bytes(self, ref: TensorRef) -> tuple[Tensor, int]:
        """The bytes from the first extent of a weight on, as far as the weight reaches; and its offset in them."""
        reach = sum((s - 1) * stride for s, stride in zip(ref.sizes, ref.strides, strict=True)) + 1
        end = ref.offset + reach * ref.dtype.size_bytes
        data = torch.zeros(end - ref.offset + 8, dtype=torch.uint8)
        for extent in self.plan.weights.extents[self._extents[ref.offset] :]:
            if extent.offset >= end:
                break
            at = extent.offset - ref.offset
            taken = self._extent(extent)[: end - extent.offset]
            data[at : at + len(taken)] = taken
        return data, 0

    def _extent(self, extent: Extent) -> Tensor:
        if not isinstance(extent.what, Parameter) or extent.what.quantization is None:
            return extent_bytes(self._weights, extent)
        if extent.offset not in self._quantized:
            self._quantized[extent.offset] = extent_bytes(self._weights, extent)
        return self._quantized[extent.offset]


def _dtype(code: object) -> torch.dtype:
    return TORCH_DTYPES[next(dtype for dtype in TORCH_DTYPES if dtype == code)]
