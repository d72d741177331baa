#include <numeric>

#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/state_rows.h"

namespace dsv4c::cpu {

namespace {

// Entries one piece of work scores.
constexpr int64_t kEntryChunk = 256;
// Scores kept at a time (16 MB), unless one row has more.
constexpr int64_t kMaxScores = 4 << 20;

struct Selector {
  explicit Selector(const KernelArgs& args)
      : q(args.tensor(0)),
        weights(args.tensor(1)),
        keys(args.tensor(2), optional_tensor(args, 3), q.size[2], 0),
        slots(int_values(args.tensor(4))),
        positions(int_values(args.tensor(5))),
        block_table(args.tensor(6)),
        topk(args.integer(7)),
        ratio(args.integer(8)),
        scale(static_cast<float>(args.real(9))),
        y(args.tensor(10)) {}

  int64_t visible(int64_t row) const { return (int64_t{positions[row]} + 1) / ratio; }
  int32_t* output(int64_t row) const { return static_cast<int32_t*>(row_address(y, row)); }

  // scores[i] of entries first..first+count.
  void score(int64_t row, int64_t first, int64_t count, float* scores) const {
    const int64_t heads = q.size[1], width = q.size[2];
    const Floats queries = make_floats(heads * width);
    const Floats factors = make_floats(heads);
    const Floats dots = make_floats(heads);
    const Floats scratch = make_floats(width);
    for (int64_t h = 0; h < heads; ++h) read_row(q, row * heads + h, queries.get() + h * width);
    read_row(weights, row, factors.get());
    for (int64_t h = 0; h < heads; ++h) factors[h] *= scale;
    const int32_t* blocks = int_values(block_table) + slots[row] * block_table.stride[0];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t entry = first + i;
      const float* key = keys.read(blocks[entry / keys.inner()], entry % keys.inner(), scratch.get());
      dot_rows(queries.get(), width, heads, key, width, dots.get());
      float sum = 0;
      for (int64_t h = 0; h < heads; ++h) sum += factors[h] * std::max(dots[h], 0.0f);
      // A NaN would break the order of the selection.
      scores[i] = std::isnan(sum) ? std::numeric_limits<float>::infinity() : sum;
    }
  }

  void select(int64_t row, const float* scores) const {
    std::vector<int32_t> order(static_cast<size_t>(visible(row)));
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + topk, order.end(), [&](int32_t a, int32_t b) {
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    std::sort(order.begin(), order.begin() + topk);
    std::copy_n(order.begin(), topk, output(row));
  }

  const TensorView& q;
  const TensorView& weights;
  StateRows keys;
  const int32_t* slots;
  const int32_t* positions;
  const TensorView& block_table;
  int64_t topk;
  int64_t ratio;
  float scale;
  const TensorView& y;
};

struct Chunk {
  int64_t row;
  int64_t first;
  int64_t count;
  int64_t at;  // in the scores
};

}  // namespace

// q, weights, keys, key_scales, slots, positions, block_table, topk, ratio, scale -> selected
void select_entries(const KernelArgs& args, ThreadPool& pool) {
  const Selector selector(args);
  const int64_t tokens = selector.q.size[0];
  int64_t row = 0;
  while (row < tokens) {
    std::vector<Chunk> chunks;
    std::vector<Chunk> rows;
    int64_t used = 0;
    for (; row < tokens; ++row) {
      const int64_t visible = selector.visible(row);
      if (visible <= selector.topk) {
        int32_t* to = selector.output(row);
        std::iota(to, to + visible, 0);
        std::fill(to + visible, to + selector.topk, -1);
        continue;
      }
      if (used > 0 && used + visible > kMaxScores) break;
      rows.push_back({row, 0, visible, used});
      for (int64_t first = 0; first < visible; first += kEntryChunk) {
        chunks.push_back({row, first, std::min(kEntryChunk, visible - first), used + first});
      }
      used += visible;
    }
    const Floats scores = make_floats(used);
    pool.parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Chunk& chunk = chunks[static_cast<size_t>(i)];
        selector.score(chunk.row, chunk.first, chunk.count, scores.get() + chunk.at);
      }
    });
    pool.parallel_for(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Chunk& chunk = rows[static_cast<size_t>(i)];
        selector.select(chunk.row, scores.get() + chunk.at);
      }
    });
  }
}

}  // namespace dsv4c::cpu
