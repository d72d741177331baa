// placed_experts, before its experts: the router, the lists of pairs by expert, x in e4m3, counters at zero. With few
// rows the first block routes and makes the lists, the others round x (experts_lists). With more, every block routes
// and rounds some rows, and the last one that is done makes the lists (experts_rows). Macros:
//   BLOCK_ROWS                rows of a block of experts_rows; 0 for experts_lists
//   X_ROWS                    rows of the bucket
//   HIDDEN, X_STRIDE, VECTOR  x bf16 [T, HIDDEN], elements between rows; 1: 16 bytes of it can be loaded at once
//   EXPERTS, LOGITS_STRIDE    logits float [T, EXPERTS]
//   CHOICES, SCALE            experts of a row, what its weights add up to
//   BIASED, CHOICE_TYPE       1: by score, `by` is a bias [EXPERTS] of that type
//                             0: by token id, `by` is a table i64 [V, CHOICES], token_ids int [T]
//   TILE, GROUPS, MORE_COUNTERS  of the lists (place_lists.cuh)
//   ROW_COUNTERS              counters of a row, HIDDEN / 64 or none
//   F16                       of experts_rows: x in f16 instead, for experts_prefill.cu
//   THREADS                   of a block; its rows share them evenly
// Results:
//   ids int [T, CHOICES]      of experts_rows: what the last block makes the lists of
//   weights float [T, CHOICES], list int [P], places int4 [PLACES], heads int [GROUPS + 1] (place_lists.cuh)
//   xq e4m3 [T, HIDDEN]       of 32 columns, byte p < 16 is column 8 * (p / 4) + p % 4, byte 16 + p the one 4 behind it
//   xs float [T, HIDDEN/128]  their scales, powers of two
//   with F16: xq f16 [T, HIDDEN], the same numbers times a power of two of the row, xs float [T]; of 32 columns, element
//     8 * p + 2 * t + e (p, t from 0 to 3, e 0 or 1) is column 8 * t + 2 * p + e
//   counters u32 [PLACES + MORE_COUNTERS + T * ROW_COUNTERS]: 0, those of the places and rows of this step
// `topology` is a parameter where there are groups.
#include "f16_pairs.cuh"
#include "hopper.cuh"
#include "place_lists.cuh"
#include "quantize.cuh"
#include "routing.cuh"
#include "step.cuh"

constexpr int ROW_THREADS = THREADS / (BLOCK_ROWS ? BLOCK_ROWS : 1);  // of experts_rows, those of a row

constexpr int OCTETS = HIDDEN / 8;      // of a row: a thread rounds eight columns
constexpr int SCALE_OCTETS = 128 / 8;   // that share a scale
constexpr int COUNTER_OCTETS = 64 / 8;  // and a counter
static_assert(HIDDEN % 128 == 0 && CHOICES <= LANES && (ROW_COUNTERS == 0 || ROW_COUNTERS == HIDDEN / 64));

struct __align__(16) Octet {
  bf16 values[8];
};

__device__ __forceinline__ Octet load_octet(const bf16* x) {
#if VECTOR
  const uint4 bits = *(const uint4*)x;
  return *(const Octet*)&bits;
#else
  Octet octet;
#pragma unroll
  for (int i = 0; i < 8; i++) octet.values[i] = x[i];
  return octet;
#endif
}

struct Rounded {
  u8* xq;
  float* xs;
  u32* counters;  // of rows
};

// Eight columns in e4m3; the other lanes have the rest of their 128. All lanes come.
struct Codes {
  float scale;
  u32 of[2];

  __device__ __forceinline__ explicit Codes(const Octet& octet) : of{0, 0} {
    float amax = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(to_float(octet.values[i])));
    scale = fp8_scale(warp_max<SCALE_OCTETS>(amax));
    const float inverse = inverse_power(scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float value = fminf(fmaxf(to_float(octet.values[i]) * inverse, -448.0f), 448.0f);
      of[i / 4] |= (u32)to_e4m3(value).bits << 8 * (i % 4);
    }
  }
};

// Octet `index` of all rows, `valid` where it is of the step.
__device__ __forceinline__ void round_octet(const Octet& octet, int index, bool valid, const Rounded& to) {
  const Codes codes(octet);
  if (!valid) return;
  u32* const at = (u32*)(to.xq + (i64)(index / 4) * 32 + index % 4 * 4);
  at[0] = codes.of[0];
  at[4] = codes.of[1];
  if (index % SCALE_OCTETS == 0) to.xs[index / SCALE_OCTETS] = codes.scale;
  if (ROW_COUNTERS && index % COUNTER_OCTETS == 0) to.counters[index / COUNTER_OCTETS] = 0;
}

#if BLOCK_ROWS && F16
// A row, as f16. What brings the columns of its largest scale to the top of f16's range is the row's multiplier: other
// scales may be 2^22 smaller before anything is lost. All threads of the block come.
template <int Own>
__device__ __forceinline__ void round_row(const Octet (&octets)[Own], int row, bool valid, const Rounded& to) {
  constexpr float LARGEST = 128.0f;  // times 448, the largest code
  constexpr int ROW_WARPS = ROW_THREADS / LANES;
  __shared__ float partial[THREADS / LANES];
  const int warp = (int)threadIdx.x / LANES, thread = (int)threadIdx.x % ROW_THREADS;
  float largest = 0;
#pragma unroll
  for (int i = 0; i < Own; i++) largest = fmaxf(largest, Codes(octets[i]).scale);
  largest = warp_max(largest);
  if (thread % LANES == 0) partial[warp] = largest;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < ROW_WARPS; other++)
    largest = fmaxf(largest, partial[warp / ROW_WARPS * ROW_WARPS + other]);
  const float multiplier = LARGEST * inverse_power(largest);
  if (valid && thread == 0) to.xs[row] = multiplier;
#pragma unroll
  for (int i = 0; i < Own; i++) {
    const Codes codes(octets[i]);
    const int own = i * ROW_THREADS + thread;
    if (!valid || own >= OCTETS) continue;
    const u32 scale = twice_f16(codes.scale * multiplier);
    u32* const at = (u32*)(to.xq + ((i64)row * HIDDEN + own / 4 * 32) * 2) + own % 4;
    at[0] = multiply_f16(f16_of_low_e4m3(codes.of[0]), scale);
    at[4] = multiply_f16(f16_of_high_e4m3(codes.of[0]), scale);
    at[8] = multiply_f16(f16_of_low_e4m3(codes.of[1]), scale);
    at[12] = multiply_f16(f16_of_high_e4m3(codes.of[1]), scale);
  }
}
#endif

struct Router {
  const float* logits;
  const CHOICE_TYPE* by;
#if !BIASED
  const int* token_ids;
#endif
};
#if BIASED
#define ROUTER {logits, by}
#else
#define ROUTER {logits, by, token_ids}
#endif

// Experts of some rows before the choice, in shared memory.
struct Candidates {
  u32* keys;      // that they are chosen by; BIASED only
  float* values;  // that their weights come from: BIASED scores, else logits
};

// The candidates of Rows rows from `first_row` on, first the part of a thread of Threads in registers. Rows up to
// X_ROWS can be read; what is beyond those of the step is of no use.
template <int Rows, int Threads>
struct Staging {
  static constexpr int COUNT = Rows * EXPERTS, OWN = (COUNT + Threads - 1) / Threads;
  int thread;
  float logits[OWN], biases[OWN];

  __device__ __forceinline__ Staging(const Router& router, int first_row, int thread) : thread(thread) {
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      const int index = min(own * Threads + thread, COUNT - 1);
      logits[own] = router.logits[(i64)(first_row + index / EXPERTS) * LOGITS_STRIDE + index % EXPERTS];
#if BIASED
      biases[own] = to_float(router.by[index % EXPERTS]);
#else
      biases[own] = 0;
#endif
    }
    // All loads are to be under way before the first value is waited for.
#pragma unroll
    for (int own = 0; own < OWN; own++) keep(logits[own]), keep(biases[own]);
  }

  __device__ __forceinline__ void write(const Candidates& to) const {
#pragma unroll
    for (int own = 0; own < OWN; own++) {
      const int index = own * Threads + thread;
      if (index >= COUNT) break;
      const float value = BIASED ? score_of(logits[own]) : logits[own];
      to.values[index] = value;
      if (BIASED) to.keys[index] = ordered(value + biases[own]);
    }
  }
};

// A warp routes a row of the step: its experts and their scores go to shared memory.
__device__ __forceinline__ void route_row(const Router& router, int row, const Candidates& of, int* chosen,
                                          float* scores, float* weights) {
  const int lane = (int)threadIdx.x % LANES;
#if BIASED
  ExpertRanking<EXPERTS> ranking([&](int expert) { return of.keys[expert]; });
#pragma unroll 1
  for (int choice = 0; choice < CHOICES; choice++) {
    int expert;
    if (!ranking.take(expert)) continue;
    chosen[choice] = expert;
    scores[choice] = of.values[expert];
  }
#else
  if (lane < CHOICES) {
    const int expert = (int)router.by[(i64)router.token_ids[row] * CHOICES + lane];
    chosen[lane] = expert;
    scores[lane] = score_of(of.values[expert]);
  }
#endif
  __syncwarp();
  if (lane < CHOICES) weights[(i64)row * CHOICES + lane] = weight_of<CHOICES>(scores, lane, (float)SCALE);
}

static_assert(EXPERTS <= THREADS && GROUPS + 1 <= THREADS && ROW_THREADS % LANES == 0);  // place_lists.cuh

#if !BLOCK_ROWS
// Dynamic shared memory: keys and values of the candidates of all rows, then the histograms.
constexpr int CANDIDATES = X_ROWS * EXPERTS;
static_assert(X_ROWS <= THREADS / LANES);

// Many threads would make the compiler aim at two blocks on an SM, and spill; there is one such block in all.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 512 ? 1 : 0)
experts_lists(const float* __restrict__ logits, const CHOICE_TYPE* __restrict__ by,
#if !BIASED
              const int* __restrict__ token_ids,
#endif
              const bf16* __restrict__ x,
#if GROUPS > 1
              const int* __restrict__ topology,
#endif
              float* __restrict__ weights, int* __restrict__ list, Place* __restrict__ places, int* __restrict__ heads,
              u8* __restrict__ xq, float* __restrict__ xs, u32* __restrict__ counters,
              const StepHeader* __restrict__ step) {
  launch_dependents();
  const int thread = (int)threadIdx.x;
  // A bucket of one row has one: the token id need not wait for the step.
  const int rows = X_ROWS == 1 ? 1 : step->tokens;
  if (blockIdx.x > 0) {
    const int index = ((int)blockIdx.x - 1) * THREADS + thread, row = index / OCTETS;
    Octet octet = {};
    if (row < X_ROWS) octet = load_octet(x + (i64)row * X_STRIDE + index % OCTETS * 8);
    round_octet(octet, index, row < rows, {xq, xs, counters + PLACES + MORE_COUNTERS});
    return;
  }
  DYNAMIC_SHARED(shared);
  __shared__ int chosen[PAIRS];
  __shared__ float scores[PAIRS];
  const Candidates candidates = {(u32*)shared, (float*)shared + CANDIDATES};
  u32* const histograms = (u32*)shared + 2 * CANDIDATES;
  const Router router = ROUTER;
  const Rank rank(TOPOLOGY);
  Staging<X_ROWS, THREADS>(router, 0, thread).write(candidates);
  clear_histograms(histograms);
  __syncthreads();
  const int row = thread / LANES;
  if (row < rows) {
    const Candidates own = {candidates.keys + row * EXPERTS, candidates.values + row * EXPERTS};
    route_row(router, row, own, chosen + row * CHOICES, scores + row * CHOICES, weights);
  }
  __syncthreads();
  list_places(chosen, rows * CHOICES, rank, histograms, {list, places, heads, counters});
}
#endif

#if BLOCK_ROWS
// Whether this block is the last one to come here; what the others wrote before is there for it. `arrivals` is zero
// before the launch and behind it. Nobody else counts there meanwhile: a session has a header and a stream of its own,
// in which only the experts' launch may start early, and that one waits for the whole grid. All threads come.
__device__ __forceinline__ bool arrives_last(u32* arrivals) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = fetch_add_acq_rel(arrivals, 1) == gridDim.x - 1;
    if (last) *arrivals = 0;  // for the next launch
  }
  __syncthreads();
  return last;
}

// Dynamic shared memory: the histograms. `ids` without __restrict__: other blocks write them in this launch. Where
// there are more blocks than SMs, two are to fit on one.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCK_ROWS > 1 ? 2 : 1)
experts_rows(const float* __restrict__ logits, const CHOICE_TYPE* __restrict__ by,
#if !BIASED
             const int* __restrict__ token_ids,
#endif
             const bf16* __restrict__ x,
#if GROUPS > 1
             const int* __restrict__ topology,
#endif
             int* ids, float* __restrict__ weights, int* __restrict__ list, Place* __restrict__ places,
             int* __restrict__ heads, u8* __restrict__ xq, float* __restrict__ xs, u32* __restrict__ counters,
             StepHeader* step) {
  launch_dependents();
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) u32 keys[BLOCK_ROWS][EXPERTS];
  __shared__ float values[BLOCK_ROWS][EXPERTS];
  __shared__ int chosen[BLOCK_ROWS][CHOICES];
  __shared__ float scores[BLOCK_ROWS][CHOICES];
  const int thread = (int)threadIdx.x % ROW_THREADS, own_row = (int)threadIdx.x / ROW_THREADS;
  const int row = (int)blockIdx.x * BLOCK_ROWS + own_row, readable_row = min(row, X_ROWS - 1);
  const int tokens = step->tokens;
  const bool valid = row < tokens;
  const Router router = ROUTER;
  const Rank rank(TOPOLOGY);
  const Staging<1, ROW_THREADS> staging(router, readable_row, thread);
  constexpr int OWN_OCTETS = (OCTETS + ROW_THREADS - 1) / ROW_THREADS;
  Octet octets[OWN_OCTETS] = {};
#pragma unroll
  for (int i = 0; i < OWN_OCTETS; i++) {
    const int own = i * ROW_THREADS + thread;
    if (own < OCTETS) octets[i] = load_octet(x + (i64)readable_row * X_STRIDE + own * 8);
  }
#if F16
  round_row(octets, row, valid, {xq, xs, counters});
#else
#pragma unroll
  for (int i = 0; i < OWN_OCTETS; i++) {
    const int own = i * ROW_THREADS + thread;
    round_octet(octets[i], row * OCTETS + own, valid && own < OCTETS, {xq, xs, counters + PLACES + MORE_COUNTERS});
  }
#endif
  staging.write({keys[own_row], values[own_row]});
  __syncthreads();
  if (valid && thread < LANES) {
    route_row(router, row, {keys[own_row], values[own_row]}, chosen[own_row], scores[own_row], weights);
    if (thread < CHOICES) ids[(i64)row * CHOICES + thread] = chosen[own_row][thread];
  }
  if (!arrives_last(&step->arrivals)) return;
  u32* const histograms = (u32*)shared;
  clear_histograms(histograms);
  __syncthreads();
  list_places(ids, tokens * CHOICES, rank, histograms, {list, places, heads, counters});
}
#endif
