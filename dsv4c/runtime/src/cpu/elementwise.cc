#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/work_split.h"

namespace dsv4c::cpu {

namespace {

// combine(row of a, row of b, width, row of y) for every row, in float32; equal shapes.
template <typename Combine>
void combine_rows(const TensorView& a, const TensorView& b, const TensorView& y, int64_t element_work,
                  ThreadPool& pool, const Combine& combine) {
  const int64_t width = row_width(a), rows = row_count(a);
  require(same_rows(a, b) && same_rows(a, y), "an element-wise kernel has operands of different shapes");
  pool.parallel_for(rows, piece_items(rows, element_work * rows * width), [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(3 * width);
    for (int64_t row = begin; row < end; ++row) {
      const float* first = float_row(a, row, scratch.get());
      const float* second = float_row(b, row, scratch.get() + width);
      combine(first, second, width, scratch.get() + 2 * width);
      write_row(y, row, scratch.get() + 2 * width);
    }
  });
}

}  // namespace

// token_ids, table, dtype -> rows
void embedding(const KernelArgs& args, ThreadPool& pool) {
  const int32_t* ids = int_values(args.tensor(0));
  const TensorView& table = args.tensor(1);
  const TensorView& y = args.tensor(3);
  require(row_width(y) == row_width(table) && y.size[0] == args.tensor(0).size[0],
          "embedding has sizes that do not fit each other");
  pool.parallel_for(y.size[0], piece_items(y.size[0], 4 * y.size[0] * row_width(y)), [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(row_width(table));
    for (int64_t row = begin; row < end; ++row) write_row(y, row, float_row(table, ids[row], scratch.get()));
  });
}

// gate, up, limit, dtype -> y
void swiglu(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& gate = args.tensor(0);
  const TensorView& up = args.tensor(1);
  const TensorView& y = args.tensor(4);
  const float limit = static_cast<float>(args.real(2));
  combine_rows(gate, up, y, 16, pool, [&](const float* g, const float* u, int64_t width, float* to) {
    clamped_swiglu_row(g, u, width, limit, to);
  });
}

// a, b, dtype -> y
void add(const KernelArgs& args, ThreadPool& pool) {
  const auto sum = [](const float* a, const float* b, int64_t width, float* to) {
    for (int64_t i = 0; i < width; ++i) to[i] = a[i] + b[i];
  };
  combine_rows(args.tensor(0), args.tensor(1), args.tensor(3), 4, pool, sum);
}

// x, rows -> y
void gather_rows(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& x = args.tensor(0);
  const TensorView& y = args.tensor(2);
  const int32_t* rows = int_values(args.tensor(1));
  const int64_t inner = row_count(x) / std::max<int64_t>(x.size[0], 1);
  require(y.dtype == x.dtype && row_width(y) == row_width(x) && y.size[0] == args.tensor(1).size[0] &&
              row_count(y) == y.size[0] * inner,
          "gather_rows has an output of another shape");
  const size_t bytes = static_cast<size_t>(row_width(x) * dtype_size(x.dtype));
  const int64_t grain = piece_items(y.size[0], y.size[0] * inner * row_width(x));
  pool.parallel_for(y.size[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < inner; ++i) {
        std::memcpy(row_address(y, row * inner + i), row_address(x, rows[row] * inner + i), bytes);
      }
    }
  });
}

}  // namespace dsv4c::cpu
