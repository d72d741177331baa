#include <vector>

#include "cpu/kernels.h"
#include "cpu/project.h"
#include "cpu/row_math.h"

namespace dsv4c::cpu {

namespace {

// Bounds the scratch of a launch: k parts of the hidden size per row.
constexpr int64_t kMoeTile = 256;

// A row that chose the expert: its index in [T, k], flattened.
struct Hit {
  int64_t expert;
  std::vector<int64_t> pairs;  // ascending
};

std::vector<Hit> hits_by_expert(const TensorView& ids, int64_t first, int64_t count) {
  const int64_t choices = ids.size[1];
  int64_t experts = 0;
  const auto id = [&](int64_t pair) {
    return int64_t{int_values(ids)[row_offset(ids, first + pair / choices) + pair % choices]};
  };
  for (int64_t pair = 0; pair < count * choices; ++pair) experts = std::max(experts, id(pair) + 1);
  std::vector<int64_t> place(static_cast<size_t>(experts), -1);
  std::vector<Hit> hits;
  for (int64_t pair = 0; pair < count * choices; ++pair) {
    int64_t& at = place[static_cast<size_t>(id(pair))];
    if (at < 0) {
      at = static_cast<int64_t>(hits.size());
      hits.push_back({id(pair), {}});
    }
    hits[static_cast<size_t>(at)].pairs.push_back(pair);
  }
  return hits;
}

struct MoeArgs {
  explicit MoeArgs(const KernelArgs& args)
      : x(args.tensor(0)),
        ids(args.tensor(1)),
        weights(args.tensor(2)),
        w13(args.tensor(3)),
        w13_scales(optional_tensor(args, 4)),
        w2(args.tensor(5)),
        w2_scales(optional_tensor(args, 6)),
        block_rows(args.integer(7)),
        block_columns(args.integer(8)),
        limit(static_cast<float>(args.real(9))),
        group(args.integer(10)),
        y(args.tensor(11)) {}

  WeightRows gate_up(int64_t expert) const { return {w13, w13_scales, block_rows, block_columns, expert}; }
  WeightRows down(int64_t expert) const { return {w2, w2_scales, block_rows, block_columns, expert}; }

  const TensorView& x;
  const TensorView& ids;
  const TensorView& weights;
  const TensorView& w13;
  const TensorView* w13_scales;
  const TensorView& w2;
  const TensorView* w2_scales;
  int64_t block_rows;
  int64_t block_columns;
  float limit;
  int64_t group;
  const TensorView& y;
};

void run_tile(const MoeArgs& moe, int64_t first, int64_t count, ThreadPool& pool) {
  const int64_t hidden = row_width(moe.x);
  const int64_t choices = moe.ids.size[1];
  const int64_t inner = moe.w13.size[1] / 2;
  const int64_t outputs = moe.w2.size[1];
  const std::vector<Hit> hits = hits_by_expert(moe.ids, first, count);
  const int64_t hit_count = static_cast<int64_t>(hits.size());

  const Floats x = make_floats(count * hidden);
  pool.parallel_for(count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = x.get() + row * hidden;
      read_row(moe.x, first + row, to);
      if (moe.group == 0) continue;
      fp8_round_row(to, hidden, moe.group);
      round_floats(to, moe.x.dtype, hidden);
    }
  });

  // [T * k, I], then [T * k, D].
  const Floats products = make_floats(count * choices * inner);
  const Floats parts = make_floats(count * choices * outputs);

  const int64_t inner_blocks = divide_up(inner, kWeightBlock);
  pool.parallel_for(hit_count * inner_blocks, 2, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(2 * kWeightBlock * hidden);
    float gate[kWeightBlock], up[kWeightBlock];
    for (int64_t task = begin; task < end; ++task) {
      const Hit& hit = hits[static_cast<size_t>(task / inner_blocks)];
      const WeightRows weight = moe.gate_up(hit.expert);
      const int64_t row = task % inner_blocks * kWeightBlock;
      const int64_t rows = std::min(kWeightBlock, inner - row);
      int64_t stride;
      const float* gate_rows = weight.read(row, rows, scratch.get(), &stride);
      const float* up_rows = weight.read(inner + row, rows, scratch.get() + kWeightBlock * hidden, &stride);
      for (const int64_t pair : hit.pairs) {
        const float* input = x.get() + pair / choices * hidden;
        dot_rows(gate_rows, stride, rows, input, hidden, gate);
        dot_rows(up_rows, stride, rows, input, hidden, up);
        float factor;
        const int64_t at = row_offset(moe.weights, first + pair / choices) + pair % choices;
        load_floats(moe.weights.as<char>() + at * dtype_size(moe.weights.dtype), moe.weights.dtype, 1, &factor);
        float* to = products.get() + pair * inner + row;
        for (int64_t i = 0; i < rows; ++i) to[i] = clamped_swiglu(gate[i], up[i], moe.limit) * factor;
        round_floats(to, moe.x.dtype, rows);
      }
    }
  });

  if (moe.group != 0) {
    pool.parallel_for(count * choices, 4, [&](int64_t begin, int64_t end) {
      for (int64_t pair = begin; pair < end; ++pair) {
        float* product = products.get() + pair * inner;
        fp8_round_row(product, inner, moe.group);
        round_floats(product, moe.x.dtype, inner);
      }
    });
  }

  const int64_t output_blocks = divide_up(outputs, kWeightBlock);
  pool.parallel_for(hit_count * output_blocks, 4, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(kWeightBlock * inner);
    for (int64_t task = begin; task < end; ++task) {
      const Hit& hit = hits[static_cast<size_t>(task / output_blocks)];
      const int64_t row = task % output_blocks * kWeightBlock;
      const int64_t rows = std::min(kWeightBlock, outputs - row);
      int64_t stride;
      const float* down = moe.down(hit.expert).read(row, rows, scratch.get(), &stride);
      for (const int64_t pair : hit.pairs) {
        dot_rows(down, stride, rows, products.get() + pair * inner, inner, parts.get() + pair * outputs + row);
      }
    }
  });

  pool.parallel_for(count, 4, [&](int64_t begin, int64_t end) {
    const Floats sum = make_floats(outputs);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(sum.get(), outputs, 0.0f);
      for (int64_t choice = 0; choice < choices; ++choice) {
        const float* part = parts.get() + (row * choices + choice) * outputs;
        for (int64_t i = 0; i < outputs; ++i) sum[i] += part[i];
      }
      write_row(moe.y, first + row, sum.get());
    }
  });
}

}  // namespace

// x, ids, weights, w13, w13_scales, w2, w2_scales, block_rows, block_cols, limit, act_group -> y
void moe_ffn(const KernelArgs& args, ThreadPool& pool) {
  const MoeArgs moe(args);
  const int64_t tokens = moe.x.size[0];
  require(row_width(moe.x) == moe.gate_up(0).columns() && moe.down(0).columns() * 2 == moe.gate_up(0).rows() &&
              row_width(moe.y) == moe.down(0).rows(),
          "moe_ffn has matrices that do not fit each other");
  require(moe.ids.size[0] == tokens && moe.y.size[0] == tokens && same_rows(moe.ids, moe.weights),
          "moe_ffn has routes that do not fit its rows");
  for (int64_t first = 0; first < tokens; first += kMoeTile) {
    run_tile(moe, first, std::min(kMoeTile, tokens - first), pool);
  }
}

}  // namespace dsv4c::cpu
