#include "cpu/kernels.h"
#include "cpu/row_math.h"
#include "cpu/rows.h"
#include "cpu/state_rows.h"

namespace dsv4c::cpu {

namespace {

enum Rounding : int64_t { NONE = 0, FP8 = 1, HADAMARD_FP4 = 2 };

constexpr int64_t kKvGroup = 64;
constexpr int64_t kIndexGroup = 32;

struct Compressor {
  explicit Compressor(const KernelArgs& args)
      : kv(args.tensor(0)),
        gate(args.tensor(1)),
        ape(args.tensor(2)),
        norm_weight(read_all(args.tensor(3))),
        inv_freq(read_all(args.tensor(4))),
        block_table(args.tensor(7)),
        group_state(args.tensor(8)),
        ratio(args.integer(11)),
        overlap(args.integer(12) != 0),
        eps(static_cast<float>(args.real(13))),
        rounding(args.integer(14)),
        dtype(static_cast<DType>(args.integer(15))),
        width(static_cast<int64_t>(norm_weight.size())),
        half(static_cast<int64_t>(inv_freq.size())),
        entries(args.tensor(9), optional_tensor(args, 10), width, 2 * half) {
    if (group_state.dtype != DType::F32) unsupported("an open group", group_state.dtype);
    require(group_state.size[3] == row_width(kv) && row_width(kv) == (overlap ? 2 : 1) * width &&
                row_width(ape) == row_width(kv) && ape.size[0] >= ratio && ratio > 0 && 2 * half <= width &&
                same_rows(kv, gate),
            "a compressor has sizes that do not fit each other");
  }

  // Row of the open groups of a slot: value (part 0) or gate (part 1) of the token at `position`.
  float* open_row(int64_t slot, int64_t position, int64_t part) const {
    return group_state.as<float>() + slot * group_state.stride[0] +
           position % group_state.size[1] * group_state.stride[1] + part * group_state.stride[2];
  }

  // Value and gate (position bias included) of a token of this step, W floats each.
  void read_token(int64_t row, int64_t position, float* value, float* biased, float* scratch) const {
    read_row(kv, row, value);
    read_row(gate, row, biased);
    const float* bias = float_row(ape, position % ratio, scratch);
    for (int64_t c = 0; c < row_width(kv); ++c) biased[c] += bias[c];
  }

  void pool_entry(const StepRun& run, int64_t entry, float* row) const;
  void finish_entry(int64_t entry, float* row) const;

  const TensorView& kv;
  const TensorView& gate;
  const TensorView& ape;
  std::vector<float> norm_weight;
  std::vector<float> inv_freq;
  const TensorView& block_table;
  const TensorView& group_state;
  int64_t ratio;
  bool overlap;
  float eps;
  int64_t rounding;
  DType dtype;
  int64_t width;
  int64_t half;
  StateRows entries;
};

// Softmax-weighted sum over the tokens of group `entry`, and those of the group before where groups overlap.
void Compressor::pool_entry(const StepRun& run, int64_t entry, float* row) const {
  const int64_t full = row_width(kv);
  const int64_t start = entry * ratio;
  const int64_t begin = overlap && entry > 0 ? start - ratio : start;
  const int64_t count = start + ratio - begin;
  const Floats values = make_floats(count * width);
  const Floats gates = make_floats(count * width);
  const Floats token = make_floats(3 * full);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = begin + i;
    const float* value = token.get();
    const float* biased = token.get() + full;
    if (position >= run.first) {
      read_token(run.rows[static_cast<size_t>(position - run.first)], position, token.get(), token.get() + full,
                 token.get() + 2 * full);
    } else {
      value = open_row(run.slot, position, 0);
      biased = open_row(run.slot, position, 1);
    }
    const int64_t channel = position < start ? 0 : full - width;
    std::copy_n(value + channel, width, values.get() + i * width);
    std::copy_n(biased + channel, width, gates.get() + i * width);
  }
  const Floats peak = make_floats(width);
  const Floats total = make_floats(width);
  std::copy_n(gates.get(), width, peak.get());
  for (int64_t i = 1; i < count; ++i) {
    for (int64_t c = 0; c < width; ++c) peak[c] = std::max(peak[c], gates[i * width + c]);
  }
  std::fill_n(total.get(), width, 0.0f);
  std::fill_n(row, width, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      const float weight = std::exp(gates[i * width + c] - peak[c]);
      total[c] += weight;
      row[c] += weight * values[i * width + c];
    }
  }
  for (int64_t c = 0; c < width; ++c) row[c] /= total[c];
}

// Norm, rotation and rounding of a pooled entry.
void Compressor::finish_entry(int64_t entry, float* row) const {
  const Floats angles = make_floats(2 * half);
  round_floats(row, dtype, width);
  normalize_row(row, norm_weight.data(), width, eps);
  round_floats(row, dtype, width);
  rotation(entry * ratio, inv_freq.data(), half, angles.get(), angles.get() + half);
  rotate_row(row, width, angles.get(), angles.get() + half, half);
  round_floats(row, dtype, width);
  if (rounding == FP8) {
    fp8_round_row(row, width - 2 * half, kKvGroup);
    round_floats(row, dtype, width);
  } else if (rounding == HADAMARD_FP4) {
    hadamard_row(row, width);
    round_floats(row, dtype, width);
    fp4_round_row(row, width, kIndexGroup);
    round_floats(row, dtype, width);
  }
}

// Entry `index` of a run, or the token at position `index`.
struct Job {
  const StepRun* run;
  int64_t index;
};

}  // namespace

// kv, gate, ape, norm_weight, inv_freq, slots, positions, block_table, group_state, entries, entry_scales, ratio,
// overlap, eps, rounding, dtype; writes group_state, entries, entry_scales
void compress(const KernelArgs& args, ThreadPool& pool) {
  const Compressor compressor(args);
  const StepRuns step(args.tensor(5), args.tensor(6), compressor.group_state.size[0]);
  const TensorView& table = compressor.block_table;
  const int64_t per_block = compressor.entries.inner();
  const int64_t depth = compressor.group_state.size[1];
  std::vector<Job> closed, kept;
  for (const StepRun& run : step.runs) {
    const int64_t end = run.first + static_cast<int64_t>(run.rows.size());
    for (int64_t entry = run.first / compressor.ratio; entry < end / compressor.ratio; ++entry) {
      closed.push_back({&run, entry});
    }
    for (int64_t p = std::max(run.first, end - depth); p < end; ++p) kept.push_back({&run, p});
  }

  pool.parallel_for(static_cast<int64_t>(closed.size()), 1, [&](int64_t begin, int64_t end) {
    const Floats row = make_floats(compressor.width);
    for (int64_t i = begin; i < end; ++i) {
      const auto [run, entry] = closed[static_cast<size_t>(i)];
      compressor.pool_entry(*run, entry, row.get());
      compressor.finish_entry(entry, row.get());
      const int64_t block = int_values(table)[run->slot * table.stride[0] + entry / per_block];
      compressor.entries.write(block, entry % per_block, row.get());
    }
  });

  // After the entries: they read the rows that this overwrites.
  pool.parallel_for(static_cast<int64_t>(kept.size()), 8, [&](int64_t begin, int64_t end) {
    const Floats scratch = make_floats(row_width(compressor.kv));
    for (int64_t i = begin; i < end; ++i) {
      const auto [run, position] = kept[static_cast<size_t>(i)];
      compressor.read_token(run->rows[static_cast<size_t>(position - run->first)], position,
                            compressor.open_row(run->slot, position, 0), compressor.open_row(run->slot, position, 1),
                            scratch.get());
    }
  });
}

}  // namespace dsv4c::cpu
