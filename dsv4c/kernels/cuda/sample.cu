// One token a row of logits float [R, VOCAB]: the largest one (temperature 0), or a draw among the first top_k, then
// the shortest prefix of probability top_p, in the order of logit, then id. Macros:
//   VOCAB, LOGITS_STRIDE
//   VECTOR      elements of a load of logits: 4, or 1 where rows are not aligned
//   MASKED      whether there is a mask; the step says whether it is used
//   MASK_WORDS  words of a row of it
//   SHARED_BYTES  dynamic shared memory
// Parameters: those of the operator (mask u32 where MASKED), then out int [R]. A block has a row.
//
// A weight exp((x - max) / temperature) is a whole number of 2^-40, so that sums do not depend on the order of their
// terms and need no sorted vocabulary: candidates are counted and weighed in bins, and only the bin in which a rank or
// a sum is reached is looked at closer. What is lighter than 2^-40 of the heaviest is not counted at all; no draw falls
// on it.
#include "block.cuh"
#include "dtype.cuh"
#include "step.cuh"

#if MASKED
#define MASK_PARAMETER const u32 *__restrict__ mask,
#else
#define MASK_PARAMETER
#endif

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / LANES;
constexpr int BINS = 2048;
constexpr int BINS_A_THREAD = BINS / THREADS;
constexpr int LIST = 2048;
constexpr int FEW = 8 / VECTOR, MANY = 16 / VECTOR;  // loads of a thread under way
constexpr int WEIGHT_BITS = 40;

// First word of Philox-4x32-10 (Salmon et al., SC 2011) for a 64-bit key and the low half of the counter.
__device__ __forceinline__ u32 philox(u64 key, u64 counter) {
  u32 c[4] = {(u32)counter, (u32)(counter >> 32), 0, 0};
  u32 k0 = (u32)key, k1 = (u32)(key >> 32);
  for (int round = 0; round < 10; round++) {
    const u64 low = (u64)c[0] * 0xD2511F53u, high = (u64)c[2] * 0xCD9E8D57u;
    const u32 first = (u32)(high >> 32) ^ c[1] ^ k0, third = (u32)(low >> 32) ^ c[3] ^ k1;
    c[0] = first, c[1] = (u32)high, c[2] = third, c[3] = (u32)low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c[0];
}

// Ascends with the logit; equal logits have equal keys, NaN the largest; 0 is below all of them.
__device__ __forceinline__ u32 key_of(float x) {
  if (x != x) return 0xFFFFFFFFu;
  const u32 bits = x == 0.0f ? 0u : float_to_bits(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr u32 MINUS_INFINITY = 0x007FFFFFu, PLUS_INFINITY = 0xFF800000u;  // keys

// The logit of a key; zero for either sign.
__device__ __forceinline__ float value_of(u32 key) {
  return bits_to_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// What the weights of a row come from.
struct Weigher {
  float peak;                // the largest logit
  float factor, factor_low;  // log2(e) / temperature, in two parts
  float bins_a_unit;         // of the first level
};

// exp((x - peak) / temperature) in units of 2^-40, right to about 2^-24 of itself.
__device__ __forceinline__ u64 weight_of(float x, const Weigher& w) {
  if (x == w.peak) return (u64)1 << WEIGHT_BITS;
  // The exact difference is gap + lost, its product with both factors power + rest.
  const float gap = x - w.peak, other = gap + w.peak;
  const float lost = (x - other) + ((other - gap) - w.peak);
  const float power = gap * w.factor;
  if (!(power > -(float)(WEIGHT_BITS + 1))) return 0;
  const float rest = fmaf(gap, w.factor, -power) + fmaf(gap, w.factor_low, lost * w.factor);
  const float whole = rintf(power);
  const float f = (power - whole) + rest;  // -1/2 to 1/2
  // 2^f - 1: ln(2)^k / k!
  float p = 1.5252734e-5f;
  p = fmaf(p, f, 1.5403530e-4f);
  p = fmaf(p, f, 1.3333558e-3f);
  p = fmaf(p, f, 9.6181291e-3f);
  p = fmaf(p, f, 5.5504109e-2f);
  p = fmaf(p, f, 2.4022651e-1f);
  p = fmaf(p, f, 6.9314718e-1f);
  const u32 mantissa = (u32)((1 << 30) + (int)(p * f * 0x1p30f));
  const int shift = -(int)whole;
  return shift > 62 ? 0 : (u64)mantissa << (WEIGHT_BITS - 30) >> shift;
}

struct Candidate {
  u32 key;
  u32 id;
};

// One row of logits and of the mask.
struct Row {
  const float* logits;
  const u32* mask;  // null: all are allowed

  // Calls visit(x, id) for every allowed token of this thread; UNROLL loads are under way.
  template <int UNROLL, typename Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
    for (int first = threadIdx.x * VECTOR; first < VOCAB; first += UNROLL * THREADS * VECTOR) {
      float x[UNROLL][VECTOR];
      u32 allowed[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++) {
        const int id = first + i * THREADS * VECTOR;
        allowed[i] = 0;
        if (id >= VOCAB) continue;
        load(id, x[i]);
        allowed[i] = mask ? mask[id / 32] >> (id % 32) : ~0u;
      }
#pragma unroll
      for (int i = 0; i < UNROLL; i++)
#pragma unroll
        for (int j = 0; j < VECTOR; j++)
          if (allowed[i] >> j & 1u) visit(x[i][j], first + i * THREADS * VECTOR + j);
    }
  }

  __device__ __forceinline__ void load(int id, float (&x)[VECTOR]) const {
#if VECTOR == 4
    const float4 four = __ldcg(reinterpret_cast<const float4*>(logits + id));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
    x[0] = logits[id];
#endif
  }
};

// Candidates and the sums of their weights, in bins; halves of the sums, for want of a fast atomic sum of 64 bits.
struct Bins {
  u32 counts[BINS];
  u32 low[BINS], high[BINS];

  __device__ __forceinline__ void clear() {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = low[bin] = high[bin] = 0;
    __syncthreads();
  }
  __device__ __forceinline__ void add(int bin, u64 weight) {
    atomicAdd(&counts[bin], 1u);
    const u32 part = (u32)weight, before = atomicAdd(&low[bin], part);
    const u32 rest = (u32)(weight >> 32) + (before + part < before);
    if (rest) atomicAdd(&high[bin], rest);
  }
};

struct Total {
  u64 count, sum;
};

struct Shared {
  Bins first, next;  // of the first level, which stay; of the levels below it
  Candidate list[LIST];
  Total warps[WARPS];
  u32 list_length;
  u32 id;
  // Of the bin that find_bin found, what lies before it, and of all bins.
  int bin;
  Total before, inside, all;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the selector knows the size of dynamic shared memory");

// Finds the first bin up to which the count (or the sum of weights) reaches `wanted`, 1 or more; the last one that is
// not empty where none does.
__device__ __forceinline__ void find_bin(Shared& shared, const Bins& bins, bool by_count, u64 wanted) {
  __syncthreads();
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, first = threadIdx.x * BINS_A_THREAD;
  Total own[BINS_A_THREAD], here = {0, 0};
#pragma unroll
  for (int i = 0; i < BINS_A_THREAD; i++) {
    own[i] = {bins.counts[first + i], (u64)bins.high[first + i] << 32 | bins.low[first + i]};
    here.count += own[i].count, here.sum += own[i].sum;
  }
  const Total mine = here;
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) {
    const u64 count = __shfl_up_sync(FULL_MASK, here.count, lanes), sum = __shfl_up_sync(FULL_MASK, here.sum, lanes);
    if (lane >= lanes) here.count += count, here.sum += sum;
  }
  if (lane == LANES - 1) shared.warps[warp] = here;
  __syncthreads();
  here.count -= mine.count, here.sum -= mine.sum;  // of the lanes before this one
  Total all = {0, 0};
  for (int other = 0; other < WARPS; other++) {
    const Total total = shared.warps[other];
    if (other < warp) here.count += total.count, here.sum += total.sum;
    all.count += total.count, all.sum += total.sum;
  }
  const u64 reached = by_count ? all.count : all.sum, goal = wanted < reached ? wanted : reached;
#pragma unroll
  for (int i = 0; i < BINS_A_THREAD; i++) {
    const u64 start = by_count ? here.count : here.sum, end = start + (by_count ? own[i].count : own[i].sum);
    if (start < goal && goal <= end) shared.bin = first + i, shared.before = here, shared.inside = own[i];
    here.count += own[i].count, here.sum += own[i].sum;
  }
  if (threadIdx.x == 0) shared.all = all;
  __syncthreads();
}

// The bin of the first level: equal parts of the logits that count, which fill more evenly than parts of their bits.
__device__ __forceinline__ int first_bin(float x, const Weigher& w) {
  const int bin = (int)((w.peak - x) * w.bins_a_unit);
  return bin < BINS ? bin : BINS - 1;
}

// Candidates of one bin of the first level with keys key_low to key_high and, once that is one key, ids id_low to
// id_high: what a search has come down to.
struct Range {
  u32 key_low, key_high, id_low, id_high;

  __device__ __forceinline__ bool one_key() const { return key_low == key_high; }
  // Bits to drop of a candidate's distance from the first one, so that it is a bin.
  __device__ __forceinline__ int shift() const {
    const u32 span = one_key() ? id_high - id_low : key_high - key_low;
    int bits = 0;
    while (span >> bits >= BINS) bits++;
    return bits;
  }
  __device__ __forceinline__ bool has(Candidate c) const {
    return c.key >= key_low && c.key <= key_high && (!one_key() || (c.id >= id_low && c.id <= id_high));
  }
  __device__ __forceinline__ int bin(Candidate c, int shift) const {
    return (int)((one_key() ? c.id - id_low : key_high - c.key) >> shift);
  }
  __device__ __forceinline__ void narrow(u32 bin, int shift) {
    const u32 rest = (1u << shift) - 1;
    if (one_key()) {
      id_low += bin << shift;
      id_high = id_high - id_low < rest ? id_high : id_low + rest;
    } else {
      key_high -= bin << shift;
      key_low = key_high - key_low < rest ? key_low : key_high - rest;
    }
  }
};

struct Found {
  u32 id;
  u64 sum;  // of the weights up to it
};

// What a search looks at: the candidates of a bin of the first level that are in the range, from the list once there is
// one.
struct Scope {
  Shared& shared;
  const Row& row;
  const Weigher& weigher;
  int bin;
  Range range;
  bool listed;

  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit&& visit) const {
    if (listed) {
      for (u32 i = threadIdx.x; i < shared.list_length; i += THREADS)
        if (range.has(shared.list[i])) visit(shared.list[i]);
    } else {
      row.for_each<FEW>([&](float x, int id) {
        if (first_bin(x, weigher) != bin || weight_of(x, weigher) == 0) return;
        const Candidate candidate = {key_of(x), (u32)id};
        if (range.has(candidate)) visit(candidate);
      });
    }
  }

  __device__ __forceinline__ void make_list() {
    if (threadIdx.x == 0) shared.list_length = 0;
    __syncthreads();
    for_each([&](Candidate candidate) { shared.list[atomicAdd(&shared.list_length, 1u)] = candidate; });
    __syncthreads();
    listed = true;
  }
};

// The first candidate with which the count, or the sum of weights, reaches `wanted`.
__device__ __forceinline__ Found search(Shared& shared, const Row& row, const Weigher& weigher, bool by_count,
                                        u64 wanted) {
  find_bin(shared, shared.first, by_count, wanted);
  Total before = shared.before;
  Scope scope = {shared, row, weigher, shared.bin, {1, 0xFFFFFFFFu, 0, VOCAB - 1}, false};
  for (;;) {
    const u64 left = shared.inside.count;
    if (!scope.listed && left <= LIST) scope.make_list();
    if (left == 1) break;
    const int shift = scope.range.shift();
    shared.next.clear();
    scope.for_each([&](Candidate candidate) {
      shared.next.add(scope.range.bin(candidate, shift), weight_of(value_of(candidate.key), weigher));
    });
    find_bin(shared, shared.next, by_count, wanted - (by_count ? before.count : before.sum));
    before.count += shared.before.count, before.sum += shared.before.sum;
    scope.range.narrow((u32)shared.bin, shift);
  }
  scope.for_each([&](Candidate candidate) { shared.id = candidate.id; });
  __syncthreads();
  const Found found = {shared.id, before.sum + shared.inside.sum};
  __syncthreads();
  return found;
}

// The largest key with its lowest id, as key and inverted id; and the smallest key of a finite logit.
__device__ __forceinline__ void find_extremes(const Row& row, u64& best, u32& lowest) {
  __shared__ u64 warp_best[WARPS];
  __shared__ u32 warp_lowest[WARPS];
  u64 largest = 0;
  u32 smallest = 0xFFFFFFFFu;
  row.for_each<MANY>([&](float x, int id) {
    const u32 key = key_of(x);
    const u64 candidate = (u64)key << 32 | (u32)~id;
    if (candidate > largest) largest = candidate;
    if (key > MINUS_INFINITY && key < smallest) smallest = key;
  });
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
    const u64 other = __shfl_xor_sync(FULL_MASK, largest, lanes);
    if (other > largest) largest = other;
  }
  smallest = __reduce_min_sync(FULL_MASK, smallest);
  if (threadIdx.x % LANES == 0) warp_best[threadIdx.x / LANES] = largest, warp_lowest[threadIdx.x / LANES] = smallest;
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) {
    if (warp_best[warp] > largest) largest = warp_best[warp];
    if (warp_lowest[warp] < smallest) smallest = warp_lowest[warp];
  }
  best = largest, lowest = smallest;
}

__device__ __forceinline__ Weigher make_weigher(float peak, float lowest, float temperature) {
  const double factor = 1.4426950408889634 / (double)temperature;  // log2(e)
  // Below it nothing weighs 2^-40: 41 ln(2), and a little.
  const float span = fminf(peak - lowest, 28.5f * temperature);
  const float bins = span > 1e-30f ? (float)BINS * 0.9999f / span : 0.0f;
  return {peak, (float)factor, (float)(factor - (double)(float)factor), bins};
}

// floor(a * b / 2^24) for a below 2^58 and b below 2^24.
__device__ __forceinline__ u64 scaled(u64 a, u32 b) {
  return (a >> 24) * b + ((a & 0xFFFFFFu) * b >> 24);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const float* __restrict__ logits, const int* __restrict__ rows, const int* __restrict__ positions,
           const float* __restrict__ temperature, const int* __restrict__ top_k, const float* __restrict__ top_p,
           const i64* __restrict__ seed, MASK_PARAMETER int* __restrict__ out,
           const StepHeader* __restrict__ step) {
  const int row = blockIdx.x;
  if (row >= step->logits_rows) return;
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
#if MASKED
  const u32* const own_mask = step->has_mask ? mask + (i64)row * MASK_WORDS : nullptr;
#else
  const u32* const own_mask = nullptr;
#endif
  const Row tokens = {logits + (i64)row * LOGITS_STRIDE, own_mask};
  u64 best;
  u32 lowest;
  find_extremes(tokens, best, lowest);
  const u32 peak = (u32)(best >> 32);
  int id = peak > MINUS_INFINITY ? (int)~(u32)best : -1;
  // A row with a NaN or an infinity has no probabilities; the reference takes its first.
  if (temperature[row] > 0 && id >= 0 && peak < PLUS_INFINITY) {
    const Weigher weigher = make_weigher(value_of(peak), value_of(lowest), temperature[row]);
    shared.first.clear();
    tokens.for_each<FEW>([&](float x, int) {
      const u64 weight = weight_of(x, weigher);
      if (weight) shared.first.add(first_bin(x, weigher), weight);
    });
    find_bin(shared, shared.first, false, 1);
    const u64 count = shared.all.count;
    Found found = {0, shared.all.sum};
    __syncthreads();
    // The last of top_k, the last of top_p, the one that is drawn: in turn, for one copy of the search.
#pragma unroll 1
    for (int stage = 0; stage < 3; stage++) {
      u64 wanted;
      if (stage == 0) {
        if (top_k[row] <= 0 || (u64)top_k[row] >= count) continue;
        wanted = (u64)top_k[row];
      } else if (stage == 1) {
        const double mass = (double)top_p[row] * (double)found.sum;
        if (!(mass < (double)found.sum)) continue;
        wanted = mass > 1 ? (u64)mass : 1;
        wanted += (double)wanted < mass;
      } else {
        const u32 draw = philox((u64)seed[row], (u64)(i64)positions[rows[row]]) >> 8;
        wanted = scaled(found.sum, draw) + 1;
      }
      found = search(shared, tokens, weigher, stage == 0, wanted);
    }
    id = (int)found.id;
  }
  if (threadIdx.x == 0) out[row] = id;
}
