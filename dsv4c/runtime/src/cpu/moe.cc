#include <vector>

#include "cpu/kernels.h"
#include "cpu/project.h"
#include "cpu/row_math.h"

namespace dsv4c::cpu {

namespace {

// Bounds the scratch of a launch: k parts of the hidden size per row.
constexpr int64_t kMoeTile = 256;

// What rounding a float to e4m3 takes, in multiply-adds.
constexpr int64_t kRowWork = 16;

// In place to the order that an encoding takes; `scratch` has the row's width.
void order_row(float* row, int64_t columns, Encoding encoding, float* scratch) {
  if (!is_packed(encoding)) return;
  std::copy_n(row, columns, scratch);
  to_chunk_order(scratch, columns, row);
}

// A row that chose the expert: its index in [T, k], flattened.
struct Hit {
  int64_t expert;
  std::vector<int64_t> pairs;  // ascending
};

std::vector<Hit> hits_by_expert(const TensorView& ids, int64_t experts, int64_t first, int64_t count) {
  const int64_t choices = ids.size[1];
  const auto id = [&](int64_t pair) {
    return int64_t{int_values(ids)[row_offset(ids, first + pair / choices) + pair % choices]};
  };
  for (int64_t pair = 0; pair < count * choices; ++pair)
    require(id(pair) >= 0 && id(pair) < experts, "moe_ffn is routed to an expert that it does not have");
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
  const std::vector<Hit> hits = hits_by_expert(moe.ids, moe.w13.size[0], first, count);
  const int64_t hit_count = static_cast<int64_t>(hits.size());

  const int64_t x_stride = chunked_width(hidden);
  const Floats x = make_floats(count * x_stride);
  pool.parallel_for(count, piece_items(count, kRowWork * count * hidden), [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(hidden);
    for (int64_t row = begin; row < end; ++row) {
      float* to = x.get() + row * x_stride;
      read_row(moe.x, first + row, to);
      if (moe.group != 0) {
        fp8_round_row(to, hidden, moe.group);
        round_floats(to, moe.x.dtype, hidden);
      }
      order_row(to, hidden, moe.gate_up(0).encoding(), scratch.get());
    }
  });

  // [T * k, I], then [T * k, D].
  const int64_t product_stride = chunked_width(inner);
  const Floats products = make_floats(count * choices * product_stride);
  const Floats parts = make_floats(count * choices * outputs);

  const int64_t inner_blocks = divide_up(inner, kBlockRows);
  const int64_t gate_tasks = hit_count * inner_blocks;
  const int64_t work = count * choices * hidden * inner;
  pool.parallel_for(gate_tasks, piece_items(gate_tasks, 2 * work), [&](int64_t begin, int64_t end) {
    RowReader reader;
    std::vector<const float*> inputs;
    std::vector<float> gates, ups;
    for (int64_t task = begin; task < end; ++task) {
      const Hit& hit = hits[static_cast<size_t>(task / inner_blocks)];
      const WeightRows weight = moe.gate_up(hit.expert);
      const int64_t row = task % inner_blocks * kBlockRows;
      const int64_t rows = std::min(kBlockRows, inner - row);
      const int64_t pairs = static_cast<int64_t>(hit.pairs.size());
      inputs.clear();
      for (const int64_t pair : hit.pairs) inputs.push_back(x.get() + pair / choices * x_stride);
      gates.resize(static_cast<size_t>(pairs * kBlockRows));
      ups.resize(gates.size());
      const auto run = [&](int64_t from, float* to) {
        simd().project(reader.read(weight, from, rows), rows, hidden, inputs.data(), pairs, to, kBlockRows);
      };
      run(row, gates.data());
      run(inner + row, ups.data());
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t pair = hit.pairs[static_cast<size_t>(i)];
        float factor;
        const int64_t at = row_offset(moe.weights, first + pair / choices) + pair % choices;
        load_floats(moe.weights.as<char>() + at * dtype_size(moe.weights.dtype), moe.weights.dtype, 1, &factor);
        float* to = products.get() + pair * product_stride + row;
        clamped_swiglu_row(gates.data() + i * kBlockRows, ups.data() + i * kBlockRows, rows, moe.limit, to);
        for (int64_t c = 0; c < rows; ++c) to[c] *= factor;
        round_floats(to, moe.x.dtype, rows);
      }
    }
  });

  if (moe.group != 0 || is_packed(moe.down(0).encoding())) {
    const int64_t pairs = count * choices;
    pool.parallel_for(pairs, piece_items(pairs, kRowWork * pairs * inner), [&](int64_t begin, int64_t end) {
      const Floats scratch = make_floats(inner);
      for (int64_t pair = begin; pair < end; ++pair) {
        float* product = products.get() + pair * product_stride;
        if (moe.group != 0) {
          fp8_round_row(product, inner, moe.group);
          round_floats(product, moe.x.dtype, inner);
        }
        order_row(product, inner, moe.down(0).encoding(), scratch.get());
      }
    });
  }

  const int64_t output_blocks = divide_up(outputs, kBlockRows);
  const int64_t down_tasks = hit_count * output_blocks;
  pool.parallel_for(down_tasks, piece_items(down_tasks, work), [&](int64_t begin, int64_t end) {
    RowReader reader;
    std::vector<const float*> inputs;
    std::vector<float> values;
    for (int64_t task = begin; task < end; ++task) {
      const Hit& hit = hits[static_cast<size_t>(task / output_blocks)];
      const int64_t row = task % output_blocks * kBlockRows;
      const int64_t rows = std::min(kBlockRows, outputs - row);
      const int64_t pairs = static_cast<int64_t>(hit.pairs.size());
      inputs.clear();
      for (const int64_t pair : hit.pairs) inputs.push_back(products.get() + pair * product_stride);
      values.resize(static_cast<size_t>(pairs * kBlockRows));
      simd().project(reader.read(moe.down(hit.expert), row, rows), rows, inner, inputs.data(), pairs, values.data(),
                     kBlockRows);
      for (int64_t i = 0; i < pairs; ++i) {
        std::copy_n(values.data() + i * kBlockRows, rows,
                    parts.get() + hit.pairs[static_cast<size_t>(i)] * outputs + row);
      }
    }
  });

  pool.parallel_for(count, piece_items(count, count * choices * outputs), [&](int64_t begin, int64_t end) {
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
