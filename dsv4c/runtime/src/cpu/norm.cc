#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/work_split.h"

namespace dsv4c::cpu {

namespace {

// Reads each row of x, changes it in place, writes it to y; `element_work` is that of a float in multiply-adds.
template <typename Change>
void change_rows(const TensorView& x, const TensorView& y, int64_t element_work, ThreadPool& pool,
                 const Change& change) {
  require(same_rows(x, y), "a row-wise kernel has an output of another shape");
  const int64_t rows = row_count(x);
  pool.parallel_for(rows, piece_items(rows, element_work * rows * row_width(x)), [&](int64_t begin, int64_t end) {
    const Floats values = make_floats(row_width(x));
    for (int64_t row = begin; row < end; ++row) {
      read_row(x, row, values.get());
      change(values.get());
      write_row(y, row, values.get());
    }
  });
}

}  // namespace

// x, weight, eps -> y
void rms_norm(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& x = args.tensor(0);
  const std::vector<float> weight = args.has(1) ? read_all(args.tensor(1)) : std::vector<float>();
  const float eps = static_cast<float>(args.real(2));
  require(weight.empty() || static_cast<int64_t>(weight.size()) == row_width(x),
          "rms_norm has a weight of another width");
  change_rows(x, args.tensor(3), 4, pool, [&](float* values) {
    normalize_row(values, weight.empty() ? nullptr : weight.data(), row_width(x), eps);
  });
}

// x, group, width -> y
void fp8_round(const KernelArgs& args, ThreadPool& pool) {
  const int64_t group = args.integer(1);
  const int64_t width = std::min(args.integer(2), row_width(args.tensor(0)));
  require(group > 0, "fp8_round takes groups of at least one channel");
  change_rows(args.tensor(0), args.tensor(3), 16, pool, [&](float* values) { fp8_round_row(values, width, group); });
}

// x, group -> y
void fp4_round(const KernelArgs& args, ThreadPool& pool) {
  const int64_t group = args.integer(1);
  const int64_t width = row_width(args.tensor(0));
  require(group > 0, "fp4_round takes groups of at least one channel");
  change_rows(args.tensor(0), args.tensor(2), 16, pool, [&](float* values) { fp4_round_row(values, width, group); });
}

// x -> y
void hadamard(const KernelArgs& args, ThreadPool& pool) {
  const int64_t width = row_width(args.tensor(0));
  require((width & (width - 1)) == 0, "hadamard takes a width that is a power of two");
  change_rows(args.tensor(0), args.tensor(1), 16, pool, [&](float* values) { hadamard_row(values, width); });
}

// x, positions, inv_freq, inverse -> y
void rope(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& x = args.tensor(0);
  const TensorView& y = args.tensor(4);
  const int32_t* positions = int_values(args.tensor(1));
  const std::vector<float> inv_freq = read_all(args.tensor(2));
  const bool inverse = args.integer(3) != 0;
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  const int64_t width = row_width(x);
  require(same_rows(x, y) && 2 * half <= width && args.tensor(1).size[0] == x.size[0],
          "rope has sizes that do not fit each other");
  const int64_t heads = row_count(x) / std::max<int64_t>(x.size[0], 1);
  // A sine or cosine costs as much as some thirty other operations.
  const int64_t work = x.size[0] * (4 * heads * width + 64 * half);
  pool.parallel_for(x.size[0], piece_items(x.size[0], work), [&](int64_t begin, int64_t end) {
    const Floats values = make_floats(width);
    const Floats cosine = make_floats(half);
    const Floats sine = make_floats(half);
    for (int64_t token = begin; token < end; ++token) {
      rotation(positions[token], inv_freq.data(), half, cosine.get(), sine.get());
      if (inverse) {
        for (int64_t i = 0; i < half; ++i) sine[i] = -sine[i];
      }
      for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
        read_row(x, row, values.get());
        rotate_row(values.get(), width, cosine.get(), sine.get(), half);
        write_row(y, row, values.get());
      }
    }
  });
}

}  // namespace dsv4c::cpu
