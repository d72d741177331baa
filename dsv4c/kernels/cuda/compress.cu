// Pooling of the groups that close in this step into entries, and the open groups' state (compress, spec 2.7 to 2.9).
//
// Macros:
//   WIDTH, PROJECTED          channels of an entry; of a token (twice as many where groups overlap)
//   RATIO, DEPTH              tokens of a group; rows of the state
//   OVERLAP                   1: groups overlap
//   KV_TYPE, KV_STRIDE, GATE_TYPE, GATE_STRIDE   of kv and gate [T, PROJECTED]
//   BIAS_TYPE, BIAS_STRIDE    of ape [RATIO, PROJECTED]
//   WEIGHT_TYPE               of the norm's weight [WIDTH]
//   EPS, HADAMARD_SCALE       of the norm; WIDTH^-0.5
//   ROTARY                    rotary channels, the last ones
//   ROUNDING                  of Rounding in state_ops.py
//   ROUND_TYPE                what every step is rounded to
//   FORMAT, BLOCK_ROWS, ROW_BYTES, EXPONENT_BYTES   of the entries (state_rows.cuh)
//   POOL, REMEMBER            which of the two things this call does
//   BLOCK_WARPS               warps of a block
//
// State float32 [S, DEPTH, 2, PROJECTED]: the projected value and the gate with its bias. A block takes a row of the
// step, a thread a channel at a time: grid [T]. Where POOL and REMEMBER are both set, no row of the step may take the
// place of a token that another still pools; the selector sees to it.
#include "block.cuh"
#include "rotary.cuh"
#include "state_rows.cuh"
#include "step.cuh"

#define NO_GATE bits_to_float(0xFF800000u)  // minus infinity

constexpr int WARPS = BLOCK_WARPS, THREADS = WARPS * LANES;
constexpr int BATCH = 8;  // tokens whose loads are under way at once

enum Rounding { ROUND_NONE, ROUND_FP8, ROUND_HADAMARD_FP4 };

struct Token {
  float value;
  float gate;
};

struct Group {
  const KV_TYPE* kv;
  const GATE_TYPE* gate;
  const BIAS_TYPE* ape;
  const float* state;  // of the slot
  const int* run;
  int first;  // position of the run

  __device__ __forceinline__ Token token(int position, int channel) const {
    if (position < first) {
      const float* open = state + (i64)(position % DEPTH) * 2 * PROJECTED + channel;
      return {open[0], open[PROJECTED]};
    }
    const i64 row = run[position - first];
    const float bias = to_float(ape[position % RATIO * BIAS_STRIDE + channel]);
    return {to_float(kv[row * KV_STRIDE + channel]), to_float(gate[row * GATE_STRIDE + channel]) + bias};
  }
};

// Softmax-weighted mean of one channel over positions begin to start + RATIO; the group at `start` counts with the
// last WIDTH channels of its tokens, the one before it with the first.
__device__ __forceinline__ float pool(const Group& group, int begin, int start, int channel) {
  float peak = NO_GATE, total = 0.0f, sum = 0.0f;
  for (int position = begin; position < start + RATIO; position += BATCH) {
    Token tokens[BATCH];
    float next = peak;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = position + i;
      tokens[i] = {0.0f, NO_GATE};
      if (at < start + RATIO) tokens[i] = group.token(at, channel + (at < start ? 0 : PROJECTED - WIDTH));
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) next = fmaxf(next, tokens[i].gate);
    const float correction = expf(peak - next);
    total *= correction;
    sum *= correction;
    peak = next;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const float weight = expf(tokens[i].gate - peak);
      total += weight;
      sum += weight * tokens[i].value;
    }
  }
  return sum / total;
}

// Norm, rotation and rounding of a pooled entry in shared memory, each step rounded.
__device__ __forceinline__ void finish(float* entry, float* partial, const WEIGHT_TYPE* weight,
                                       const float* frequencies, int start) {
  float squares = 0.0f;
  for (int c = threadIdx.x; c < WIDTH; c += THREADS) squares += entry[c] * entry[c];
  squares = block_sum<WARPS>(squares, partial);
  const float factor = 1.0f / sqrtf(squares / WIDTH + (float)(EPS));
  for (int c = threadIdx.x; c < WIDTH; c += THREADS)
    entry[c] = rounded_to<ROUND_TYPE>(entry[c] * factor * to_float(weight[c]));
  __syncthreads();
  for (int i = threadIdx.x; i < ROTARY / 2; i += THREADS) {
    float& even = entry[WIDTH - ROTARY + 2 * i];
    float& odd = entry[WIDTH - ROTARY + 2 * i + 1];
    rotate(even, odd, rotation_at(start, frequencies[i]));
    even = rounded_to<ROUND_TYPE>(even);
    odd = rounded_to<ROUND_TYPE>(odd);
  }
  __syncthreads();
  if (ROUNDING == ROUND_FP8) {
    fp8_round_row<ROUND_TYPE, WIDTH - ROTARY, WARPS>(entry);
    __syncthreads();
  } else if (ROUNDING == ROUND_HADAMARD_FP4) {
    for (int span = 1; span < WIDTH; span *= 2) {
      for (int i = threadIdx.x; i < WIDTH / 2; i += THREADS) {
        const int at = i / span * 2 * span + i % span;
        const float x = entry[at], y = entry[at + span];
        entry[at] = x + y;
        entry[at + span] = x - y;
      }
      __syncthreads();
    }
    for (int c = threadIdx.x; c < WIDTH; c += THREADS)
      entry[c] = rounded_to<ROUND_TYPE>(entry[c] * (float)(HADAMARD_SCALE));
    __syncthreads();
    fp4_round_row<ROUND_TYPE, WIDTH, WARPS>(entry);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compress(const KV_TYPE* kv, const GATE_TYPE* gate, const BIAS_TYPE* ape, const WEIGHT_TYPE* weight,
             const float* frequencies, const int* slots, const int* positions, const int* block_table, float* state,
             u8* entries, u8* exponents, const StepHeader* step) {
  const int row = blockIdx.x;
  if (row >= step->tokens) return;
  const int position = positions[row], slot = slots[row];
  float* open = state + (i64)slot * DEPTH * 2 * PROJECTED;
  const Group group = {kv, gate, ape, open, step->run_rows + step->run_begin[row], step->run_first[row]};

  if (POOL && (position + 1) % RATIO == 0) {
    __shared__ float entry[WIDTH];
    __shared__ float partial[WARPS];
    const int index = position / RATIO, start = index * RATIO;
    const int begin = OVERLAP && index > 0 ? start - RATIO : start;
    for (int c = threadIdx.x; c < WIDTH; c += THREADS) entry[c] = rounded_to<ROUND_TYPE>(pool(group, begin, start, c));
    finish(entry, partial, weight, frequencies, start);
    const int block = block_table[(i64)slot * step->table_width + index / BLOCK_ROWS];
    const i64 at = (i64)block * BLOCK_ROWS + index % BLOCK_ROWS;
    store_state_row<FORMAT, WIDTH, ROTARY, ROW_BYTES, EXPONENT_BYTES, WARPS>(entries + at * ROW_BYTES,
                                                                             exponents + at * EXPONENT_BYTES, entry);
  }

  // A later row of this step takes the same place.
  if (REMEMBER && position - group.first + DEPTH >= step->run_length[row]) {
    float* to = open + (i64)(position % DEPTH) * 2 * PROJECTED;
    for (int c = threadIdx.x; c < PROJECTED; c += THREADS) {
      const Token token = group.token(position, c);
      to[c] = token.value;
      to[PROJECTED + c] = token.gate;
    }
  }
}
