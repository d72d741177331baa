// Attention of bf16 queries over the keys of attention_keys.cuh, by tensor cores (spec 2.6).
//
// Macros, beside those of attention_keys.cuh:
//   HEADS, HEAD_TILE          heads; how many of them (16, 32 or 64) share the decoding of a key
//   SCALE                     of the scores
//   Q_STRIDE, Q_HEAD_STRIDE   of q bf16 [T, HEADS, HEAD_DIM]
//   OUT_STRIDE, OUT_HEAD_STRIDE
//   SINK_TYPE                 of sink [HEADS]
//   Q_VECTORS, KEY_VECTORS    1: rows of q, of every key start and end on multiples of 16 bytes
//   ROTATE                    1: the conjugate rotation at the row's position comes last
//   SPLIT                     1: the keys are split over blocks, each of which leaves its part for attention_combine.cu
//
// A block takes a row, HEAD_TILE heads and its split of the keys: grid [T, ceil(HEADS/HEAD_TILE), splits]. It goes over
// the keys in tiles of 64. Their rows are copied as they are while the tile before is in work, decoded to bf16 (exact),
// multiplied with the queries (each warp 16 heads and a share of the keys), and, weighted, summed up (each warp all
// heads and a share of the channels). The largest score so far scales the sums; the sink is part of it from the start,
// and of the denominator at the end.
#include "async.cuh"
#include "attention_keys.cuh"
#include "block.cuh"
#include "mma.cuh"
#include "rotary.cuh"

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int KEY_TILE = 64;
constexpr int WIDTH = (HEAD_DIM + 63) / 64 * 64;
constexpr int STRIDE = WIDTH + 8;  // eight rows of a matrix lie in different banks
constexpr int WEIGHT_STRIDE = KEY_TILE + 8;
constexpr int STEP_BYTES = 2 * HEAD_DIM;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
#if HAS_ENTRIES
constexpr int RAW_BYTES = (larger(STEP_BYTES, larger(RING_BYTES, ENTRY_BYTES)) + 15) / 16 * 16;
constexpr int RAW_EXPONENTS = (larger(8, larger(RING_EXPONENT_BYTES, ENTRY_EXPONENT_BYTES)) + 7) / 8 * 8;
#else
constexpr int RAW_BYTES = (larger(STEP_BYTES, RING_BYTES) + 15) / 16 * 16;
constexpr int RAW_EXPONENTS = (larger(8, RING_EXPONENT_BYTES) + 7) / 8 * 8;
#endif
constexpr int ROW_TILES = HEAD_TILE / 16;          // of scores
constexpr int KEY_WARPS = WARPS / ROW_TILES;       // that share 16 heads
constexpr int SCORE_TILES = KEY_TILE / KEY_WARPS / 8;  // of 8 keys, of a warp
constexpr int CHANNELS = WIDTH / WARPS;            // of the sums, of a warp
constexpr int SUM_TILES = CHANNELS / 8;
constexpr int KEYS_OF_WARP = KEY_TILE / WARPS;     // to copy and decode
constexpr int PLACES = THREADS;                    // of keys, found at a time

// Dynamic shared memory, in this order; the selector counts it the same way.
struct Shared {
  u16* queries;   // [HEAD_TILE, STRIDE]
  u16* keys;      // [KEY_TILE, STRIDE]
  u16* weights;   // [HEAD_TILE, WEIGHT_STRIDE]
  u8* raw;        // [KEY_TILE, RAW_BYTES]
  u8* exponents;  // [KEY_TILE, RAW_EXPONENTS]
};

__device__ __forceinline__ u32 decode_e4m3_pair(u32 halves, u32 scale) {
  // Each half is a code in its high byte; moved to where bf16 has exponent and mantissa, with a bias 120 larger.
  const u32 bits = (halves & 0x80008000u) | (halves & 0x7F007F00u) >> 4;
  return multiply_bf16x2(multiply_bf16x2(bits, twice_bf16(247u << 7)), scale);
}

// 16 codes of one group to bf16.
__device__ __forceinline__ void decode_e4m3(const u8* codes, u8 exponent, u16* to) {
  const uint4 four = *(const uint4*)codes;
  const u32 words[4] = {four.x, four.y, four.z, four.w};
  const u32 scale = twice_bf16(exponent ? (u32)exponent << 7 : 0x40u);
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[2 * i] = decode_e4m3_pair(__byte_perm(words[i], 0, 0x1404), scale);
    pairs[2 * i + 1] = decode_e4m3_pair(__byte_perm(words[i], 0, 0x3424), scale);
  }
  ((uint4*)to)[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  ((uint4*)to)[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// Bytes of a key's row that are read.
template <int FORMAT>
__device__ constexpr int stored_bytes() {
  return FORMAT == STATE_KV ? HEAD_DIM + ROTARY : STEP_BYTES;
}

// Starts copying a row to shared memory; a whole warp. Its own lanes alone see it, after cp_async_wait and __syncwarp.
template <int BYTES, int EXPONENT_BYTES>
__device__ __forceinline__ void copy_row(const KeyPlace& place, u8* to, u8* exponents, int lane) {
  if (KEY_VECTORS) {
    for (int c = lane; c < (BYTES + 15) / 16; c += LANES) cp_async_16(to + 16 * c, place.row + 16 * c);
    if (lane < EXPONENT_BYTES / 8) cp_async_8(exponents + 8 * lane, place.exponents + 8 * lane);
  } else {
    for (int c = lane; c < BYTES; c += LANES) to[c] = place.row[c];
    for (int c = lane; c < EXPONENT_BYTES; c += LANES) exponents[c] = place.exponents[c];
  }
}

template <int FORMAT>
__device__ __forceinline__ void decode_row(const u8* raw, const u8* exponents, int source, u16* to, int lane) {
  constexpr int PLAIN = HEAD_DIM - ROTARY;
  if (KEY_VECTORS && FORMAT == STATE_BF16 && HEAD_DIM % 8 == 0) {
    for (int c = lane; c < HEAD_DIM / 8; c += LANES) ((uint4*)to)[c] = ((const uint4*)raw)[c];
  } else if (KEY_VECTORS && FORMAT == STATE_KV && PLAIN % 16 == 0 && ROTARY % 8 == 0) {
    for (int c = lane; c < PLAIN / 16; c += LANES) decode_e4m3(raw + 16 * c, exponents[c / 4], to + 16 * c);
    // From the last lane down: the first ones have more codes.
    for (int c = LANES - 1 - lane; c < ROTARY / 8; c += LANES)
      ((uint4*)(to + PLAIN))[c] = ((const uint4*)(raw + PLAIN))[c];
  } else {
    for (int c = lane; c < HEAD_DIM; c += LANES) to[c] = to_bf16(key_value(raw, exponents, source, c)).bits;
  }
}

// Where the keys of several tiles from `key` on lie, a thread each: it takes a chain of loads to know.
__device__ __forceinline__ void find_places(const KeyPlanes& planes, const RowKeys& keys, int key, KeyPlace* places) {
  places[threadIdx.x] = keys.place(planes, key + threadIdx.x);
  __syncthreads();
}

// Starts copying the warp's keys of a tile.
__device__ __forceinline__ void copy_keys(const KeyPlace* places, const Shared& shared, int warp, int lane) {
  const int own = warp * KEYS_OF_WARP;
#pragma unroll 4
  for (int i = 0; i < KEYS_OF_WARP; i++) {
    const KeyPlace place = places[own + i];
    u8* raw = shared.raw + (own + i) * RAW_BYTES;
    u8* exponents = shared.exponents + (own + i) * RAW_EXPONENTS;
    if (place.source == STEP_KEY) copy_row<STEP_BYTES, 0>(place, raw, exponents, lane);
    if (place.source == RING_KEY)
      copy_row<stored_bytes<RING_FORMAT>(), RING_EXPONENT_BYTES>(place, raw, exponents, lane);
#if HAS_ENTRIES
    if (place.source == ENTRY_KEY)
      copy_row<stored_bytes<ENTRY_FORMAT>(), ENTRY_EXPONENT_BYTES>(place, raw, exponents, lane);
#endif
  }
  cp_async_commit();
}

// The copied keys of the warp as bf16 rows; zeros for keys that are none, which `present` tells.
__device__ __forceinline__ void decode_keys(const KeyPlace* places, int* present, const Shared& shared, int warp,
                                            int lane) {
  const int own = warp * KEYS_OF_WARP;
#pragma unroll 2
  for (int i = 0; i < KEYS_OF_WARP; i++) {
    const int source = places[own + i].source;
    const u8* raw = shared.raw + (own + i) * RAW_BYTES;
    const u8* exponents = shared.exponents + (own + i) * RAW_EXPONENTS;
    u16* to = shared.keys + (own + i) * STRIDE;
    if (source == STEP_KEY) decode_row<STATE_BF16>(raw, exponents, source, to, lane);
    if (source == RING_KEY) decode_row<RING_FORMAT>(raw, exponents, source, to, lane);
#if HAS_ENTRIES
    if (source == ENTRY_KEY) decode_row<ENTRY_FORMAT>(raw, exponents, source, to, lane);
#endif
    if (source == NO_KEY)
      for (int c = lane; c < WIDTH / 8; c += LANES) ((uint4*)to)[c] = make_uint4(0, 0, 0, 0);
    if (lane == 0) present[own + i] = source != NO_KEY;
  }
}

// Starts copying the queries; zeros for heads and channels that are none.
__device__ __forceinline__ void copy_queries(const bf16* q, int head, u16* to) {
  if (Q_VECTORS && HEAD_DIM % 8 == 0) {
    for (int i = threadIdx.x; i < HEAD_TILE * (WIDTH / 8); i += THREADS) {
      const int h = i / (WIDTH / 8), c = i % (WIDTH / 8) * 8;
      const bool valid = head + h < HEADS && c < HEAD_DIM;
      cp_async_16(to + h * STRIDE + c, valid ? q + (head + h) * Q_HEAD_STRIDE + c : q, valid);
    }
  } else {
    for (int i = threadIdx.x; i < HEAD_TILE * WIDTH; i += THREADS) {
      const int h = i / WIDTH, c = i % WIDTH;
      const bool valid = head + h < HEADS && c < HEAD_DIM;
      to[h * STRIDE + c] = valid ? q[(head + h) * Q_HEAD_STRIDE + c].bits : 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const bf16* q, const KV_TYPE* kv, const u8* ring, const u8* ring_exponents, const u8* entries,
              const u8* entry_exponents, const int* selected, const SINK_TYPE* sink, const int* slots,
              const int* positions, const int* block_table, const float* frequencies,
#if SPLIT
              float* sums,       // [T, splits, HEADS, HEAD_DIM]
              float* peaks,      // [T, splits, HEADS, 2]: the largest score, the sum of the weights
#else
              bf16* out,
#endif
              const StepHeader* step) {
  const int row = blockIdx.x, head = blockIdx.y * HEAD_TILE;
  if (row >= step->tokens) return;
  const KeyPlanes planes = {kv,       ring,  ring_exponents, entries,    entry_exponents,
                            selected, slots, positions,      block_table};
  __shared__ RowKeys keys;
  if (threadIdx.x == 0) keys.find(planes, step, row);
  __syncthreads();
  int key = 0, end = keys.count;
#if SPLIT
  const int tiles = (keys.count + KEY_TILE - 1) / KEY_TILE;
  const int share = (tiles + gridDim.z - 1) / gridDim.z * KEY_TILE;
  key = blockIdx.z * share;
  end = min(end, key + share);
  if (key >= end) return;
#endif

  DYNAMIC_SHARED(memory);
  Shared shared;
  shared.queries = (u16*)memory;
  shared.keys = shared.queries + HEAD_TILE * STRIDE;
  shared.weights = shared.keys + KEY_TILE * STRIDE;
  shared.raw = (u8*)(shared.weights + HEAD_TILE * WEIGHT_STRIDE);
  shared.exponents = shared.raw + KEY_TILE * RAW_BYTES;
  __shared__ KeyPlace places[PLACES];
  __shared__ int present[KEY_TILE];
  __shared__ float peak_parts[KEY_WARPS][HEAD_TILE];
  __shared__ float total_parts[KEY_WARPS][HEAD_TILE];
  __shared__ float corrections[HEAD_TILE];  // then the peaks

  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
  const int first_row = warp % ROW_TILES * 16, key_warp = warp / ROW_TILES;
  const int first_key = key_warp * SCORE_TILES * 8, first_channel = warp * CHANNELS;

  copy_queries(q + (i64)row * Q_STRIDE, head, shared.queries);
  find_places(planes, keys, key, places);
  copy_keys(places, shared, warp, lane);
  for (int i = threadIdx.x; i < KEY_TILE; i += THREADS)
    for (int c = HEAD_DIM; c < WIDTH; c++) shared.keys[i * STRIDE + c] = 0;

  // Of heads first_row + g and first_row + g + 8.
  float peak[2], total[2] = {0.0f, 0.0f};
  for (int i = 0; i < 2; i++) {
    const int h = head + first_row + g + 8 * i;
    peak[i] = fmaxf(h < HEADS ? to_float(sink[h]) : 0.0f, -1e30f);
  }
  float sum[ROW_TILES][SUM_TILES][4] = {};

  int found = 0;  // the tile's among the places
  for (; key < end; key += KEY_TILE) {
    cp_async_wait<0>();
    __syncthreads();  // all are done with the tile before
    decode_keys(places + found, present, shared, warp, lane);
    __syncthreads();
    if (key + KEY_TILE < end) {
      found = (found + KEY_TILE) % PLACES;
      if (found == 0) find_places(planes, keys, key + KEY_TILE, places);
      copy_keys(places + found, shared, warp, lane);
    }

    float score[SCORE_TILES][4] = {};
#pragma unroll 2
    for (int c = 0; c < WIDTH; c += 32) {
      u32 a[2][4];
      const u16* query = shared.queries + (first_row + lane % 16) * STRIDE + c + lane / 16 * 8;
      ldmatrix_x4(a[0], query);
      ldmatrix_x4(a[1], query + 16);
#pragma unroll
      for (int n = 0; n < SCORE_TILES; n++) {
        u32 b[4];
        ldmatrix_x4(b, shared.keys + (first_key + n * 8 + lane % 8) * STRIDE + c + lane / 8 * 8);
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        mma_m16n8k16_bf16(score[n], a[0], low);
        mma_m16n8k16_bf16(score[n], a[1], high);
      }
    }

    float largest[2] = {NO_SCORE, NO_SCORE};
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool valid = present[first_key + n * 8 + 2 * t + i % 2];
        score[n][i] = valid ? score[n][i] * (float)(SCALE) : NO_SCORE;
        largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      largest[i] = warp_max<4>(largest[i]);
      if (t == 0) peak_parts[key_warp][first_row + g + 8 * i] = largest[i];
    }
    __syncthreads();
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float next = peak[i];
#pragma unroll
      for (int part = 0; part < KEY_WARPS; part++) next = fmaxf(next, peak_parts[part][first_row + g + 8 * i]);
      correction[i] = __expf(peak[i] - next);
      peak[i] = next;
      total[i] *= correction[i];
      if (key_warp == 0 && t == 0) corrections[first_row + g + 8 * i] = correction[i];
    }
#pragma unroll
    for (int n = 0; n < SCORE_TILES; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float low = __expf(score[n][2 * i] - peak[i]), high = __expf(score[n][2 * i + 1] - peak[i]);
        total[i] += low + high;
        u16* weight = shared.weights + (first_row + g + 8 * i) * WEIGHT_STRIDE + first_key + n * 8 + 2 * t;
        *(u32*)weight = pack_bf16(low, high);
      }
    }
    __syncthreads();

#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
      const float low = corrections[m * 16 + g], high = corrections[m * 16 + g + 8];
#pragma unroll
      for (int n = 0; n < SUM_TILES; n++) {
        sum[m][n][0] *= low;
        sum[m][n][1] *= low;
        sum[m][n][2] *= high;
        sum[m][n][3] *= high;
      }
    }
#pragma unroll 1  // the sums leave no registers for two
    for (int k = 0; k < KEY_TILE; k += 32) {
      u32 a[ROW_TILES][2][4];
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        const u16* weight = shared.weights + (m * 16 + lane % 16) * WEIGHT_STRIDE + k + lane / 16 * 8;
        ldmatrix_x4(a[m][0], weight);
        ldmatrix_x4(a[m][1], weight + 16);
      }
#pragma unroll
      for (int n = 0; n < SUM_TILES; n++) {
        u32 b[4];
        ldmatrix_x4_trans(b, shared.keys + (k + lane) * STRIDE + first_channel + n * 8);
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          mma_m16n8k16_bf16(sum[m][n], a[m][0], low);
          mma_m16n8k16_bf16(sum[m][n], a[m][1], high);
        }
      }
    }
  }

  __syncthreads();  // the corrections are read
#pragma unroll
  for (int i = 0; i < 2; i++) {
    total[i] = warp_sum<4>(total[i]);
    if (t == 0) total_parts[key_warp][first_row + g + 8 * i] = total[i];
    if (key_warp == 0 && t == 0) corrections[first_row + g + 8 * i] = peak[i];
  }
  __syncthreads();

#if SPLIT
  const i64 first = ((i64)row * gridDim.z + blockIdx.z) * HEADS + head;
  for (int h = threadIdx.x; h < HEAD_TILE && head + h < HEADS; h += THREADS) {
    float sum_of_weights = 0.0f;
    for (int part = 0; part < KEY_WARPS; part++) sum_of_weights += total_parts[part][h];
    peaks[2 * (first + h)] = corrections[h];
    peaks[2 * (first + h) + 1] = sum_of_weights;
  }
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int h = m * 16 + g + 8 * i;
      if (head + h >= HEADS) continue;
#pragma unroll
      for (int n = 0; n < SUM_TILES; n++) {
        const int c = first_channel + n * 8 + 2 * t;
        if (c < HEAD_DIM)
          *(float2*)(sums + (first + h) * HEAD_DIM + c) = make_float2(sum[m][n][2 * i], sum[m][n][2 * i + 1]);
      }
    }
  }
#else
  float divisor[ROW_TILES][2];
#pragma unroll
  for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int h = m * 16 + g + 8 * i;
      float sum_of_weights = head + h < HEADS ? __expf(to_float(sink[head + h]) - corrections[h]) : 1.0f;
      for (int part = 0; part < KEY_WARPS; part++) sum_of_weights += total_parts[part][h];
      divisor[m][i] = sum_of_weights;
    }
  }
#pragma unroll
  for (int n = 0; n < SUM_TILES; n++) {
    const int c = first_channel + n * 8 + 2 * t;
    if (c >= HEAD_DIM) continue;
    const bool turns = ROTATE && c >= HEAD_DIM - ROTARY;
    Rotation turn = {1.0f, 0.0f};
    if (turns) turn = rotation_at(keys.position, frequencies[(c - (HEAD_DIM - ROTARY)) / 2]);
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int h = m * 16 + g + 8 * i;
        if (head + h >= HEADS) continue;
        float even = sum[m][n][2 * i] / divisor[m][i], odd = sum[m][n][2 * i + 1] / divisor[m][i];
        if (turns) {  // on what a rope behind the attention would read
          even = rounded_to<bf16>(even);
          odd = rounded_to<bf16>(odd);
          rotate_back(even, odd, turn);
        }
        *(u32*)(out + (i64)row * OUT_STRIDE + (head + h) * OUT_HEAD_STRIDE + c) = pack_bf16(even, odd);
      }
    }
  }
#endif
}
