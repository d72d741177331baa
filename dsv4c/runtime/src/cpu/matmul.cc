#include "cpu/kernels.h"
#include "cpu/project.h"

namespace dsv4c::cpu {

namespace {

// Group g of x times its share of the weight rows; one group is a plain linear.
void project_groups(const TensorView& x, const WeightRows& weight, int64_t groups, const TensorView& y,
                    ThreadPool& pool) {
  const int64_t tokens = x.size[0];
  const int64_t outputs = weight.rows() / groups;
  require(row_width(x) == groups * weight.columns() && row_width(y) == groups * outputs && y.size[0] == tokens,
          "a projection has sizes that do not fit each other");
  for (int64_t tile = 0; tile < tokens; tile += kTokenTile) {
    const int64_t count = std::min(kTokenTile, tokens - tile);
    const FloatRows rows(x, tile, count);
    for (int64_t group = 0; group < groups; ++group) {
      const auto row = [&](int64_t t) { return rows.row(t) + group * weight.columns(); };
      const auto put = [&](int64_t t, int64_t first, const float* values, int64_t n) {
        char* to = static_cast<char*>(row_address(y, tile + t));
        store_floats(values, y.dtype, n, to + (group * outputs + first) * dtype_size(y.dtype));
      };
      project(pool, row, count, weight, group * outputs, outputs, put);
    }
  }
}

}  // namespace

// x, weight, scales, block_rows, block_cols, dtype -> y
void linear(const KernelArgs& args, ThreadPool& pool) {
  const WeightRows weight(args.tensor(1), optional_tensor(args, 2), args.integer(3), args.integer(4));
  project_groups(args.tensor(0), weight, 1, args.tensor(6), pool);
}

// x, weight, scales, block_rows, block_cols, groups -> y
void grouped_linear(const KernelArgs& args, ThreadPool& pool) {
  const WeightRows weight(args.tensor(1), optional_tensor(args, 2), args.integer(3), args.integer(4));
  project_groups(args.tensor(0), weight, args.integer(5), args.tensor(6), pool);
}

}  // namespace dsv4c::cpu
