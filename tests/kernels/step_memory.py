"""The memory of one operator under test: all its tensors in one buffer, poison between them and behind the step's rows.

The operator gets them as a plan's launch would give them, with room for the rows of the bucket; afterwards nothing but
its results may have changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4c.plan.execution_plan import DTYPES, TORCH_DTYPES, TensorRef
from dsv4c.step_abi import Dim, DType, Space

POISON = 0xFF  # a NaN in every float format, -1 in every integer
UNWRITTEN = 0xFE  # what results start as: a NaN made of poison may be poison again
ALIGN = 256
GUARD_BYTES = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its size: torch copies and compares no narrow floats."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


@dataclass
class StepMemory:
    """Grows by `place`; then `build` fills a buffer."""

    size_bytes: int = 0
    names: dict[int, str] = field(default_factory=dict)  # by offset
    _contents: list[tuple[TensorRef, Tensor]] = field(default_factory=list)
    _results: list[range] = field(default_factory=list)

    def place(self, name: str, value: Tensor, dims: Sequence[Dim], capacity: int) -> TensorRef:
        """Room for an input, which `build` copies there. Its strides stay, and its offset modulo 256 bytes."""
        misalignment = value.storage_offset() * value.dtype.itemsize % ALIGN
        ref = self._reserve(name, DTYPES[value.dtype], value.shape, value.stride(), dims, capacity, misalignment)
        self._contents.append((ref, value))
        return ref

    def place_output(self, name: str, value: Tensor, dims: Sequence[Dim], capacity: int) -> TensorRef:
        """Room for a dense output of the shape and dtype of `value`."""
        strides = [math.prod(value.shape[axis + 1 :]) for axis in range(value.dim())]
        ref = self._reserve(name, DTYPES[value.dtype], value.shape, strides, dims, capacity, 0)
        self._results.append(range(ref.offset, self.size_bytes))
        return ref

    def _reserve(
        self,
        name: str,
        dtype: DType,
        shape: Sequence[int],
        strides: Sequence[int],
        dims: Sequence[Dim],
        capacity: int,
        misalignment: int,
    ) -> TensorRef:
        rows = (Dim.TOKENS, Dim.LOGITS)
        sizes = [capacity if dim in rows else size for size, dim in zip(shape, dims, strict=True)]
        reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        offset = -(-(self.size_bytes + GUARD_BYTES) // ALIGN) * ALIGN + misalignment
        self.size_bytes = offset + max(0, reach) * dtype.size_bytes
        self.names[offset] = name
        # A session decides sizes other than rows: a plan has 0 for them.
        planned = [size if dim is Dim.FIXED or dim in rows else 0 for size, dim in zip(sizes, dims, strict=True)]
        return TensorRef(Space.ARENA, dtype, offset, tuple(planned), tuple(strides), tuple(dims))

    def build(self, size_bytes: int) -> Tensor:
        """A poisoned buffer of `size_bytes` with the inputs in place, on a multiple of 4096 bytes."""
        raw = torch.full((size_bytes + 4096,), POISON, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096
        buffer = raw[start : start + size_bytes]
        for place in self._results:
            buffer[place.start : place.stop] = UNWRITTEN
        for ref, value in self._contents:
            to, source = bits(view(buffer, ref, value.shape)), bits(value)
            for axis, stride in enumerate(value.stride()):
                if stride == 0:  # broadcast: one copy
                    to, source = to.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
            to.copy_(source)
        return buffer

    def check_untouched(self, before: Tensor, after: Tensor) -> None:
        """Raises, naming the place, where the two differ; the caller has put the operator's results into `before`."""
        if torch.equal(before, after):
            return
        place = int((before != after).nonzero()[0])
        owners = [offset for offset in self.names if offset <= place]
        owner = f"{place - max(owners)} bytes from the start of {self.names[max(owners)]}" if owners else "before all"
        raise AssertionError(f"memory was written that is no result: byte {place}, {owner}")


def view(buffer: Tensor, ref: TensorRef, shape: Sequence[int]) -> Tensor:
    """A tensor of the launch in the buffer, with the sizes of this step."""
    size = ref.dtype.size_bytes
    end = ref.offset + (len(buffer) - ref.offset) // size * size
    if ref.offset % size:  # torch views only what is aligned
        raise AssertionError(f"{ref} is not aligned to its elements")
    return buffer[ref.offset : end].view(TORCH_DTYPES[ref.dtype]).as_strided(tuple(shape), ref.strides)
