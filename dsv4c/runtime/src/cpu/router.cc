#include <cinttypes>
#include <numeric>

#include "cpu/kernels.h"
#include "cpu/rows.h"
#include "cpu/work_split.h"
#include "error.h"

namespace dsv4c::cpu {

namespace {

// What a score and its place in the order take, in multiply-adds.
constexpr int64_t kScoreWork = 64;

// sqrt(softplus(x)); above 20 softplus is x in float32.
void score(float* logits, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    logits[i] = std::sqrt(logits[i] > 20.0f ? logits[i] : std::log1p(std::exp(logits[i])));
  }
}

// ids int32 and weights that sum to `scale`, for experts chosen[0..k].
template <typename Id>
void write_choice(const Id* chosen, int64_t k, const float* scores, float scale, const TensorView& ids,
                  const TensorView& weights, int64_t row) {
  auto* id = static_cast<int32_t*>(row_address(ids, row));
  auto* weight = static_cast<float*>(row_address(weights, row));
  float sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += scores[chosen[i]];
  for (int64_t i = 0; i < k; ++i) {
    id[i] = static_cast<int32_t>(chosen[i]);
    weight[i] = scores[chosen[i]] / (sum + 1e-20f) * scale;
  }
}

}  // namespace

// logits, bias, k, scale -> ids, weights
void route_topk(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& logits = args.tensor(0);
  const std::vector<float> bias = read_all(args.tensor(1));
  const int64_t k = args.integer(2);
  const float scale = static_cast<float>(args.real(3));
  const int64_t experts = row_width(logits);
  require(k >= 0 && k <= experts && static_cast<int64_t>(bias.size()) == experts,
          "route_topk has sizes that do not fit each other");
  const int64_t grain = piece_items(logits.size[0], kScoreWork * logits.size[0] * experts);
  pool.parallel_for(logits.size[0], grain, [&](int64_t begin, int64_t end) {
    const Floats scores = make_floats(experts);
    const Floats biased = make_floats(experts);
    std::vector<int32_t> order(static_cast<size_t>(experts));
    for (int64_t row = begin; row < end; ++row) {
      read_row(logits, row, scores.get());
      score(scores.get(), experts);
      for (int64_t i = 0; i < experts; ++i) {
        biased[i] = scores[i] + bias[i];
        // A NaN would break the order below; as in the reference it counts as the largest.
        if (std::isnan(biased[i])) biased[i] = std::numeric_limits<float>::infinity();
      }
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int32_t a, int32_t b) {
        return biased[a] != biased[b] ? biased[a] > biased[b] : a < b;
      });
      write_choice(order.data(), k, scores.get(), scale, args.tensor(4), args.tensor(5), row);
    }
  });
}

// logits, table, token_ids, scale -> ids, weights
void route_hash(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& logits = args.tensor(0);
  const TensorView& table = args.tensor(1);
  const int32_t* tokens = int_values(args.tensor(2));
  const float scale = static_cast<float>(args.real(3));
  const int64_t experts = row_width(logits);
  if (table.dtype != DType::I64) unsupported("a hash table of experts", table.dtype);
  const int64_t grain = piece_items(logits.size[0], kScoreWork * logits.size[0] * experts);
  pool.parallel_for(logits.size[0], grain, [&](int64_t begin, int64_t end) {
    const Floats scores = make_floats(experts);
    for (int64_t row = begin; row < end; ++row) {
      read_row(logits, row, scores.get());
      score(scores.get(), experts);
      const auto* chosen = static_cast<const int64_t*>(row_address(table, tokens[row]));
      // Weights are read without having been compared with their digests.
      for (int64_t i = 0; i < row_width(table); ++i)
        if (chosen[i] < 0 || chosen[i] >= experts)
          fail(DSV4C_FORMAT, "weights are damaged: the hash table gives token %d expert %" PRId64 " of %" PRId64,
               tokens[row], chosen[i], experts);
      write_choice(chosen, row_width(table), scores.get(), scale, args.tensor(4), args.tensor(5), row);
    }
  });
}

// ids, counts. A few thousand additions at most: one thread does them.
void count_routing(const KernelArgs& args, ThreadPool&) {
  const TensorView& ids = args.tensor(0);
  const TensorView& counts = args.tensor(1);
  if (ids.dtype != DType::I32) unsupported("a choice of experts", ids.dtype);
  if (counts.dtype != DType::I64) unsupported("counts of experts", counts.dtype);
  const int64_t experts = row_width(counts);
  auto* count = counts.as<int64_t>();
  for (int64_t row = 0; row < ids.size[0]; ++row) {
    const auto* chosen = static_cast<const int32_t*>(row_address(ids, row));
    for (int64_t i = 0; i < row_width(ids); ++i) {
      require(chosen[i] >= 0 && chosen[i] < experts, "count_routing is given a choice that is no expert");
      ++count[chosen[i]];
    }
  }
}

}  // namespace dsv4c::cpu
