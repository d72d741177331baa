// Stored matrices (decode_weight in dsv4c/graph/ops.py) as operands of kernels. A source includes it with the macros:
//   W_TYPE                float, bf16, f16, e4m3 or e2m1x2: an element of the matrix
//   W_STRIDE              elements of W_TYPE from one row to the next
//   COLUMNS               inputs of the matrix (I), which e2m1x2 packs in pairs
//   SCALED                1: scales of S_TYPE (e8m0 or float), S_STRIDE from one row of scales to the next
//   BLOCK_ROWS, BLOCK_COLS  elements under one scale
#pragma once

#include "dtype.cuh"

#if !SCALED
#define S_TYPE float
#define S_STRIDE 0
#define BLOCK_ROWS 1
#define BLOCK_COLS 1
#endif

// One element, in float32, of row `row` and column `k`: for the kernels without tensor cores.
__device__ __forceinline__ float stored_value(const float* row, int k) { return row[k]; }
__device__ __forceinline__ float stored_value(const bf16* row, int k) { return to_float(row[k]); }
__device__ __forceinline__ float stored_value(const f16* row, int k) { return to_float(row[k]); }
__device__ __forceinline__ float stored_value(const e4m3* row, int k) { return to_float(row[k]); }
__device__ __forceinline__ float stored_value(const e2m1x2* row, int k) {
  return k % 2 ? high(row[k / 2]) : low(row[k / 2]);
}

__device__ __forceinline__ float weight_at(const W_TYPE* matrix, const S_TYPE* scales, int row, int k) {
  const float value = stored_value(matrix + (i64)row * W_STRIDE, k);
  return SCALED ? value * to_float(scales[(i64)(row / BLOCK_ROWS) * S_STRIDE + k / BLOCK_COLS]) : value;
}
