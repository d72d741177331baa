// What the kernels of the hyper-connections share. Macros: STREAMS (n), WIDTH (D), X_TYPE (float or bf16), ROW_STRIDE
// and STREAM_STRIDE (elements from one row and one stream of X to the next; 0 where the streams are one and the same),
// HEAD (1: the rows are the R that want logits, 0: the T of the step).
//
// The mixing logits and what is made of them also take CAPACITY (rows of the bucket) and EAGER (1: the bucket is so
// small that its time is latency; loads do not wait for the number of rows, and results of rows that are not there are
// not stored).
#pragma once

#include "block.cuh"
#include "dtype.cuh"
#include "step.cuh"

__device__ __forceinline__ int step_rows(const StepHeader* step) { return HEAD ? step->logits_rows : step->tokens; }

// COUNT elements that are loaded and stored at once, in units of up to 16 bytes.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Pack {
  T value[COUNT];
};

// Elements of row `row` and stream `stream` from `column` on.
template <int COUNT>
__device__ __forceinline__ Pack<X_TYPE, COUNT> load_stream(const X_TYPE* x, int row, int stream, int column) {
  return *reinterpret_cast<const Pack<X_TYPE, COUNT>*>(x + (i64)row * ROW_STRIDE + stream * STREAM_STRIDE + column);
}
