#include "cpu_backend.h"

#include <bit>
#include <chrono>
#include <cstring>
#include <new>

#include "error.h"
#include "memory.h"

namespace dsv4c {
namespace {

using namespace format;

KernelFn find_kernel(std::string_view name) {
  constexpr std::string_view kNamespace = "dsv4::";
  if (name.starts_with(kNamespace)) name.remove_prefix(kNamespace.size());
  return find_cpu_kernel(name);
}

class CpuExecutor : public Executor {
 public:
  CpuExecutor(const CpuBackend& backend, bool poison)
      : backend_(backend), poison_(poison), arena_(largest_arena(backend.plan()), "the arena") {}

  std::byte* allocate_state(uint64_t size, const char* what) override {
    state_ = Memory(size, what);
    return state_.data();
  }
  void fill(std::byte* at, uint8_t value, uint64_t size) override { std::memset(at, value, size); }
  void copy(std::byte* to, const std::byte* from, uint64_t size) override { std::memcpy(to, from, size); }
  void read(void* to, const std::byte* from, uint64_t size) override { std::memcpy(to, from, size); }
  void write(std::byte* to, const void* from, uint64_t size) override { std::memcpy(to, from, size); }
  void finish() override {}
  void reserve_logits(uint64_t) override {}

  void run(const Bucket& bucket, const StepMemory& memory, bool sampling, const Trace* trace) override {
    if (poison_ && arena_.size() > 0) std::memset(arena_.data(), 0xFF, arena_.size());
    StepMemory complete = memory;
    const size_t rows = static_cast<size_t>(memory.dims[static_cast<int>(Dim::LOGITS)]);
    auto output = [&](Output which) -> void*& { return complete.outputs[static_cast<int>(which)]; };
    if (!output(Output::LOGITS)) {
      logits_.resize(rows * backend_.plan().header.vocab_size);
      output(Output::LOGITS) = logits_.data();
    }
    if (!output(Output::SAMPLED)) {
      ids_.resize(rows);
      output(Output::SAMPLED) = ids_.data();
    }
    backend_.run(bucket, arena_.data(), complete, sampling, trace);
  }

 private:
  const CpuBackend& backend_;
  bool poison_;
  Memory arena_;
  Memory state_;
  // What launches write and nobody wants.
  std::vector<float> logits_;
  std::vector<int32_t> ids_;
};

}  // namespace

Machine CpuBackend::machine() const {
  Machine machine;
  machine.has_kernel = [](std::string_view name) { return find_kernel(name) != nullptr; };
  return machine;
}

std::unique_ptr<Executor> CpuBackend::executor(const ExecutorOptions& options) const {
  return std::make_unique<CpuExecutor>(*this, options.poison);
}

void CpuBackend::load(const Plan& plan) {
  plan_ = &plan;
  for (const Kernel& kernel : plan.kernels) kernels_.push_back(find_kernel(plan.text(kernel.name)));
}

TensorView CpuBackend::view(const Tensor& tensor, std::byte* arena, const StepMemory& memory) const {
  TensorView view;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.ndim = tensor.ndim;
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    const Dim dim = static_cast<Dim>(tensor.dim[i]);
    view.size[i] = dim == Dim::FIXED ? static_cast<int64_t>(tensor.size[i]) : memory.dims[tensor.dim[i]];
    view.stride[i] = tensor.stride[i];
  }
  std::byte* base = nullptr;
  switch (static_cast<Space>(tensor.space)) {
    case Space::ARENA:
      base = arena;
      break;
    case Space::WEIGHT:
      base = const_cast<std::byte*>(weights_);
      break;
    case Space::STATE:
      base = memory.states[tensor.index];
      break;
    case Space::INPUT:
      base = static_cast<std::byte*>(const_cast<void*>(memory.inputs[tensor.index]));
      break;
    case Space::OUTPUT:
      base = static_cast<std::byte*>(memory.outputs[tensor.index]);
      break;
  }
  if (static_cast<Space>(tensor.space) == Space::INPUT || static_cast<Space>(tensor.space) == Space::OUTPUT) {
    // Rows of the caller's arrays follow one another; the plan cannot know the width of the block table.
    int64_t stride = 1;
    for (uint32_t i = tensor.ndim; i-- > 0;) {
      view.stride[i] = stride;
      stride *= view.size[i];
    }
  }
  view.data = base ? base + tensor.offset : nullptr;
  return view;
}

ArgValue CpuBackend::resolve(const Arg& arg, std::byte* arena, const StepMemory& memory) const {
  ArgValue value;
  value.kind = static_cast<ArgKind>(arg.kind);
  switch (value.kind) {
    case ArgKind::NONE:
      break;
    case ArgKind::TENSOR: {
      const Tensor& tensor = plan_->tensors[static_cast<size_t>(arg.value)];
      value.tensor = view(tensor, arena, memory);
      if (!value.tensor.data && static_cast<Space>(tensor.space) == Space::INPUT) value.kind = ArgKind::NONE;
      break;
    }
    case ArgKind::INT:
      value.integer = arg.value;
      break;
    case ArgKind::FLOAT:
      value.real = std::bit_cast<double>(arg.value);
      break;
  }
  return value;
}

void CpuBackend::call(const Launch& launch, const KernelArgs& args) const {
  const char* kernel = plan_->text(plan_->kernels[launch.kernel].name);
  try {
    kernels_[launch.kernel](args, pool_);
  } catch (const StatusError&) {
    throw;
  } catch (const std::bad_alloc&) {
    fail(DSV4C_OUT_OF_MEMORY, "kernel %s (%s) found no memory for its scratch", kernel, plan_->text(launch.name));
  } catch (const std::exception& error) {
    fail(DSV4C_INTERNAL, "kernel %s (%s): %s", kernel, plan_->text(launch.name), error.what());
  }
}

void CpuBackend::run(const Bucket& bucket, std::byte* arena, const StepMemory& memory, bool sampling,
                     const Trace* trace) const {
  using Clock = std::chrono::steady_clock;
  const bool wants_logits = memory.dims[static_cast<int>(Dim::LOGITS)] > 0;
  std::vector<ArgValue> values;
  for (uint32_t i = 0; i < bucket.launch_count; ++i) {
    const Launch& launch = plan_->launches[bucket.first_launch + i];
    if (!takes_part(launch, wants_logits, sampling)) continue;
    values.clear();
    for (uint32_t j = 0; j < launch.arg_count; ++j)
      values.push_back(resolve(plan_->args[launch.first_arg + j], arena, memory));
    const Clock::time_point start = trace ? Clock::now() : Clock::time_point();
    call(launch, KernelArgs(values.data(), values.size()));
    if (!trace) continue;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const ArgValue* outputs = values.data() + (launch.arg_count - launch.output_count);
    const uint32_t output_count = trace->outputs ? launch.output_count : 0;
    if (!trace->observer({i, launch, outputs, output_count, launch.bytes_moved, launch.flops, seconds}))
      fail(DSV4C_STOPPED, "the callback stopped the step");
  }
}

}  // namespace dsv4c
