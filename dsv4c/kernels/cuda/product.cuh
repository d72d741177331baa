// Rows of x by rows of a stored matrix on tensor cores, for warps that read each weight once.
#pragma once

#include "block.cuh"
#include "fragments.cuh"

// A weight is used once: it shall not push x out of the L1 cache.
__device__ __forceinline__ Vector load_once(const void* place) {
#ifdef DSV4C_EMULATE
  return *(const Vector*)place;
#else
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(place));
  return v;
#endif
}

// The rows of the matrix that a lane reads for TILES tiles: row g and row g + 8 of each.
template <int TILES>
struct Lines {
  const u8* row[TILES][2];  // at the lane's first byte
  const S_TYPE* scale[TILES][2];

  // Row `row` of `matrix` (its bytes) becomes line `half` of tile `tile`.
  __device__ __forceinline__ void set(int tile, int half, const void* matrix, const S_TYPE* scales, int row_index) {
    const int lane_bytes = (int)threadIdx.x % 4 * 16;
    row[tile][half] = (const u8*)matrix + (i64)row_index * W_STRIDE * (int)sizeof(W_TYPE) + lane_bytes;
    if (SCALED) scale[tile][half] = scales + (i64)(row_index / BLOCK_ROWS) * S_STRIDE;
  }
};

// What a lane has of one chunk.
template <int TILES>
struct Fetched {
  Vector bytes[TILES][2];
  float scale[TILES][2];     // PARTIAL
  u32 exponent[TILES][2];    // else, of e8m0

  __device__ __forceinline__ void fetch(const Lines<TILES>& lines, int chunk) {
    constexpr int ROW_BYTES = COLUMNS * 16 / Weights::ELEMENTS;
    const int t = (int)threadIdx.x % 4;
    const bool inside = ROW_BYTES % 64 == 0 || chunk * 64 + t * 16 < ROW_BYTES;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        bytes[tile][half] = inside ? load_once(lines.row[tile][half] + (i64)chunk * 64) : Vector{{0, 0, 0, 0}};
        if (Weights::PARTIAL)
          scale[tile][half] = SCALED ? to_float(lines.scale[tile][half][chunk * CHUNK / BLOCK_COLS]) : 1.0f;
        else if (SCALED)
          exponent[tile][half] = inside ? ((const u8*)lines.scale[tile][half])[chunk * 4 + t] : 0;
        else
          exponent[tile][half] = 127;
      }
  }

  __device__ __forceinline__ bool any_large() const {
    if (Weights::PARTIAL || !SCALED || Weights::LARGEST == 255) return false;
    u32 largest = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) largest = max(largest, max(exponent[tile][0], exponent[tile][1]));
    return __any_sync(FULL_MASK, largest > Weights::LARGEST);
  }
};

// Adds a chunk's products to acc: tiles of the matrix by groups of 8 rows of x, the first `columns` of which are there.
template <bool LARGE, int TILES, int NT, typename Tokens>
__device__ __forceinline__ void multiply_chunk(float (&acc)[TILES][NT][4], const Fetched<TILES>& weights,
                                               const Tokens& tokens, int chunk, int columns) {
  if (Weights::PARTIAL) {
    u32 a[TILES][2 * PARTS][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        u32 upper[4], lower[4];
        Weights::template decode<LARGE>(upper, weights.bytes[tile][0], part, 0);
        Weights::template decode<LARGE>(lower, weights.bytes[tile][1], part, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          a[tile][2 * part + i / 2][i % 2 * 2] = upper[i];
          a[tile][2 * part + i / 2][i % 2 * 2 + 1] = lower[i];
        }
      }
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (NT > 2 && n * 8 >= columns) break;
      float sum[TILES][4] = {};
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        u32 b[2][2];
        tokens.load(b, n, chunk, part);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          mma_m16n8k16_bf16(sum[tile], a[tile][2 * part], b[0]);
          mma_m16n8k16_bf16(sum[tile], a[tile][2 * part + 1], b[1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[tile][n][i] += sum[tile][i] * weights.scale[tile][i / 2];
    }
  } else {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      u32 a[TILES][2][4];
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        u32 upper[4], lower[4];
        Weights::template decode<LARGE>(upper, weights.bytes[tile][0], part, weights.exponent[tile][0]);
        Weights::template decode<LARGE>(lower, weights.bytes[tile][1], part, weights.exponent[tile][1]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          a[tile][i / 2][i % 2 * 2] = upper[i];
          a[tile][i / 2][i % 2 * 2 + 1] = lower[i];
        }
      }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (NT > 2 && n * 8 >= columns) break;
        u32 b[2][2];
        tokens.load(b, n, chunk, part);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          mma_m16n8k16_bf16(acc[tile][n], a[tile][0], b[0]);
          mma_m16n8k16_bf16(acc[tile][n], a[tile][1], b[1]);
        }
      }
    }
  }
}

// A warp's sum over the chunks first, first + step, ...: AHEAD of them are on their way while one is multiplied.
template <int AHEAD, int TILES, int NT, typename Tokens>
__device__ __forceinline__ void multiply_rows(float (&acc)[TILES][NT][4], const Lines<TILES>& lines, Tokens& tokens,
                                              int first, int step, int columns) {
  Fetched<TILES> weights[AHEAD];
#pragma unroll
  for (int d = 0; d < AHEAD; d++)
    if (first + d * step < CHUNKS) weights[d].fetch(lines, first + d * step);
  for (int base = first; base < CHUNKS; base += AHEAD * step) {
#pragma unroll
    for (int d = 0; d < AHEAD; d++) {
      const int chunk = base + d * step;
      if (chunk >= CHUNKS) break;
      tokens.enter(chunk);
      if (weights[d].any_large())
        multiply_chunk<true>(acc, weights[d], tokens, chunk, columns);
      else
        multiply_chunk<false>(acc, weights[d], tokens, chunk, columns);
      if (chunk + AHEAD * step < CHUNKS) weights[d].fetch(lines, chunk + AHEAD * step);
    }
  }
}

// Rows of x in global memory, where the L1 cache keeps them: row g of each group of 8, or null. PREPARED: in the order
// of prepared_place, else as they are.
template <int NT, bool PREPARED>
struct GlobalTokens {
  const bf16* row[NT];

  __device__ __forceinline__ void enter(int) {}

  __device__ __forceinline__ void load(u32 (&b)[2][2], int n, int chunk, int part) const {
    const int t = (int)threadIdx.x % 4;
    const int column = chunk * CHUNK + (PREPARED ? part * 32 + t * 8 : t * Weights::ELEMENTS + part * 8);
    Vector v = {{0, 0, 0, 0}};
    if (row[n] && (PREPARED || COLUMNS % CHUNK == 0 || column < COLUMNS)) v = *(const Vector*)(row[n] + column);
    if (!PREPARED && Weights::PAIRS_OF_FOUR) {
      const Vector in = v;
      v.word[0] = __byte_perm(in.word[0], in.word[2], 0x5410);
      v.word[1] = __byte_perm(in.word[0], in.word[2], 0x7632);
      v.word[2] = __byte_perm(in.word[1], in.word[3], 0x5410);
      v.word[3] = __byte_perm(in.word[1], in.word[3], 0x7632);
    }
    b[0][0] = v.word[0], b[0][1] = v.word[1], b[1][0] = v.word[2], b[1][1] = v.word[3];
  }
};

// Sums over the SHARES warps that share the K dimension, in their order, into those of warp 0 of each `group`.
// `partial` has (SHARES - 1) * TILES * NT * 32 places for each group; all threads of the block take part.
template <int SHARES, int TILES, int NT>
__device__ __forceinline__ void add_warps(float (&acc)[TILES][NT][4], float4* partial, int group, int k_warp) {
  if (SHARES == 1) return;
  float4* const own = partial + group * (SHARES - 1) * TILES * NT * LANES + threadIdx.x % LANES;
  if (k_warp > 0) {
#pragma unroll
    for (int i = 0; i < TILES * NT; i++) {
      const float(&v)[4] = acc[i / NT][i % NT];
      own[((k_warp - 1) * TILES * NT + i) * LANES] = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  __syncthreads();
  if (k_warp == 0) {
    for (int warp = 0; warp < SHARES - 1; warp++)
#pragma unroll
      for (int i = 0; i < TILES * NT; i++) {
        const float4 v = own[(warp * TILES * NT + i) * LANES];
        float(&sum)[4] = acc[i / NT][i % NT];
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
  }
}
