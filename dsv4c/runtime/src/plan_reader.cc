#include "plan_reader.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "dtype.h"
#include "error.h"
#include "kernel.h"
#include "launch_check.h"
#include "tensor_check.h"

namespace dsv4c {
namespace {

using namespace format;

template <typename T>
std::vector<T> read_table(Bytes section, uint64_t offset, uint64_t count, const char* name) {
  if (offset > section.size || count > (section.size - offset) / sizeof(T))
    fail(DSV4C_FORMAT, "plan: table %s (offset %" PRIu64 ", %" PRIu64 " records) lies outside the section", name,
         offset, count);
  if (count > kNoIndex) fail(DSV4C_FORMAT, "plan: table %s has %" PRIu64 " records", name, count);
  std::vector<T> table(count);
  // The section need not align its records.
  if (count > 0) std::memcpy(table.data(), section.data + offset, count * sizeof(T));
  return table;
}

void check_range(uint64_t first, uint64_t count, uint64_t total, const char* owner, uint64_t index,
                 const char* table) {
  if (first > total || count > total - first)
    fail(DSV4C_FORMAT, "plan: %s %" PRIu64 " has %s %" PRIu64 " to %" PRIu64 " of %" PRIu64, owner, index, table, first,
         first + count, total);
}

void check_string(const Plan& plan, uint32_t offset, const char* owner, size_t index) {
  if (offset >= plan.strings.size())
    fail(DSV4C_FORMAT, "plan: the name of %s %zu lies outside the strings", owner, index);
}

void check_header(const Plan& plan, const Header& header, uint64_t weight_bytes) {
  const PlanHeader& h = plan.header;
  if (h.world_size != header.world_size || h.rank != header.rank)
    fail(DSV4C_FORMAT, "plan is of rank %u of %u, the engine is rank %u of %u", h.rank, h.world_size, header.rank,
         header.world_size);
  if (h.weight_bytes != weight_bytes)
    fail(DSV4C_FORMAT, "plan expects %" PRIu64 " bytes of weights, WEIGHTS have %" PRIu64, h.weight_bytes,
         weight_bytes);
  if (h.vocab_size == 0 || h.vocab_size > INT32_MAX)
    fail(DSV4C_FORMAT, "plan: vocabulary of %u tokens", h.vocab_size);
  if (h.max_context == 0 || h.max_context > INT32_MAX)
    fail(DSV4C_FORMAT, "plan: context of %u positions", h.max_context);
  if (h.block_tokens == 0 || h.block_tokens > INT32_MAX)
    fail(DSV4C_FORMAT, "plan: blocks of %u tokens", h.block_tokens);
  if (h.bos_token_id < kNoIndex && h.bos_token_id >= h.vocab_size)
    fail(DSV4C_FORMAT, "plan: begin token %" PRIu64 " is outside the vocabulary of %u", h.bos_token_id, h.vocab_size);
  for (uint32_t id : plan.eos_ids)
    if (id >= h.vocab_size)
      fail(DSV4C_FORMAT, "plan: end token %u is outside the vocabulary of %u", id, h.vocab_size);
}

// Layers ascend and have equally many experts, so that the counts are one matrix.
void add_counted_state(Plan& plan, uint32_t index) {
  const State& state = plan.states[index];
  const char* name = plan.text(state.name);
  if (static_cast<DType>(state.dtype) != DType::I64 || state.row_bytes != sizeof(int64_t))
    fail(DSV4C_FORMAT, "state plane %s holds counts of %" PRIu64 " bytes, dtype %u; they are int64", name,
         state.row_bytes, state.dtype);
  if (state.layer >= plan.header.layer_count)
    fail(DSV4C_FORMAT, "state plane %s counts the routing of layer %u of %u", name, state.layer,
         plan.header.layer_count);
  if (!plan.counted_states.empty()) {
    const State& before = plan.states[plan.counted_states.back()];
    if (state.layer <= before.layer || state.rows != before.rows)
      fail(DSV4C_FORMAT, "state plane %s counts %u experts of layer %u behind %u experts of layer %u", name, state.rows,
           state.layer, before.rows, before.layer);
  }
  plan.counted_states.push_back(index);
}

void check_states(Plan& plan) {
  for (size_t i = 0; i < plan.states.size(); ++i) {
    const State& state = plan.states[i];
    check_string(plan, state.name, "state plane", i);
    const char* name = plan.text(state.name);
    const StateKind kind = static_cast<StateKind>(state.kind);
    const bool block = kind == StateKind::BLOCK;
    if (!block && kind != StateKind::SLOT && kind != StateKind::ROUTING_COUNTS)
      fail(DSV4C_FORMAT, "state plane %s has unknown kind %u", name, state.kind);
    if (!is_dtype(state.dtype)) fail(DSV4C_FORMAT, "state plane %s has unknown dtype %u", name, state.dtype);
    uint64_t bytes;
    if (__builtin_mul_overflow(state.rows, state.row_bytes, &bytes) || bytes == 0)
      fail(DSV4C_FORMAT, "state plane %s has %u rows of %" PRIu64 " bytes", name, state.rows, state.row_bytes);
    // Entry j is in block j / rows of the slot, which must exist for every entry of the context.
    if (block && (state.ratio == 0 || uint64_t{state.rows} * state.ratio < plan.header.block_tokens))
      fail(DSV4C_FORMAT, "state plane %s has %u rows a block for entries of %u positions; a block has %u positions",
           name, state.rows, state.ratio, plan.header.block_tokens);
    if (kind == StateKind::ROUTING_COUNTS) add_counted_state(plan, static_cast<uint32_t>(i));
  }
}

void check_kernels(const Plan& plan, const Machine& machine) {
  for (size_t i = 0; i < plan.kernels.size(); ++i) {
    const Kernel& kernel = plan.kernels[i];
    check_string(plan, kernel.name, "kernel", i);
    const char* name = plan.text(kernel.name);
    if (!machine.runs_images()) {
      if (!machine.has_kernel(name))
        fail(DSV4C_UNSUPPORTED, "engine needs kernel %s, which this runtime does not have", name);
      continue;
    }
    check_string(plan, kernel.entry, "the entry of kernel", i);
    if (kernel.image_bytes == 0 || kernel.image_offset > machine.kernel_bytes ||
        kernel.image_bytes > machine.kernel_bytes - kernel.image_offset)
      fail(DSV4C_FORMAT,
           "plan: the image of kernel %zu (%s, offset %" PRIu64 ", %" PRIu64 " bytes) lies outside the %" PRIu64
           " bytes of KERNELS",
           i, name, kernel.image_offset, kernel.image_bytes, machine.kernel_bytes);
  }
}

// Memory that exists only when logits or tokens are asked for belongs to launches that run only then.
void check_flags(const Plan& plan, size_t launch_index, const Tensor& tensor) {
  const Launch& launch = plan.launches[launch_index];
  const bool input = static_cast<Space>(tensor.space) == Space::INPUT;
  const bool output = static_cast<Space>(tensor.space) == Space::OUTPUT;
  const bool sampling = (input && tensor.index > static_cast<uint32_t>(Input::LOGITS_ROWS)) ||
                        (output && tensor.index == static_cast<uint32_t>(Output::SAMPLED));
  const bool head = output || (input && tensor.index >= static_cast<uint32_t>(Input::LOGITS_ROWS));
  if ((sampling && !(launch.flags & kSample)) || (head && !(launch.flags & (kHead | kSample))))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) uses logits or sampling memory but is not flagged so", launch_index,
         plan.text(launch.name));
}

void check_launch(const Plan& plan, size_t index, const Bucket& bucket, const Machine& machine) {
  const Launch& launch = plan.launches[index];
  check_string(plan, launch.name, "launch", index);
  if (launch.kernel >= plan.kernels.size())
    fail(DSV4C_FORMAT, "plan: launch %zu has kernel %u of %zu", index, launch.kernel, plan.kernels.size());
  check_range(launch.first_arg, launch.arg_count, plan.args.size(), "launch", index, "arguments");
  if (launch.output_count > launch.arg_count)
    fail(DSV4C_FORMAT, "plan: launch %zu has %u outputs among %u arguments", index, launch.output_count,
         launch.arg_count);
  for (uint32_t i = 0; i < launch.arg_count; ++i) {
    const Arg& arg = plan.args[launch.first_arg + i];
    const bool is_output = i >= launch.arg_count - launch.output_count;
    if (arg.kind > static_cast<uint32_t>(ArgKind::FLOAT))
      fail(DSV4C_FORMAT, "plan: argument %u of launch %zu has unknown kind %u", i, index, arg.kind);
    if (static_cast<ArgKind>(arg.kind) != ArgKind::TENSOR) {
      if (is_output) fail(DSV4C_FORMAT, "plan: output %u of launch %zu is not a tensor", i, index);
      continue;
    }
    if (arg.value < 0 || static_cast<uint64_t>(arg.value) >= plan.tensors.size())
      fail(DSV4C_FORMAT, "plan: argument %u of launch %zu is tensor %" PRId64 " of %zu", i, index, arg.value,
           plan.tensors.size());
    const size_t tensor_index = static_cast<size_t>(arg.value);
    const Tensor& tensor = plan.tensors[tensor_index];
    const Space space = static_cast<Space>(tensor.space);
    if (is_output && (space == Space::WEIGHT || space == Space::INPUT))
      fail(DSV4C_FORMAT, "plan: launch %zu (%s) writes to memory that is read-only", index, plan.text(launch.name));
    check_extent(plan, tensor_index, bucket);
    check_flags(plan, index, tensor);
  }
  if (machine.runs_images()) return check_call(plan, index, bucket);
  if (launch.flags & ~static_cast<uint32_t>(kHead | kSample))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has unknown flags %u", index, plan.text(launch.name), launch.flags);
  check_arguments(plan, index);
}

// The buckets of main that the machine can run: for its number of SMs, or for any.
void choose_buckets(Plan& plan, const EntryPoint& main, const Machine& machine) {
  std::vector<uint32_t> others;
  for (uint32_t i = 0; i < main.bucket_count; ++i) {
    const uint32_t sm_count = sm_count_of(plan, plan.buckets[main.first_bucket + i]);
    if (sm_count == 0 || sm_count == machine.sm_count)
      plan.main_buckets.push_back(main.first_bucket + i);
    else if (std::find(others.begin(), others.end(), sm_count) == others.end())
      others.push_back(sm_count);
  }
  for (uint32_t bucket : plan.main_buckets)
    if (static_cast<BucketKind>(plan.buckets[bucket].kind) == BucketKind::MIXED) return;
  if (others.empty()) fail(DSV4C_FORMAT, "entry point main has no mixed bucket");
  if (!machine.runs_images())
    fail(DSV4C_FORMAT, "entry point main has buckets for %u streaming multiprocessors on the cpu target", others[0]);
  std::sort(others.begin(), others.end());
  std::string counts;
  for (uint32_t count : others) counts += (counts.empty() ? "" : ", ") + std::to_string(count);
  fail(DSV4C_ARCH, "engine is for GPUs with %s streaming multiprocessors; %s has %u", counts.c_str(),
       machine.name.c_str(), machine.sm_count);
}

void check_entry_points(Plan& plan, const Machine& machine) {
  const EntryPoint* main = nullptr;
  for (size_t i = 0; i < plan.entry_points.size(); ++i) {
    const EntryPoint& entry = plan.entry_points[i];
    check_string(plan, entry.name, "entry point", i);
    check_range(entry.first_bucket, entry.bucket_count, plan.buckets.size(), "entry point", i, "buckets");
    if (std::strcmp(plan.text(entry.name), "main") == 0) main = &entry;
  }
  if (!main) fail(DSV4C_FORMAT, "plan has no entry point main");
  choose_buckets(plan, *main, machine);
}

}  // namespace

Plan read_plan(Bytes section, const Header& header, uint64_t weight_bytes, const Machine& machine) {
  Plan plan;
  PlanHeader& h = plan.header;
  if (section.size < sizeof h)
    fail(DSV4C_FORMAT, "section PLAN is %" PRIu64 " bytes, shorter than its header of %zu", section.size, sizeof h);
  std::memcpy(&h, section.data, sizeof h);
  if (h.plan_version != kPlanVersion)
    fail(DSV4C_VERSION, "plan has version %u; this runtime reads %u", h.plan_version, kPlanVersion);
  plan.entry_points = read_table<EntryPoint>(section, h.entry_points, h.entry_point_count, "entry_points");
  plan.buckets = read_table<Bucket>(section, h.buckets, h.bucket_count, "buckets");
  plan.launches = read_table<Launch>(section, h.launches, h.launch_count, "launches");
  plan.args = read_table<Arg>(section, h.args, h.arg_count, "args");
  plan.tensors = read_table<Tensor>(section, h.tensors, h.tensor_count, "tensors");
  plan.states = read_table<State>(section, h.states, h.state_count, "states");
  plan.kernels = read_table<Kernel>(section, h.kernels, h.kernel_count, "kernels");
  plan.eos_ids = read_table<uint32_t>(section, h.eos_ids, h.eos_count, "eos_ids");
  plan.strings = read_table<char>(section, h.strings, h.strings_bytes, "strings");
  if (plan.strings.empty() || plan.strings.back() != 0) fail(DSV4C_FORMAT, "plan: strings do not end with a zero");

  check_header(plan, header, weight_bytes);
  check_states(plan);
  check_kernels(plan, machine);
  for (size_t i = 0; i < plan.tensors.size(); ++i) check_tensor(plan, i);
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const Bucket& bucket = plan.buckets[i];
    const BucketKind kind = static_cast<BucketKind>(bucket.kind);
    if (kind != BucketKind::DECODE && kind != BucketKind::MIXED)
      fail(DSV4C_FORMAT, "plan: bucket %zu has unknown kind %u", i, bucket.kind);
    if (bucket.tokens == 0 || bucket.tokens > INT32_MAX)
      fail(DSV4C_FORMAT, "plan: bucket %zu has a capacity of %u tokens", i, bucket.tokens);
    check_range(bucket.first_launch, bucket.launch_count, plan.launches.size(), "bucket", i, "launches");
    for (uint32_t j = 0; j < bucket.launch_count; ++j) check_launch(plan, bucket.first_launch + j, bucket, machine);
  }
  check_entry_points(plan, machine);
  return plan;
}

}  // namespace dsv4c
