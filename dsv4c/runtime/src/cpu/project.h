#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/dot.h"
#include "cpu/rows.h"
#include "cpu/weight_rows.h"
#include "thread_pool.h"

namespace dsv4c::cpu {

// Weight rows that are decoded together and stay in cache for all rows of the step.
constexpr int64_t kWeightBlock = 4;
// Rows of the step that are converted to float32 at a time.
constexpr int64_t kTokenTile = 128;

// Calls put(t, first_output, values, count) with x_t . w_o for tokens 0..tokens and weight rows first..first+outputs,
// from several threads; `x(t)` is the row of token t.
template <typename Row, typename Put>
void project(ThreadPool& pool, const Row& x, int64_t tokens, const WeightRows& weight, int64_t first, int64_t outputs,
             const Put& put) {
  pool.parallel_for(divide_up(outputs, kWeightBlock), 4, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(kWeightBlock * weight.columns());
    float values[kWeightBlock];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t output = block * kWeightBlock;
      const int64_t count = std::min(kWeightBlock, outputs - output);
      int64_t stride;
      const float* rows = weight.read(first + output, count, scratch.get(), &stride);
      for (int64_t t = 0; t < tokens; ++t) {
        dot_rows(rows, stride, count, x(t), weight.columns(), values);
        put(t, output, values, count);
      }
    }
  });
}

}  // namespace dsv4c::cpu
