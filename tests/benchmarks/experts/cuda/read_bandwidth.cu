// Reads BYTES bytes once: what a plain kernel gets of the card's bandwidth. Macros: BYTES (a multiple of 65536).
// Parameters: data, one word of output, step.

constexpr long long WORDS = (long long)BYTES / 16;
constexpr int THREADS = 512, DEPTH = 8;

extern "C" __global__ void __launch_bounds__(THREADS)
read_bandwidth(const uint4* __restrict__ data, unsigned* __restrict__ out, const void*) {
  unsigned found = 0;
  const long long stride = (long long)gridDim.x * THREADS * DEPTH;
  for (long long begin = (long long)blockIdx.x * THREADS * DEPTH + threadIdx.x; begin < WORDS; begin += stride) {
    uint4 words[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const long long word = begin + i * THREADS;
      words[i] = word < WORDS ? __ldcs(data + word) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) found ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  }
  // Never the case for random data, but the compiler cannot know.
  if (found == 0x9E3779B9u) *out = found;
}
