// moe_ffn on tensor cores (experts.cuh): experts_gate_up, or experts_down where DOWN. x and h are bf16, prepared for
// the format of the matrices (fragments.cuh). Macros: those of weight.cuh, for the matrix of one expert, and
//   EXPERT_STRIDE, S_EXPERT_STRIDE  elements from one expert to the next
//   ROWS                  I (w1 has ROWS rows, w3 the ROWS after them) or D
//   CHOICES, TILE         TILE: pairs that a block takes, 8 or a multiple
//   LIMIT, ACT_GROUP, WEIGHTS_STRIDE  gate_up
//   ROW_WARPS, K_WARPS    warps of a block: by rows of the matrix, and by columns of these
//   DEPTH                 chunks of weights on their way
//   STAGES                0: inputs come through the L1 cache; else chunks of them in shared memory, and K_WARPS is 1
//   MIN_BLOCKS            on an SM
// Parameters: inputs, list, tiles, their count, (gate_up) routing weights [T, CHOICES], matrices, scales where SCALED,
// h or parts, step.
#include "async.cuh"
#include "experts.cuh"
#include "product.cuh"
#include "step.cuh"

#if SCALED
#define SCALES_PARAMETER const S_TYPE* __restrict__ all_scales,
#define EXPERT_SCALES(expert) (all_scales + (i64)(expert) * S_EXPERT_STRIDE)
#else
#define SCALES_PARAMETER
#define EXPERT_SCALES(expert) ((const S_TYPE*)nullptr)
#endif

constexpr int X_WIDTH = CHUNKS * CHUNK;  // of a prepared row of inputs

// A warp has two tiles of 16 rows of the matrix, by all pairs of the block's tile.
constexpr int NT = TILE / 8;
constexpr int THREADS = ROW_WARPS * K_WARPS * 32;

// Row g of each group of 8 pairs, chunk by chunk through shared memory. Rows of two neighbours lie in different halves
// of the banks, so that 8 lanes read 8 different 16-byte columns of them.
struct StagedTokens {
  static constexpr int CHUNK_BYTES = CHUNK * 2;
  static constexpr int ROW_BYTES = CHUNK_BYTES % 128 == 64 ? CHUNK_BYTES : CHUNK_BYTES + 64;
  static constexpr int STAGE_BYTES = TILE * ROW_BYTES;
  static constexpr int PIECES = CHUNK_BYTES / 16;                 // of a row
  static constexpr int COPIES = (TILE * PIECES + THREADS - 1) / THREADS;  // of a thread

  unsigned char* shared;
  const bf16* row[COPIES];  // that a thread copies from; null past the pairs

  __device__ __forceinline__ void copy(int chunk) {
    if (chunk < CHUNKS) {
      unsigned char* const stage = shared + chunk % STAGES * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int piece = threadIdx.x + i * THREADS;
        if (row[i]) cp_async_16(stage + piece / PIECES * ROW_BYTES + piece % PIECES * 16, row[i] + chunk * CHUNK);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void begin() {
    for (int chunk = 0; chunk < STAGES - 1; chunk++) copy(chunk);
  }

  // All warps of the block are at the same chunk: the stage that is filled now was read before the barrier.
  __device__ __forceinline__ void enter(int chunk) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    copy(chunk + STAGES - 1);
  }

  __device__ __forceinline__ void load(u32 (&b)[2][2], int n, int chunk, int part) const {
    const int g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
    const Vector v =
        *(const Vector*)(shared + chunk % STAGES * STAGE_BYTES + (n * 8 + g) * ROW_BYTES + part * 64 + t * 16);
    b[0][0] = v.word[0], b[0][1] = v.word[1], b[1][0] = v.word[2], b[1][1] = v.word[3];
  }
};

// The row of inputs that place `place` of the list takes: of x for the first matrix, of h for the second.
__device__ __forceinline__ const bf16* input_row(const bf16* inputs, const int* list, int place) {
  return inputs + (i64)(!DOWN ? list[place] / CHOICES : place) * X_WIDTH;
}

// acc[i][n]: rows of tile i by pairs of group n.
__device__ __forceinline__ void multiply_tile(float (&acc)[2][NT][4], const Lines<2>& lines, const bf16* inputs,
                                              const int* list, const Tile& tile, unsigned char* shared) {
  const int row_warp = threadIdx.x / LANES / K_WARPS, k_warp = threadIdx.x / LANES % K_WARPS;
#if STAGES
  StagedTokens tokens;
  tokens.shared = shared;
#pragma unroll
  for (int i = 0; i < StagedTokens::COPIES; i++) {
    const int piece = threadIdx.x + i * THREADS, pair = piece / StagedTokens::PIECES;
    tokens.row[i] = pair < tile.pairs
                        ? input_row(inputs, list, tile.first + pair) + piece % StagedTokens::PIECES * 8
                        : nullptr;
  }
  tokens.begin();
#else
  GlobalTokens<NT, true> tokens;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int pair = n * 8 + (int)threadIdx.x % LANES / 4;
    tokens.row[n] = pair < tile.pairs ? input_row(inputs, list, tile.first + pair) : nullptr;
  }
#endif
  multiply_rows<DEPTH>(acc, lines, tokens, k_warp, K_WARPS, tile.pairs);
  add_warps<K_WARPS>(acc, (float4*)shared, row_warp, k_warp);
}

#if !DOWN
// A warp has 16 rows of w1 and the same of w3, a block H_COLUMNS of h, which hold whole groups of ACT_GROUP.
// Grid: blocks of H_COLUMNS, tiles.
constexpr int H_COLUMNS = 16 * ROW_WARPS;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
experts_gate_up(const bf16* __restrict__ x, const int* __restrict__ list, const Tile* __restrict__ tiles,
                const int* __restrict__ tile_count, const float* __restrict__ weights,
                const W_TYPE* __restrict__ matrices, SCALES_PARAMETER bf16* __restrict__ h,
                const StepHeader* __restrict__ step) {
  DYNAMIC_SHARED(shared);
  if ((int)blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int row_warp = threadIdx.x / LANES / K_WARPS, k_warp = threadIdx.x / LANES % K_WARPS;
  const int g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
  const int first_column = blockIdx.x * H_COLUMNS;
  Lines<2> lines;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = min(first_column + row_warp * 16 + g + half * 8, ROWS - 1);
    lines.set(0, half, matrices + (i64)tile.expert * EXPERT_STRIDE, EXPERT_SCALES(tile.expert), row);
    lines.set(1, half, matrices + (i64)tile.expert * EXPERT_STRIDE, EXPERT_SCALES(tile.expert), ROWS + row);
  }
  float acc[2][NT][4] = {};
  multiply_tile(acc, lines, x, list, tile, shared);

  // Pair by pair, so that a warp can round a group of one.
  constexpr int H_STRIDE = H_COLUMNS + 1;
  float* const product = (float*)shared;
  __syncthreads();
  if (k_warp == 0) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int pair = n * 8 + 2 * t + odd;
        if (pair >= tile.pairs) continue;
        const int entry = list[tile.first + pair];
        const float weight = weights[(i64)(entry / CHOICES) * WEIGHTS_STRIDE + entry % CHOICES];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int column = row_warp * 16 + g + half * 8;
          const float gate = acc[0][n][half * 2 + odd], up = acc[1][n][half * 2 + odd];
          const float value = clamped_swiglu(gate, up, (float)LIMIT) * weight;
          product[pair * H_STRIDE + column] = first_column + column < ROWS ? rounded_to<bf16>(value) : 0.0f;
        }
      }
  }
  __syncthreads();
  // h is prepared for w2, whose rows have ROWS columns in the same format.
  constexpr int GROUP = ACT_GROUP ? ACT_GROUP : H_COLUMNS;
  constexpr int H_WIDTH = (ROWS + CHUNK - 1) / CHUNK * CHUNK;
  for (int i = threadIdx.x / LANES; i < tile.pairs * (H_COLUMNS / GROUP); i += THREADS / LANES) {
    const int pair = i / (H_COLUMNS / GROUP), begin = i % (H_COLUMNS / GROUP) * GROUP;
    const float* const from = product + pair * H_STRIDE + begin;
    bf16* const to = h + (i64)(tile.first + pair) * H_WIDTH;
    float scale = 1;
    if (ACT_GROUP) {
      float amax = 0;
      for (int k = threadIdx.x % LANES; k < GROUP; k += LANES) amax = fmaxf(amax, fabsf(from[k]));
      scale = fp8_scale(warp_max(amax));
    }
    for (int k = threadIdx.x % LANES; k < GROUP; k += LANES) {
      const int column = first_column + begin + k;
      if (column >= H_WIDTH) continue;
      to[prepared_place(column)] = ACT_GROUP ? rounded_fp8<bf16>(from[k], scale) : to_bf16(from[k]);
    }
  }
}
#else
// Grid: blocks of 32 * ROW_WARPS rows, tiles.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
experts_down(const bf16* __restrict__ h, const int* __restrict__ list, const Tile* __restrict__ tiles,
             const int* __restrict__ tile_count, const W_TYPE* __restrict__ matrices, SCALES_PARAMETER
             float* __restrict__ parts, const StepHeader* __restrict__ step) {
  DYNAMIC_SHARED(shared);
  if ((int)blockIdx.y >= *tile_count) return;
  const Tile tile = tiles[blockIdx.y];
  const int row_warp = threadIdx.x / LANES / K_WARPS, k_warp = threadIdx.x / LANES % K_WARPS;
  const int g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
  const int first_row = (blockIdx.x * ROW_WARPS + row_warp) * 32;
  Lines<2> lines;
#pragma unroll
  for (int i = 0; i < 4; i++)
    lines.set(i / 2, i % 2, matrices + (i64)tile.expert * EXPERT_STRIDE, EXPERT_SCALES(tile.expert),
              min(first_row + g + i * 8, ROWS - 1));
  float acc[2][NT][4] = {};
  multiply_tile(acc, lines, h, list, tile, shared);
  if (k_warp > 0) return;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const int pair = n * 8 + 2 * t + odd;
      if (pair >= tile.pairs) continue;
      float* const to = parts + (i64)list[tile.first + pair] * ROWS;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_row + g + i * 8;
        if (row < ROWS) to[row] = acc[i / 2][n][i % 2 * 2 + odd];
      }
    }
}
#endif
