#include "cpu/kernels.h"
#include "cpu/project.h"
#include "cpu/row_math.h"

namespace dsv4c::cpu {

namespace {

// What a division that others wait for takes, in multiply-adds.
constexpr int64_t kDivisionWork = 16;

// Tokens first..first+count of streams [T, n, D], each as one float32 row of n * D.
class FlatStreams {
 public:
  FlatStreams(const TensorView& streams, int64_t first, int64_t count) : width_(streams.size[1] * streams.size[2]) {
    if (streams.dtype == DType::F32 && streams.stride[1] == streams.size[2]) {
      data_ = streams.as<const float>() + first * streams.stride[0];
      stride_ = streams.stride[0];
      return;
    }
    stride_ = width_;
    copy_ = make_floats(count * width_);
    const int64_t n = streams.size[1];
    for (int64_t row = 0; row < count * n; ++row) {
      read_row(streams, first * n + row, copy_.get() + row * streams.size[2]);
    }
    data_ = copy_.get();
  }

  int64_t width() const { return width_; }
  const float* row(int64_t token) const { return data_ + token * stride_; }

 private:
  Floats copy_;
  const float* data_ = nullptr;
  int64_t stride_ = 0;
  int64_t width_;
};

// The mixer's outputs [count, O]: fn times the normalised streams.
Floats mixer_logits(const FlatStreams& streams, int64_t count, const WeightRows& fn, float norm_eps, ThreadPool& pool) {
  const int64_t outputs = fn.rows();
  Floats logits = make_floats(count * outputs);
  require(fn.columns() == streams.width(), "an mHC mixer does not fit its streams");
  const auto row = [&](int64_t t) { return streams.row(t); };
  project(pool, row, count, fn, 0, outputs, [&](int64_t t, int64_t first, const float* values, int64_t n) {
    std::copy_n(values, n, logits.get() + t * outputs + first);
  });
  pool.parallel_for(count, piece_items(count, count * streams.width()), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float scale = reciprocal_rms(streams.row(t), streams.width(), norm_eps);
      for (int64_t i = 0; i < outputs; ++i) logits[t * outputs + i] *= scale;
    }
  });
  return logits;
}

// sum_i pre_i * stream_i into row `to` of y.
void collapse(const float* pre, const float* streams, int64_t n, const TensorView& y, int64_t to) {
  const int64_t hidden = row_width(y);
  const Floats sum = make_floats(hidden);
  std::fill_n(sum.get(), hidden, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    const float* stream = streams + i * hidden;
    for (int64_t c = 0; c < hidden; ++c) sum[c] += pre[i] * stream[c];
  }
  write_row(y, to, sum.get());
}

// Softmax over each row, plus eps.
void softmax_rows(float* comb, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float* row = comb + j * n;
    const float peak = *std::max_element(row, row + n);
    float sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += row[k] = std::exp(row[k] - peak);
    for (int64_t k = 0; k < n; ++k) row[k] = row[k] / sum + eps;
  }
}

void divide_rows(float* comb, int64_t n, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float sum = 0;
    for (int64_t k = 0; k < n; ++k) sum += comb[j * n + k];
    for (int64_t k = 0; k < n; ++k) comb[j * n + k] /= sum + eps;
  }
}

void divide_columns(float* comb, int64_t n, float eps) {
  for (int64_t k = 0; k < n; ++k) {
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += comb[j * n + k];
    for (int64_t j = 0; j < n; ++j) comb[j * n + k] /= sum + eps;
  }
}

}  // namespace

// streams, fn, scale, base, iterations, hc_eps, norm_eps -> collapsed, post, comb
void mhc_mix(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& x = args.tensor(0);
  const WeightRows fn(args.tensor(1), nullptr, 0, 0);
  const std::vector<float> scale = read_all(args.tensor(2));
  const std::vector<float> base = read_all(args.tensor(3));
  const int64_t iterations = args.integer(4);
  const float hc_eps = static_cast<float>(args.real(5));
  const float norm_eps = static_cast<float>(args.real(6));
  const int64_t n = x.size[1];
  const int64_t outputs = (2 + n) * n;
  require(fn.rows() == outputs && scale.size() == 3 && static_cast<int64_t>(base.size()) == outputs,
          "an mHC mixer does not fit its number of streams");
  for (int64_t tile = 0; tile < x.size[0]; tile += kTokenTile) {
    const int64_t count = std::min(kTokenTile, x.size[0] - tile);
    const FlatStreams streams(x, tile, count);
    const Floats logits = mixer_logits(streams, count, fn, norm_eps, pool);
    const int64_t work = count * (streams.width() + kDivisionWork * iterations * n * n);
    pool.parallel_for(count, piece_items(count, work), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* pre = logits.get() + t * outputs;
        float* post = pre + n;
        float* comb = post + n;
        for (int64_t i = 0; i < n; ++i) {
          pre[i] = sigmoid(pre[i] * scale[0] + base[i]) + hc_eps;
          post[i] = 2 * sigmoid(post[i] * scale[1] + base[n + i]);
        }
        for (int64_t i = 0; i < n * n; ++i) comb[i] = comb[i] * scale[2] + base[2 * n + i];
        softmax_rows(comb, n, hc_eps);
        divide_columns(comb, n, hc_eps);
        for (int64_t i = 1; i < iterations; ++i) {
          divide_rows(comb, n, hc_eps);
          divide_columns(comb, n, hc_eps);
        }
        collapse(pre, streams.row(t), n, args.tensor(7), tile + t);
        write_row(args.tensor(8), tile + t, post);
        for (int64_t j = 0; j < n; ++j) write_row(args.tensor(9), (tile + t) * n + j, comb + j * n);
      }
    });
  }
}

// y, streams, post, comb -> streams
void mhc_combine(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& y = args.tensor(0);
  const TensorView& streams = args.tensor(1);
  const TensorView& post = args.tensor(2);
  const TensorView& comb = args.tensor(3);
  const TensorView& out = args.tensor(4);
  const int64_t n = streams.size[1], hidden = streams.size[2];
  require(row_width(y) == hidden && row_width(post) == n && row_width(comb) == n && comb.size[1] == n &&
              same_rows(out, streams),
          "mhc_combine has sizes that do not fit each other");
  const int64_t work = streams.size[0] * n * (n + 4) * hidden;
  pool.parallel_for(streams.size[0], piece_items(streams.size[0], work), [&](int64_t begin, int64_t end) {
    const Floats input = make_floats(hidden);
    const Floats old = make_floats(n * hidden);
    const Floats sum = make_floats(hidden);
    const Floats factors = make_floats(n + n * n);
    for (int64_t t = begin; t < end; ++t) {
      read_row(y, t, input.get());
      for (int64_t j = 0; j < n; ++j) read_row(streams, t * n + j, old.get() + j * hidden);
      const float* from_y = factors.get();
      float* from_stream = factors.get() + n;  // [j, k]
      read_row(post, t, factors.get());
      for (int64_t j = 0; j < n; ++j) read_row(comb, t * n + j, from_stream + j * n);
      for (int64_t k = 0; k < n; ++k) {
        std::fill_n(sum.get(), hidden, 0.0f);
        for (int64_t j = 0; j < n; ++j) {
          const float factor = from_stream[j * n + k];
          const float* stream = old.get() + j * hidden;
          for (int64_t c = 0; c < hidden; ++c) sum[c] += factor * stream[c];
        }
        for (int64_t c = 0; c < hidden; ++c) sum[c] += from_y[k] * input[c];
        write_row(out, t * n + k, sum.get());
      }
    }
  });
}

// streams, fn, scale, base, hc_eps, norm_eps -> collapsed
void mhc_head(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& x = args.tensor(0);
  const WeightRows fn(args.tensor(1), nullptr, 0, 0);
  const std::vector<float> scale = read_all(args.tensor(2));
  const std::vector<float> base = read_all(args.tensor(3));
  const float hc_eps = static_cast<float>(args.real(4));
  const float norm_eps = static_cast<float>(args.real(5));
  const int64_t n = x.size[1];
  require(fn.rows() == n && scale.size() == 1 && static_cast<int64_t>(base.size()) == n,
          "an mHC head does not fit its number of streams");
  for (int64_t tile = 0; tile < x.size[0]; tile += kTokenTile) {
    const int64_t count = std::min(kTokenTile, x.size[0] - tile);
    const FlatStreams streams(x, tile, count);
    const Floats logits = mixer_logits(streams, count, fn, norm_eps, pool);
    pool.parallel_for(count, piece_items(count, count * streams.width()), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* pre = logits.get() + t * n;
        for (int64_t i = 0; i < n; ++i) pre[i] = sigmoid(pre[i] * scale[0] + base[i]) + hc_eps;
        collapse(pre, streams.row(t), n, args.tensor(6), tile + t);
      }
    });
  }
}

}  // namespace dsv4c::cpu
