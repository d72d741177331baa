#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"

namespace dsv4c::cpu {

namespace {

// y = combine(a, b) element by element; equal shapes.
template <typename Combine>
void combine_rows(const TensorView& a, const TensorView& b, const TensorView& y, ThreadPool& pool,
                  const Combine& combine) {
  const int64_t width = row_width(a);
  require(same_rows(a, b) && same_rows(a, y), "an element-wise kernel has operands of different shapes");
  pool.parallel_for(row_count(a), 8, [&](int64_t begin, int64_t end) {
    const Floats values = make_floats(width);
    const Floats scratch = make_floats(width);
    for (int64_t row = begin; row < end; ++row) {
      read_row(a, row, values.get());
      const float* other = float_row(b, row, scratch.get());
      for (int64_t i = 0; i < width; ++i) values[i] = combine(values[i], other[i]);
      write_row(y, row, values.get());
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
  pool.parallel_for(y.size[0], 8, [&](int64_t begin, int64_t end) {
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
  combine_rows(gate, up, y, pool, [&](float g, float u) { return clamped_swiglu(g, u, limit); });
}

// a, b, dtype -> y
void add(const KernelArgs& args, ThreadPool& pool) {
  combine_rows(args.tensor(0), args.tensor(1), args.tensor(3), pool, [](float a, float b) { return a + b; });
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
  pool.parallel_for(y.size[0], 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < inner; ++i) {
        std::memcpy(row_address(y, row * inner + i), row_address(x, rows[row] * inner + i), bytes);
      }
    }
  });
}

}  // namespace dsv4c::cpu
