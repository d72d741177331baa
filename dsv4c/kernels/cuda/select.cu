// The best visible entries of each row by the indexer's scores (select_entries, spec 2.8).
//
// Macros:
//   HEADS, DIM                of q [T, HEADS, DIM] and the keys; Q_TYPE, Q_STRIDE, Q_HEAD_STRIDE
//   FACTOR_TYPE, FACTOR_STRIDE, SCALE   of weights [T, HEADS], and what multiplies them
//   TOPK, RATIO               entries wanted; positions an entry stands for
//   FORMAT, BLOCK_ROWS, ROW_BYTES, EXPONENT_BYTES   of the keys (state_rows.cuh)
//   FLOAT_MATH                1: float32 arithmetic; 0: tensor cores, for bf16 q, DIM 32, 64 or 128 and vector loads
//   Q_VECTORS                 1: rows of q are aligned to 16 bytes
//   CAPACITY                  entries held at a time, at least TOPK + CHUNK
//   SPLIT, SPLIT_ENTRIES      1: the entries are split over blocks, at least so many for each, whose best go to
//                             select_merge.cu
//   OUT_STRIDE                of out int32 [T, TOPK], where they are not split
//
// Grid [T, splits]. By tensor cores a warp multiplies all heads with 8 entries at a time. The channels of the product
// are in an order of its own: lane t of four has a quarter of the channels of its entry, which are one load, and pairs
// them as its format makes cheapest; the queries are put into that order once. The products are 2^64 too small where
// keys have scales, so that one multiplication decodes; the heads' weights make up for it. The sum over heads has one
// order whatever the split.
#include "block.cuh"
#include "mma.cuh"
#include "state_rows.cuh"
#include "step.cuh"

#define BEST_THREADS 256
#include "best.cuh"

constexpr int THREADS = BEST_THREADS, WARPS = BEST_WARPS;
constexpr int CHUNK = 1024;

struct Keys {
  const u8* rows;
  const u8* exponents;
  const int* table;  // of the slot

  __device__ __forceinline__ i64 place(int entry) const {
    return (i64)table[entry / BLOCK_ROWS] * BLOCK_ROWS + entry % BLOCK_ROWS;
  }
};

#if FLOAT_MATH

struct Scorer {
  float* queries;  // shared [HEADS, DIM]
  float* factors;  // shared [HEADS]

  __device__ __forceinline__ Scorer(const Q_TYPE* q, const FACTOR_TYPE* weights, unsigned char* memory) {
    queries = (float*)memory;
    factors = queries + HEADS * DIM;
    for (int i = threadIdx.x; i < HEADS * DIM; i += THREADS)
      queries[i] = to_float(q[i / DIM * Q_HEAD_STRIDE + i % DIM]);
    for (int h = threadIdx.x; h < HEADS; h += THREADS) factors[h] = to_float(weights[h]) * (float)(SCALE);
    __syncthreads();
  }

  // A thread takes an entry, a few heads at a time.
  __device__ __forceinline__ void score(const Keys& keys, int first, int count, float* scores) {
    constexpr int GROUP = 16;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const i64 at = keys.place(first + i);
      const u8* row = keys.rows + at * ROW_BYTES;
      const u8* exponents = keys.exponents + at * EXPONENT_BYTES;
      float sum = 0.0f;
      for (int head = 0; head < HEADS; head += GROUP) {
        float dot[GROUP] = {};
        for (int c = 0; c < DIM; c++) {
          const float key = state_value<FORMAT, DIM, 0>(row, exponents, c);
#pragma unroll
          for (int h = 0; h < GROUP; h++) dot[h] += queries[min(head + h, HEADS - 1) * DIM + c] * key;
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++)
          if (head + h < HEADS) sum += factors[head + h] * fmaxf(dot[h], 0.0f);
      }
      scores[i] = sum;
    }
  }
};

#else

constexpr int HEAD_TILES = HEADS > 48 ? 4 : (HEADS + 15) / 16;  // of 16 heads, held in registers at a time
constexpr int PASSES = (HEADS + HEAD_TILES * 16 - 1) / (HEAD_TILES * 16);
constexpr int STEPS = DIM / 16;
constexpr int LANE_CHANNELS = DIM / 4;
constexpr int PAIRS = LANE_CHANNELS / 2;
// Channels c and c + PAIR share a register.
constexpr int PAIR = FORMAT == STATE_E2M1 ? 4 : FORMAT == STATE_E4M3 ? 2 : 1;
constexpr int WORDS = FORMAT == STATE_E2M1 ? LANE_CHANNELS / 8 : FORMAT == STATE_E4M3 ? LANE_CHANNELS / 4 : PAIRS;
constexpr float UNSCALED = FORMAT == STATE_BF16 ? 1.0f : 0x1p64f;

// COUNT words, aligned to as much as they are.
template <int COUNT>
__device__ __forceinline__ void load_words(const void* from, u32 (&words)[COUNT]) {
  if (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const uint4 four = ((const uint4*)from)[i];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) words[i] = ((const u32*)from)[i];
  }
}

// What a lane has of an entry: its quarter of the channels, as stored.
struct KeyWords {
  u32 words[WORDS];
  u32 exponent;

  __device__ __forceinline__ void load(const Keys& keys, int entry, int t) {
    const i64 at = keys.place(entry);
    load_words(keys.rows + at * ROW_BYTES + t * WORDS * 4, words);
    if (FORMAT != STATE_BF16) exponent = keys.exponents[at * EXPONENT_BYTES + t * LANE_CHANNELS / INDEX_GROUP];
  }

  // bf16, times 2^-64 where there is a scale.
  __device__ __forceinline__ u32 pair(int i) const {
    if (FORMAT == STATE_BF16) return words[i];
    // The code as exponent and mantissa of a bf16, which is 2^126 or 2^120 too small.
    const u32 codes = words[i / PAIR] >> (i % PAIR * (32 / (2 * PAIR)));
    const u32 bits = FORMAT == STATE_E2M1 ? (codes & 0x00080008u) << 12 | (codes & 0x00070007u) << 6
                                          : (codes & 0x00800080u) << 8 | (codes & 0x007F007Fu) << 4;
    return multiply_bf16x2(bits, twice_bf16(min(exponent + (FORMAT == STATE_E2M1 ? 62u : 56u), 254u) << 7));
  }
};

struct Scorer {
  const Q_TYPE* q;
  const FACTOR_TYPE* weights;
  u32 queries[STEPS][HEAD_TILES][4];
  float factors[HEAD_TILES][2];

  __device__ __forceinline__ Scorer(const Q_TYPE* q, const FACTOR_TYPE* weights, unsigned char*)
      : q(q), weights(weights) {
    if (PASSES == 1) load(0);
  }

  // The heads from `first` on.
  __device__ __forceinline__ void load(int first) {
    const int lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < HEAD_TILES; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int head = first + m * 16 + g + 8 * half;
        const Q_TYPE* row = q + min(head, HEADS - 1) * Q_HEAD_STRIDE + t * LANE_CHANNELS;
        u32 words[PAIRS];
        if (Q_VECTORS) {
          load_words(row, words);
        } else {
#pragma unroll
          for (int i = 0; i < PAIRS; i++) words[i] = (u32)row[2 * i + 1].bits << 16 | row[2 * i].bits;
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
          const int c = i / PAIR * 2 * PAIR + i % PAIR;
          const u32 pair = PAIR == 1 ? words[i]
                                     : __byte_perm(words[c / 2], words[(c + PAIR) / 2], c % 2 ? 0x7632 : 0x5410);
          queries[i / 2][m][i % 2 * 2 + half] = pair;
        }
        factors[m][half] = head < HEADS ? to_float(weights[head]) * (float)(SCALE) * UNSCALED : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void score(const Keys& keys, int first, int count, float* scores) {
    for (int pass = 0; pass < PASSES; pass++) {
      if (PASSES > 1) load(pass * HEAD_TILES * 16);
      score_pass(keys, first, count, scores, pass > 0);
    }
  }

  __device__ __forceinline__ void score_pass(const Keys& keys, int first, int count, float* scores, bool add) {
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    const int last = first + count - 1;
    KeyWords next;
    if (warp * 8 < count) next.load(keys, min(first + warp * 8 + g, last), t);
    for (int at = warp * 8; at < count; at += WARPS * 8) {
      const KeyWords key = next;
      if (at + WARPS * 8 < count) next.load(keys, min(first + at + WARPS * 8 + g, last), t);
      float dot[HEAD_TILES][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const u32 b[2] = {key.pair(2 * s), key.pair(2 * s + 1)};
#pragma unroll
        for (int m = 0; m < HEAD_TILES; m++) mma_m16n8k16_bf16(dot[m], queries[s][m], b);
      }
      float low = 0.0f, high = 0.0f;  // of entries 2t and 2t + 1
#pragma unroll
      for (int m = 0; m < HEAD_TILES; m++) {
        low += factors[m][0] * fmaxf(dot[m][0], 0.0f);
        high += factors[m][0] * fmaxf(dot[m][1], 0.0f);
        low += factors[m][1] * fmaxf(dot[m][2], 0.0f);
        high += factors[m][1] * fmaxf(dot[m][3], 0.0f);
      }
#pragma unroll
      for (int lanes = 4; lanes < LANES; lanes *= 2) {
        low += __shfl_xor_sync(FULL_MASK, low, lanes);
        high += __shfl_xor_sync(FULL_MASK, high, lanes);
      }
      if (g == 0) {
        float* to = scores + at + 2 * t;
        to[0] = add ? to[0] + low : low;
        to[1] = add ? to[1] + high : high;
      }
    }
  }
};

#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    select_entries(const Q_TYPE* q, const FACTOR_TYPE* weights, const u8* keys, const u8* exponents, const int* slots,
                   const int* positions, const int* block_table,
#if SPLIT
                   u32* candidate_keys,  // [T, splits, TOPK]
                   int* candidate_ids,
#else
                   int* out,
#endif
                   const StepHeader* step) {
  const int row = blockIdx.x;
  if (row >= step->tokens) return;
  const int visible = (positions[row] + 1) / RATIO;
  int begin = 0, end = visible;
#if SPLIT
  if (visible <= TOPK) return;
  const int splits = gridDim.y, share = max(SPLIT_ENTRIES, ((visible + splits - 1) / splits + 7) / 8 * 8);
  begin = blockIdx.y * share;
  end = min(visible, begin + share);
  if (begin >= end) return;
#else
  if (visible <= TOPK) {
    for (int i = threadIdx.x; i < TOPK; i += THREADS) out[(i64)row * OUT_STRIDE + i] = i < visible ? i : -1;
    return;
  }
#endif

  DYNAMIC_SHARED(memory);
  __shared__ BestScratch scratch;
  float* scores = (float*)memory;  // [CHUNK]
  u32* best_keys = (u32*)(scores + CHUNK);
  int* best_ids = (int*)(best_keys + CAPACITY);
  Best best(best_keys, best_ids, &scratch);
  Scorer scorer(q + (i64)row * Q_STRIDE, weights + (i64)row * FACTOR_STRIDE, (unsigned char*)(best_ids + CAPACITY));
  const Keys rows = {keys, exponents, block_table + (i64)slots[row] * step->table_width};

  for (int first = begin; first < end; first += CHUNK) {
    const int count = min(CHUNK, end - first);
    scorer.score(rows, first, count, scores);
    __syncthreads();
    if (best.count + CHUNK > CAPACITY) best.shrink();
    constexpr int OWN = CHUNK / THREADS;
    u32 own_keys[OWN];
    int own_ids[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int at = threadIdx.x * OWN + i;
      own_keys[i] = at < count ? sortable(scores[at]) : 0;
      own_ids[i] = first + at;
    }
    best.append(own_keys, own_ids);
  }
  best.shrink();
#if SPLIT
  const i64 to = ((i64)row * gridDim.y + blockIdx.y) * TOPK;
  for (int i = threadIdx.x; i < best.count; i += THREADS) {
    candidate_keys[to + i] = best_keys[i];
    candidate_ids[to + i] = best_ids[i];
  }
#else
  for (int i = threadIdx.x; i < TOPK; i += THREADS) out[(i64)row * OUT_STRIDE + i] = best_ids[i];
#endif
}
