#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/simd/simd.h"
#include "cpu/state_rows.h"
#include "cpu/work_split.h"

namespace dsv4c::cpu {

namespace {

// Heads that share the decoding of a key.
constexpr int64_t kHeadBlock = kBlockRows;
// Keys that are decoded at a time.
constexpr int64_t kKeyBlock = 256;

struct Attention {
  explicit Attention(const KernelArgs& args)
      : q(args.tensor(0)),
        kv(args.tensor(1)),
        ring(args.tensor(2), optional_tensor(args, 3), q.size[2], args.integer(13)),
        selected(optional_tensor(args, 6)),
        sink(read_all(args.tensor(7))),
        block_table(args.tensor(10)),
        window(args.integer(11)),
        ratio(args.integer(12)),
        scale(static_cast<float>(args.real(14))),
        y(args.tensor(15)) {
    require(row_width(kv) == q.size[2] && static_cast<int64_t>(sink.size()) == q.size[1] && same_rows(q, y),
            "attention has sizes that do not fit each other");
    if (args.has(4)) entries.emplace_back(args.tensor(4), optional_tensor(args, 5), q.size[2], args.integer(13));
  }

  // Multiply-adds, about.
  int64_t work(const StepRuns& step) const {
    int64_t keys = 0;
    for (size_t row = 0; row < step.run_of_row.size(); ++row) {
      const int64_t length = step.runs[static_cast<size_t>(step.run_of_row[row])].first + step.offset_of_row[row] + 1;
      keys += std::min(length, window);
      if (!entries.empty()) keys += selected != nullptr ? std::min(row_width(*selected), length) : length / ratio;
    }
    return 2 * keys * q.size[1] * q.size[2];
  }

  void run_heads(const StepRun& run, int64_t offset, int64_t first_head, int64_t heads) const;

  const TensorView& q;
  const TensorView& kv;
  StateRows ring;
  std::vector<StateRows> entries;  // one or none
  const TensorView* selected;
  std::vector<float> sink;
  const TensorView& block_table;
  int64_t window;
  int64_t ratio;
  float scale;
  const TensorView& y;
};

// The keys of one row of the step, in the order of the reference: ring, this step, entries.
class Keys {
 public:
  Keys(const Attention& attention, const StepRun& run, int64_t offset)
      : attention_(attention),
        run_(run),
        start_(std::max<int64_t>(0, run.first + offset - attention.window + 1)),
        in_window_(run.first + offset - start_ + 1) {
    if (attention.entries.empty()) return;
    if (attention.selected == nullptr) {
      visible_ = (run.first + offset + 1) / attention.ratio;
      return;
    }
    const TensorView& selected = *attention.selected;
    const int32_t* ids = int_values(selected) + row_offset(selected, run.rows[static_cast<size_t>(offset)]);
    for (int64_t i = 0; i < row_width(selected); ++i) {
      if (ids[i] >= 0) chosen_.push_back(ids[i]);
    }
    visible_ = static_cast<int64_t>(chosen_.size());
  }

  int64_t count() const { return in_window_ + visible_; }

  // Pointers to keys first..first+count, decoded to `scratch` [count, width] unless they are float32.
  void read(int64_t first, int64_t count, float* scratch, const float** keys) const {
    const int64_t width = attention_.q.size[2];
    for (int64_t i = 0; i < count; ++i) keys[i] = read_one(first + i, scratch + i * width);
  }

 private:
  const float* read_one(int64_t i, float* scratch) const {
    if (i < in_window_) {
      const int64_t position = start_ + i;
      if (position < run_.first) return attention_.ring.read(run_.slot, position % attention_.ring.inner(), scratch);
      return float_row(attention_.kv, run_.rows[static_cast<size_t>(position - run_.first)], scratch);
    }
    i -= in_window_;
    const int64_t entry = attention_.selected == nullptr ? i : chosen_[static_cast<size_t>(i)];
    const StateRows& entries = attention_.entries.front();
    const TensorView& table = attention_.block_table;
    const int64_t block = int_values(table)[run_.slot * table.stride[0] + entry / entries.inner()];
    return entries.read(block, entry % entries.inner(), scratch);
  }

  const Attention& attention_;
  const StepRun& run_;
  int64_t start_;
  int64_t in_window_;
  int64_t visible_ = 0;
  std::vector<int32_t> chosen_;
};

void Attention::run_heads(const StepRun& run, int64_t offset, int64_t first_head, int64_t heads) const {
  const int64_t width = q.size[2];
  const int64_t row = run.rows[static_cast<size_t>(offset)];
  const Keys keys(*this, run, offset);
  const int64_t count = keys.count();
  const Floats queries = make_floats(heads * width);
  const Floats sums = make_floats(heads * width);
  const Floats scores = make_floats(count * heads);
  const Floats scratch = make_floats(std::min(count, kKeyBlock) * width);
  const float* block[kKeyBlock];
  float peak[kHeadBlock], total[kHeadBlock];
  for (int64_t h = 0; h < heads; ++h) {
    read_row(q, row * q.size[1] + first_head + h, queries.get() + h * width);
    peak[h] = sink[static_cast<size_t>(first_head + h)];
  }
  StoredRows stored;
  stored.codes = reinterpret_cast<const uint8_t*>(queries.get());
  stored.row_bytes = width * static_cast<int64_t>(sizeof(float));
  for (int64_t first = 0; first < count; first += kKeyBlock) {
    const int64_t size = std::min(kKeyBlock, count - first);
    keys.read(first, size, scratch.get(), block);
    simd().project(stored, heads, width, block, size, scores.get() + first * heads, heads);
  }
  for (int64_t i = 0; i < count; ++i) {
    float* score = scores.get() + i * heads;
    for (int64_t h = 0; h < heads; ++h) {
      score[h] *= scale;
      peak[h] = std::max(peak[h], score[h]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t h = 0; h < heads; ++h) scores[i * heads + h] -= peak[h];
  }
  simd().exponentials(scores.get(), count * heads);
  std::fill_n(total, heads, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t h = 0; h < heads; ++h) total[h] += scores[i * heads + h];
  }
  round_floats(scores.get(), q.dtype, count * heads);
  std::fill_n(sums.get(), heads * width, 0.0f);
  for (int64_t first = 0; first < count; first += kKeyBlock) {
    const int64_t size = std::min(kKeyBlock, count - first);
    // One block is still there from the scores.
    if (count > kKeyBlock) keys.read(first, size, scratch.get(), block);
    simd().add_weighted(scores.get() + first * heads, heads, block, size, width, sums.get());
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* sum = sums.get() + h * width;
    const float divisor = total[h] + std::exp(sink[static_cast<size_t>(first_head + h)] - peak[h]);
    for (int64_t c = 0; c < width; ++c) sum[c] /= divisor;
    write_row(y, row * q.size[1] + first_head + h, sum);
  }
}

}  // namespace

// q, kv, ring, ring_scales, entries, entry_scales, selected, sink, slots, positions, block_table, window, ratio,
// rotary_dim, scale -> y
void attention(const KernelArgs& args, ThreadPool& pool) {
  const Attention attention(args);
  const StepRuns step(args.tensor(8), args.tensor(9), attention.ring.outer());
  const int64_t blocks = divide_up(attention.q.size[1], kHeadBlock);
  const int64_t tasks = attention.q.size[0] * blocks;
  pool.parallel_for(tasks, piece_items(tasks, attention.work(step)), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const size_t row = static_cast<size_t>(task / blocks);
      const int64_t head = task % blocks * kHeadBlock;
      attention.run_heads(step.runs[static_cast<size_t>(step.run_of_row[row])], step.offset_of_row[row], head,
                          std::min(kHeadBlock, attention.q.size[1] - head));
    }
  });
}

// kv, ring, ring_scales, slots, positions, rotary_dim; writes ring, ring_scales
void commit_ring(const KernelArgs& args, ThreadPool& pool) {
  const TensorView& kv = args.tensor(0);
  const int64_t width = row_width(kv);
  const StateRows ring(args.tensor(1), optional_tensor(args, 2), width, args.integer(5));
  const StepRuns step(args.tensor(3), args.tensor(4), ring.outer());
  pool.parallel_for(kv.size[0], 8, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(width);
    for (int64_t row = begin; row < end; ++row) {
      const StepRun& run = step.runs[static_cast<size_t>(step.run_of_row[static_cast<size_t>(row)])];
      const int64_t offset = step.offset_of_row[static_cast<size_t>(row)];
      // A later row of this step takes the same place.
      if (offset + ring.inner() < static_cast<int64_t>(run.rows.size())) continue;
      ring.write(run.slot, (run.first + offset) % ring.inner(), float_row(kv, row, scratch.get()));
    }
  });
}

}  // namespace dsv4c::cpu
