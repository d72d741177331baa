// Products of warpgroups: out [64, N] = a [64, K] b [N, K] of e4m3 or f16 (K bytes), B by way of shared memory; and
// faults that must be found.
#include "block.cuh"
#include "hopper.cuh"
#include "step.cuh"

constexpr int STEP = 32;  // columns of k in a product
constexpr int STEPS = K / STEP;

template <int Columns>
__device__ __forceinline__ void product(float (&d)[Columns / 2], const u32 (&a)[4], u64 b, bool accumulate,
                                        int line = __builtin_LINE()) {
  emulated_warpgroup_product(d, Columns, a, b, accumulate, line);
}

// B of all steps: [step][k / 16][n][16 bytes].
constexpr int K_STRIDE = 16 * N, N_STRIDE = 128, STEP_BYTES = STEP * N;

__device__ __forceinline__ void store_b(u8* to, const u8* b) {
  for (int i = threadIdx.x; i < N * K; i += blockDim.x) {
    const int n = i / K, k = i % K;
    to[k / STEP * STEP_BYTES + k % STEP / 16 * K_STRIDE + n * 16 + k % 16] = b[i];
  }
}

__device__ __forceinline__ void load_a(u32 (&registers)[4], const u8* a, int step) {
  const int thread = threadIdx.x % 128, g = thread % 32 / 4, t = thread % 4;
  for (int i = 0; i < 4; i++)
    registers[i] = *(const u32*)(a + (thread / 32 * 16 + i % 2 * 8 + g) * K + step * STEP + i / 2 * 16 + 4 * t);
}

__device__ __forceinline__ void store(float* out, const float (&d)[N / 2]) {
  const int thread = threadIdx.x % 128, g = thread % 32 / 4, t = thread % 4;
  for (int i = 0; i < N / 2; i++)
    out[(thread / 32 * 16 + i % 4 / 2 * 8 + g) * N + i / 4 * 8 + 2 * t + i % 2] = d[i];
}

// The same of f16, K / 2 columns of k, added to what the registers hold.
extern "C" __global__ void f16_products(const u8* a, const u8* b, float* out, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  store_b(shared, b);
  shared_proxy_fence();
  __syncthreads();
  u32 registers[STEPS][4];
  for (int step = 0; step < STEPS; step++) load_a(registers[step], a, step);
  float d[N / 2];
  for (float& value : d) value = 1;
  product_begin();
  for (int step = 0; step < STEPS; step++)
    emulated_f16_product(d, N, registers[step], product_operand(shared + step * STEP_BYTES, K_STRIDE, N_STRIDE));
  product_commit();
  product_wait<0>();
  store(out, d);
}

// Every warpgroup by itself: all of k in one sum, in two groups of products. `early` gets what the registers hold
// before the last wait.
extern "C" __global__ void products(const u8* a, const u8* b, float* out, float* early, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  store_b(shared, b);
  shared_proxy_fence();
  __syncthreads();
  u32 registers[STEPS][4];
  for (int step = 0; step < STEPS; step++) load_a(registers[step], a, step);
  float d[N / 2];
  product_begin();
  for (int step = 0; step < STEPS; step++) {
    product<N>(d, registers[step], product_operand(shared + step * STEP_BYTES, K_STRIDE, N_STRIDE), step > 0);
    if (step == 0) product_commit();
  }
  product_commit();
  product_wait<1>();
  store(early, d);
  product_wait<0>();
  for (float& value : d) keep(value);
  store(out + threadIdx.x / 128 * 64 * N, d);
}

// Sums [2] of one step each. B changes behind each product: after the wait if `waits`, else before; it is stored with a
// fence for the first `fences` of them.
extern "C" __global__ void b_changes(const u8* a, const u8* b, float* out, const int* options, const StepHeader*) {
  DYNAMIC_SHARED(shared);
  const int fences = options[0], waits = options[1];
  const u64 operand = product_operand(shared, K_STRIDE, N_STRIDE);
  u32 registers[4];
  load_a(registers, a, 0);
  for (int i = 0; i < 2; i++) {
    store_b(shared, b + i * N * K);
    if (i < fences) shared_proxy_fence();
    __syncthreads();
    float d[N / 2];
    product_begin();
    product<N>(d, registers, operand, false);
    product_commit();
    if (waits) product_wait<0>();
    __syncthreads();
    for (int byte = threadIdx.x; byte < N * K; byte += blockDim.x) shared[byte] = 0;
    __syncthreads();
    if (!waits) product_wait<0>();
    store(out + i * 64 * N, d);
  }
}

// ---- faults ----

__device__ void not_begun(const u32 (&a)[4], u64 b) {
  float d[N / 2];
  product_begin();
  product<N>(d, a, b, false);
  product_commit();
  product_wait<0>();
  product<N>(d, a, b, false);
}

__device__ void warp_missing(const u32 (&a)[4], u64 b) {
  float d[N / 2];
  product_begin();
  if (threadIdx.x >= 96) return;
  product<N>(d, a, b, false);
}

__device__ void other_operand(const u32 (&a)[4], u64 b) {
  float d[N / 2];
  product_begin();
  product<N>(d, a, b + threadIdx.x / 32, false);
}

__device__ void b_past_the_end(const u32 (&a)[4], u64 b) {
  float d[N / 2];
  product_begin();
  product<N>(d, a, b + ((N * K) >> 4), false);
}

__device__ void never_waited_for(const u32 (&a)[4], u64 b) {
  float d[N / 2];
  product_begin();
  product<N>(d, a, b, false);
  product_commit();
}

// In the order of the test.
extern "C" __global__ void fault(const u8* a, const int* number, const StepHeader*) {
  constexpr void (*FAULTS[])(const u32 (&)[4], u64) = {
    not_begun, warp_missing, other_operand, b_past_the_end, never_waited_for,
  };
  DYNAMIC_SHARED(shared);
  u32 registers[4];
  load_a(registers, a, 0);
  FAULTS[*number](registers, product_operand(shared, K_STRIDE, N_STRIDE));
}
