"""What a traced or profiled step reports of its launches."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsv4c.engine.format import NO_INDEX
from dsv4c.runtime import library as lib
from dsv4c.step_abi import DType

# What a traced tensor is shown as; formats that numpy lacks are raw codes.
_RAW_DTYPES: dict[DType, type[np.generic]] = {
    DType.F32: np.float32,
    DType.BF16: np.uint16,
    DType.F16: np.float16,
    DType.F8E4M3: np.uint8,
    DType.F8E8M0: np.uint8,
    DType.U8: np.uint8,
    DType.I8: np.int8,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.F4E2M1X2: np.uint8,
}


@dataclass(frozen=True)
class TraceOutput:
    """An output of a launch: `data` is a copy, in codes of `dtype` where numpy has no such type."""

    dtype: DType
    data: npt.NDArray[Any]

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values of a float32, bfloat16, float16 or integer tensor."""
        if self.dtype == DType.BF16:
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.dtype in (DType.F8E4M3, DType.F8E8M0, DType.F4E2M1X2):
            raise TypeError(f"{self.dtype.name} has no values without its scales")
        return self.data.astype(np.float32)


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a profiled step. `bytes_moved` and `flops` are as planned for the whole bucket."""

    launch: int  # index in its bucket
    kernel: str
    node: str
    layer: int | None
    rows: int
    seconds: float
    bytes_moved: int
    flops: int


def layer_of(event: lib.TraceEvent) -> int | None:
    return None if event.layer == NO_INDEX else int(event.layer)


def read_trace_output(tensor: lib.TraceTensor) -> TraceOutput:
    dtype = DType(tensor.dtype)
    shape = list(tensor.size[: tensor.ndim])
    strides = [stride * dtype.size_bytes for stride in tensor.stride[: tensor.ndim]]
    if 0 in shape:
        return TraceOutput(dtype, np.empty(shape, _RAW_DTYPES[dtype]))
    size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + dtype.size_bytes
    memory = (ctypes.c_char * size).from_address(tensor.data)
    return TraceOutput(dtype, np.ndarray(shape, _RAW_DTYPES[dtype], memory, strides=strides).copy())
