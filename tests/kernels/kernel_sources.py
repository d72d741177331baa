"""Small kernels in a folder of their own, laid out as dsv4c/kernels: `cuda/scale.cu` and `triton/scaled.py`."""

import shutil
from pathlib import Path

from dsv4c.kernels.compile_request import CompileRequest
from dsv4c.kernels.sources import KERNEL_FOLDER
from dsv4c.plan.execution_plan import KernelVariant

ARCH = "sm_90a"

SCALE = """\
#include "factor.cuh"

extern "C" __global__ void __launch_bounds__(WIDTH) scale_rows(const X_TYPE* x, X_TYPE* y, const StepHeader* step) {
  __shared__ float row[WIDTH];
  if (blockIdx.x >= step->tokens) return;
  const int i = blockIdx.x * WIDTH + threadIdx.x;
  row[threadIdx.x] = to_float(x[i]);
  __syncthreads();
  y[i] = from_float<X_TYPE>(row[WIDTH - 1 - threadIdx.x] * factor());
}

#ifdef SPILL
extern "C" __global__ void spill(float* x) {
  float values[SPILL];
  for (int i = 0; i < SPILL; ++i) values[i] = x[i];
  for (int i = 0; i < SPILL; ++i) x[(int)x[i]] = values[(int)values[i]];
}
#endif
"""
FACTOR = """\
#pragma once
#include "dtype.cuh"
#include "step.cuh"
__device__ __forceinline__ float factor() { return (float)FACTOR; }
"""
# Minutes of work for the compiler.
SLOW = """\
#define TEN(x) x x x x x x x x x x
extern "C" __global__ void slow(float* x) {
  float value = x[threadIdx.x];
  TEN(TEN(TEN(TEN(value = sinf(value) * x[(int)value & 31] + powf(value, 1.5f);))))
  x[threadIdx.x] = value;
}
"""
SCALED = """\
import triton
import triton.language as tl

from dsv4c.kernels.triton.factor import times


@triton.jit
def scaled(x, y, step, WIDTH: tl.constexpr, FACTOR: tl.constexpr, INTERPRET: tl.constexpr = 0):
    row = tl.program_id(0)
    if row < tl.load(step):
        columns = tl.arange(0, WIDTH)
        value = times(tl.load(x + row * WIDTH + columns), FACTOR)
        tl.store(y + row * WIDTH + columns, value.to(y.dtype.element_ty))
"""
TIMES = """\
import triton
import triton.language as tl


@triton.jit
def times(x, FACTOR: tl.constexpr):
    return x.to(tl.float32) * FACTOR
"""

CUDA_VARIANT = KernelVariant("cuda", "scale", "scale_rows", (("FACTOR", 0.5), ("WIDTH", 256), ("X_TYPE", "bf16")))
TRITON_VARIANT = KernelVariant(
    "triton", "scaled", "scaled", (("FACTOR", 0.5), ("SIGNATURE", "*bf16,*fp32,*i32"), ("WIDTH", 256)), 4, 2
)


def write_sources(folder: Path) -> Path:
    for name, text in {"scale.cu": SCALE, "factor.cuh": FACTOR, "slow.cu": SLOW}.items():
        path = folder / "cuda" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for header in ("dtype.cuh", "step.cuh"):
        shutil.copy(KERNEL_FOLDER / "cuda" / header, folder / "cuda")
    for name, text in {"scaled.py": SCALED, "factor.py": TIMES}.items():
        path = folder / "triton" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def request(variant: KernelVariant) -> CompileRequest:
    return CompileRequest(
        variant.language, variant.source, variant.entry, variant.constants, variant.warps, variant.stages, ARCH
    )


def with_constants(variant: KernelVariant, **constants: int | float | str) -> KernelVariant:
    merged = tuple(sorted({**dict(variant.constants), **constants}.items()))
    return KernelVariant(variant.language, variant.source, variant.entry, merged, variant.warps, variant.stages)


def elf_abi(cubin: bytes) -> tuple[int, int]:
    """OSABI and ABI version: (0x33, 7) loads on drivers of CUDA 12 and 13."""
    assert cubin[:4] == b"\x7fELF"
    return cubin[7], cubin[8]
