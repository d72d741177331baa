#include <numeric>

#include "cpu/kernels.h"
#include "cpu/rows.h"

namespace dsv4c::cpu {

namespace {

// First word of Philox-4x32-10 (Salmon et al., SC 2011) for a 64-bit key and the low half of the counter.
uint32_t philox(uint64_t key, uint64_t counter) {
  uint32_t c[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{c[0]} * 0xD2511F53u, high = uint64_t{c[2]} * 0xCD9E8D57u;
    const uint32_t next[4] = {static_cast<uint32_t>(high >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(high),
                              static_cast<uint32_t>(low >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(low)};
    std::copy_n(next, 4, c);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c[0];
}

// In [0, 1), 24 bits.
double uniform(int64_t seed, int64_t position) {
  return (philox(static_cast<uint64_t>(seed), static_cast<uint64_t>(position)) >> 8) * 0x1p-24;
}

struct Request {
  float temperature;
  int64_t top_k;
  float top_p;
  int64_t seed;
  int64_t position;
};

// Larger logit first (a NaN counts as the largest), then lower id.
struct ByLogit {
  const float* logits;
  bool operator()(int32_t a, int32_t b) const {
    const float x = logits[a], y = logits[b];
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) != std::isnan(y) ? std::isnan(x) : a < b;
    return x != y ? x > y : a < b;
  }
};

// `ids` are the allowed tokens; their order is lost.
int32_t choose(const float* logits, std::vector<int32_t>& ids, const Request& request) {
  const ByLogit order{logits};
  if (ids.empty()) return -1;
  const int32_t best = *std::min_element(ids.begin(), ids.end(), order);
  if (logits[best] == -std::numeric_limits<float>::infinity()) return -1;
  if (request.temperature <= 0) return best;
  size_t count = ids.size();
  if (request.top_k > 0) count = std::min(count, static_cast<size_t>(request.top_k));
  std::partial_sort(ids.begin(), ids.begin() + static_cast<int64_t>(count), ids.end(), order);
  std::vector<double> running(count);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double gap = static_cast<double>(logits[ids[i]]) - static_cast<double>(logits[best]);
    running[i] = sum += std::exp(gap / static_cast<double>(request.temperature));
  }
  const auto counted = [&](auto&& is_below) {
    return static_cast<size_t>(std::count_if(running.begin(), running.end(), is_below));
  };
  const double mass = static_cast<double>(request.top_p) * sum;
  const size_t kept = std::min(counted([&](double value) { return value < mass; }) + 1, count);
  const double target = uniform(request.seed, request.position) * running[kept - 1];
  return ids[std::min(counted([&](double value) { return value <= target; }), kept - 1)];
}

}  // namespace

// logits, rows, positions, temperature, top_k, top_p, seed, mask -> ids
void sample(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& logits = args.tensor(0);
  const int32_t* rows = int_values(args.tensor(1));
  const int32_t* positions = int_values(args.tensor(2));
  const float* temperature = args.tensor(3).as<float>();
  const int32_t* top_k = int_values(args.tensor(4));
  const float* top_p = args.tensor(5).as<float>();
  const int64_t* seed = args.tensor(6).as<int64_t>();
  int32_t* out = args.tensor(8).as<int32_t>();
  const int64_t vocab = row_width(logits);
  pool.parallel_for(logits.size[0], 1, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(vocab);
    std::vector<int32_t> ids;
    for (int64_t row = begin; row < end; ++row) {
      ids.clear();
      if (args.has(7)) {
        const auto* words = static_cast<const uint32_t*>(row_address(args.tensor(7), row));
        for (int64_t id = 0; id < vocab; ++id) {
          if (words[id / 32] >> (id % 32) & 1) ids.push_back(static_cast<int32_t>(id));
        }
      } else {
        ids.resize(static_cast<size_t>(vocab));
        std::iota(ids.begin(), ids.end(), 0);
      }
      const Request request{temperature[row], top_k[row], top_p[row], seed[row], positions[rows[row]]};
      out[row] = choose(float_row(logits, row, scratch.get()), ids, request);
    }
  });
}

}  // namespace dsv4c::cpu
