#include <numeric>

#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/simd/simd.h"
#include "cpu/state_rows.h"
#include "cpu/work_split.h"

namespace dsv4c::cpu {

namespace {

// Entries one piece of work scores.
constexpr int64_t kEntryChunk = 256;
// What choosing among the scores takes for one of them, in multiply-adds.
constexpr int64_t kSelectWork = 32;
// Keys that are decoded at a time.
constexpr int64_t kKeyBlock = 64;
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
    const Floats dots = make_floats(kKeyBlock * kBlockRows);
    const Floats scratch = make_floats(kKeyBlock * width);
    const float* block[kKeyBlock];
    for (int64_t h = 0; h < heads; ++h) read_row(q, row * heads + h, queries.get() + h * width);
    read_row(weights, row, factors.get());
    for (int64_t h = 0; h < heads; ++h) factors[h] *= scale;
    const int32_t* blocks = int_values(block_table) + slots[row] * block_table.stride[0];
    for (int64_t start = 0; start < count; start += kKeyBlock) {
      const int64_t size = std::min(kKeyBlock, count - start);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t entry = first + start + i;
        block[i] = keys.read(blocks[entry / keys.inner()], entry % keys.inner(), scratch.get() + i * width);
      }
      float* sums = scores + start;
      std::fill_n(sums, size, 0.0f);
      for (int64_t head = 0; head < heads; head += kBlockRows) {
        const int64_t part = std::min(kBlockRows, heads - head);
        StoredRows stored;
        stored.codes = reinterpret_cast<const uint8_t*>(queries.get() + head * width);
        stored.row_bytes = width * static_cast<int64_t>(sizeof(float));
        simd().project(stored, part, width, block, size, dots.get(), kBlockRows);
        for (int64_t i = 0; i < size; ++i) {
          for (int64_t h = 0; h < part; ++h) {
            sums[i] += factors[head + h] * std::max(dots[i * kBlockRows + h], 0.0f);
          }
        }
      }
      // A NaN would break the order of the selection.
      for (int64_t i = 0; i < size; ++i) {
        if (std::isnan(sums[i])) sums[i] = std::numeric_limits<float>::infinity();
      }
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
    const int64_t chunk_count = static_cast<int64_t>(chunks.size());
    const int64_t work = used * selector.q.size[1] * selector.q.size[2];
    pool.parallel_for(chunk_count, piece_items(chunk_count, work), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Chunk& chunk = chunks[static_cast<size_t>(i)];
        selector.score(chunk.row, chunk.first, chunk.count, scores.get() + chunk.at);
      }
    });
    const int64_t row_total = static_cast<int64_t>(rows.size());
    pool.parallel_for(row_total, piece_items(row_total, kSelectWork * used), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Chunk& chunk = rows[static_cast<size_t>(i)];
        selector.select(chunk.row, scores.get() + chunk.at);
      }
    });
  }
}

}  // namespace dsv4c::cpu
