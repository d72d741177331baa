#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/rows.h"
#include "cpu/simd/simd.h"
#include "cpu/weight_rows.h"
#include "cpu/work_split.h"
#include "thread_pool.h"

namespace dsv4c::cpu {

// Rows of the step that are converted to float32 at a time.
constexpr int64_t kTokenTile = 128;

// Floats of a row of x in chunk order.
inline int64_t chunked_width(int64_t columns) { return divide_up(columns, kChunk) * kChunk; }

// A row for packed weights: in each chunk the even columns, then the odd ones; zeros behind the last.
inline void to_chunk_order(const float* from, int64_t columns, float* to) {
  constexpr int64_t kHalf = kChunk / 2;
  for (int64_t start = 0; start < columns; start += kChunk) {
    float* chunk = to + start;
    const int64_t pairs = std::min(kHalf, (columns - start) / 2);  // packed columns come in twos
    for (int64_t i = 0; i < pairs; ++i) {
      chunk[i] = from[start + 2 * i];
      chunk[kHalf + i] = from[start + 2 * i + 1];
    }
    std::fill(chunk + pairs, chunk + kHalf, 0.0f);
    std::fill(chunk + kHalf + pairs, chunk + kChunk, 0.0f);
  }
}

// Rows of x in the order that an encoding takes them.
class InputRows {
 public:
  template <typename Row>
  InputRows(const Row& x, int64_t count, int64_t columns, Encoding encoding) : rows_(static_cast<size_t>(count)) {
    const int64_t width = chunked_width(columns);
    if (is_packed(encoding)) copy_ = make_floats(count * width);
    for (int64_t i = 0; i < count; ++i) {
      const float* row = x(i);
      if (copy_) {
        to_chunk_order(row, columns, copy_.get() + i * width);
        row = copy_.get() + i * width;
      }
      rows_[static_cast<size_t>(i)] = row;
    }
  }

  const float* const* data() const { return rows_.data(); }

 private:
  Floats copy_;
  std::vector<const float*> rows_;
};

// Calls put(t, first_output, values, count) with x_t . w_o for tokens 0..tokens (at most kTokenTile) and weight rows
// first..first+outputs, from several threads; `x(t)` is the row of token t.
template <typename Row, typename Put>
void project(ThreadPool& pool, const Row& x, int64_t tokens, const WeightRows& weight, int64_t first, int64_t outputs,
             const Put& put) {
  const InputRows input(x, tokens, weight.columns(), weight.encoding());
  const int64_t blocks = divide_up(outputs, kBlockRows);
  const int64_t grain = piece_items(blocks, outputs * weight.columns() * tokens);
  pool.parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
    RowReader reader;
    float values[kTokenTile * kBlockRows];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t output = block * kBlockRows;
      const int64_t count = std::min(kBlockRows, outputs - output);
      const StoredRows rows = reader.read(weight, first + output, count);
      simd().project(rows, count, weight.columns(), input.data(), tokens, values, kBlockRows);
      for (int64_t t = 0; t < tokens; ++t) put(t, output, values + t * kBlockRows, count);
    }
  });
}

}  // namespace dsv4c::cpu
