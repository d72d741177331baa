#include "cuda/cuda_executor.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace dsv4c::cuda {
namespace {

using namespace format;

constexpr uint64_t kStagingBytes = 8 << 20;
// Behind the tensors and the step come pointers that are null, as many as any kernel declares.
constexpr size_t kNullParameters = 2;

DeviceAddress device_address(const std::byte* pointer) { return reinterpret_cast<DeviceAddress>(pointer); }

int64_t dim(const StepMemory& memory, Dim which) { return memory.dims[static_cast<int>(which)]; }

// The tensor with the sizes of this step, and the bytes from its first to its last element.
TensorView view_of(const Tensor& tensor, const StepMemory& memory, uint64_t* span) {
  TensorView view;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.ndim = tensor.ndim;
  int64_t dense = 1;
  int64_t last = 0;
  bool empty = false;
  for (uint32_t i = tensor.ndim; i-- > 0;) {
    const Dim which = static_cast<Dim>(tensor.dim[i]);
    view.size[i] = which == Dim::FIXED ? static_cast<int64_t>(tensor.size[i]) : dim(memory, which);
    view.stride[i] = static_cast<Space>(tensor.space) == Space::OUTPUT ? dense : tensor.stride[i];
    dense *= view.size[i];
    empty |= view.size[i] == 0;
    last += (view.size[i] - 1) * view.stride[i];
  }
  *span = empty ? 0 : static_cast<uint64_t>((last + 1) * dtype_size(view.dtype));
  return view;
}

}  // namespace

CudaExecutor::Resources::Resources(const Device& device, const Plan& plan)
    : stream(device),
      arena(device, largest_arena(plan), "the arena"),
      step(device, plan),
      sampled(device, uint64_t{largest_bucket(plan)} * sizeof(int32_t), "the sampled tokens"),
      staging(device, kStagingBytes, "results of a step") {
  for (int i = 0; i < 2; ++i) halves.emplace_back(device, kEventDisableTiming);
  if (arena.size() > 0)
    device.driver().check(device.driver().fill(arena.address(), 0, arena.size(), stream.handle()),
                          "clearing the arena");
}

CudaExecutor::CudaExecutor(const CudaBackend& backend, const ExecutorOptions& options)
    : backend_(backend),
      device_(backend.device()),
      driver_(device_.driver()),
      plan_(backend.plan()),
      options_(options) {
  const CurrentContext current(device_);
  own_ = std::make_unique<Resources>(device_, plan_);
}

CudaExecutor::~CudaExecutor() {
  driver_.context_push(device_.context());
  driver_.stream_synchronize(own_->stream.handle());
  own_.reset();
  ContextHandle popped;
  driver_.context_pop(&popped);
}

std::byte* CudaExecutor::allocate_state(uint64_t size, const char* what) {
  const CurrentContext current(device_);
  own_->state = DeviceMemory(device_, size, what);
  std::byte* state = reinterpret_cast<std::byte*>(own_->state.address());
  if (size > 0) fill(state, 0, size);
  return state;
}

void CudaExecutor::fill(std::byte* at, uint8_t value, uint64_t size) {
  const CurrentContext current(device_);
  driver_.check(driver_.fill(device_address(at), value, size, own_->stream.handle()), "filling state");
}

void CudaExecutor::copy(std::byte* to, const std::byte* from, uint64_t size) {
  const CurrentContext current(device_);
  driver_.check(driver_.copy_on_device(device_address(to), device_address(from), size, own_->stream.handle()),
                "copying state");
}

void CudaExecutor::read(void* to, const std::byte* from, uint64_t size) {
  const CurrentContext current(device_);
  driver_.check(driver_.copy_to_host(to, device_address(from), size, own_->stream.handle()), "reading state");
}

void CudaExecutor::write(std::byte* to, const void* from, uint64_t size) {
  const CurrentContext current(device_);
  driver_.check(driver_.copy_to_device(device_address(to), from, size, own_->stream.handle()), "writing state");
}

void CudaExecutor::finish() {
  const CurrentContext current(device_);
  own_->stream.synchronize("working on state");
}

void CudaExecutor::run(const Bucket& bucket, const StepMemory& memory, bool sampling, const Trace* trace) {
  const CurrentContext current(device_);
  const bool logits = dim(memory, Dim::LOGITS) > 0;
  const Step step{bucket, memory, logits, sampling && logits};
  try {
    own_->step.upload(bucket, memory, step.sampling, own_->stream.handle());
    start(step, trace);
    copy_results(step);
  } catch (...) {
    // Nothing may read the step's inputs any more when the next ones are written.
    driver_.stream_synchronize(own_->stream.handle());
    throw;
  }
}

void CudaExecutor::start(const Step& step, const Trace* trace) {
  if (options_.poison && own_->arena.size() > 0)
    driver_.check(driver_.fill(own_->arena.address(), 0xFF, own_->arena.size(), own_->stream.handle()),
                  "poisoning the arena");
  if (trace) return trace->outputs ? run_traced(step, *trace) : run_timed(step, *trace);
  if (!options_.graphs) return launch_all(step);
  const auto bucket_index = static_cast<uint64_t>(&step.bucket - plan_.buckets.data());
  const uint64_t key = bucket_index * 4 + step.logits * 2 + step.sampling;
  const auto make = [&] { return Graph(device_, own_->stream, [&] { launch_all(step); }); };
  own_->graphs.get(key, addresses_version_ + own_->step.version(), make).replay(own_->stream);
}

// The logits of a whole prefill take gigabytes that most sessions never ask for: the buffer follows the steps.
void CudaExecutor::reserve_logits(uint64_t rows) {
  const CurrentContext current(device_);
  const uint64_t row_bytes = uint64_t{plan_.header.vocab_size} * sizeof(float);
  if (rows * row_bytes <= own_->logits.size()) return;
  own_->logits = DeviceMemory();
  ++addresses_version_;
  uint64_t room = 1;
  while (room < rows) room *= 2;
  room = std::max(rows, std::min<uint64_t>(room, largest_bucket(plan_)));
  const std::string what = "the logits of " + std::to_string(rows) + " rows";
  try {
    own_->logits = DeviceMemory(device_, room * row_bytes, what.c_str());
  } catch (const StatusError& error) {
    if (error.status() != DSV4C_OUT_OF_MEMORY || room == rows) throw;
    own_->logits = DeviceMemory(device_, rows * row_bytes, what.c_str());
  }
}

DeviceAddress CudaExecutor::address(const Tensor& tensor, const Step& step) const {
  switch (static_cast<Space>(tensor.space)) {
    case Space::ARENA:
      return own_->arena.address() + tensor.offset;
    case Space::WEIGHT:
      return backend_.weights() + tensor.offset;
    case Space::STATE:
      return device_address(step.memory.states[tensor.index]) + tensor.offset;
    case Space::INPUT:
      return own_->step.input(static_cast<Input>(tensor.index), step.bucket);
    case Space::OUTPUT:
      return static_cast<Output>(tensor.index) == Output::LOGITS ? own_->logits.address() : own_->sampled.address();
  }
  return 0;
}

void CudaExecutor::launch(const Launch& launch, const Step& step) const {
  // In the order of the kernel's parameters.
  std::vector<DeviceAddress> values;
  values.reserve(launch.arg_count + 1 + kNullParameters);
  for (uint32_t i = 0; i < launch.arg_count; ++i) {
    const Arg& arg = plan_.args[launch.first_arg + i];
    values.push_back(address(plan_.tensors[static_cast<size_t>(arg.value)], step));
  }
  values.push_back(own_->step.header());
  values.resize(values.size() + kNullParameters);
  std::vector<void*> parameters;
  parameters.reserve(values.size());
  for (DeviceAddress& value : values) parameters.push_back(&value);

  const FunctionHandle function = backend_.images().function(launch.kernel);
  LaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (launch.flags & kCooperative) {
    attributes[count].id = kAttributeCooperative;
    attributes[count++].value.cooperative = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = kAttributeClusterDimension;
    unsigned* size = attributes[count++].value.cluster;
    size[0] = launch.cluster;
    size[1] = size[2] = 1;
  }
  if ((launch.flags & kProgrammatic) && driver_.version >= kProgrammaticVersion) {
    attributes[count].id = kAttributeProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_serialization_allowed = 1;
  }
  Result result;
  if (count == 0) {
    result = driver_.launch_kernel(function, launch.grid_x, launch.grid_y, launch.grid_z, launch.block_x,
                                   launch.block_y, launch.block_z, launch.shared_bytes, own_->stream.handle(),
                                   parameters.data(), nullptr);
  } else {
    const LaunchConfig config{{launch.grid_x, launch.grid_y, launch.grid_z},
                              {launch.block_x, launch.block_y, launch.block_z},
                              launch.shared_bytes,
                              own_->stream.handle(),
                              attributes,
                              count};
    result = driver_.launch_kernel_ex(&config, function, parameters.data(), nullptr);
  }
  if (result == kSuccess) return;
  const std::string where = std::string("at launch %") + plan_.text(launch.name) + " of kernel " +
                            plan_.text(plan_.kernels[launch.kernel].name);
  driver_.check(result, where.c_str());
}

void CudaExecutor::launch_all(const Step& step) const {
  for (uint32_t i = 0; i < step.bucket.launch_count; ++i) {
    const Launch& each = plan_.launches[step.bucket.first_launch + i];
    if (takes_part(each, step.logits, step.sampling)) launch(each, step);
  }
}

template <typename Visit>
void CudaExecutor::for_each_operator(const Step& step, Visit&& visit) const {
  uint32_t first = 0;
  for (uint32_t i = 0; i < step.bucket.launch_count; ++i) {
    const Launch& each = plan_.launches[step.bucket.first_launch + i];
    if (each.flags & kStage) continue;
    if (takes_part(each, step.logits, step.sampling)) visit(first, i);
    first = i + 1;
  }
}

// Stops after every operator, so that an error of the GPU can be told from those before.
void CudaExecutor::run_traced(const Step& step, const Trace& trace) {
  own_->stream.synchronize("copying the step's inputs");
  for_each_operator(step, [&](uint32_t first, uint32_t last) {
    const Launch* launches = plan_.launches.data() + step.bucket.first_launch;
    const std::string where = std::string("after launch %") + plan_.text(launches[last].name);
    driver_.check(driver_.event_record(mark(0).handle(), own_->stream.handle()), where.c_str());
    for (uint32_t i = first; i <= last; ++i) launch(launches[i], step);
    driver_.check(driver_.event_record(mark(1).handle(), own_->stream.handle()), where.c_str());
    own_->stream.synchronize(where.c_str());
    const double seconds = seconds_between(0, 1, where.c_str());
    if (!report(step, trace, first, last, seconds)) fail(DSV4C_STOPPED, "the callback stopped the step");
  });
}

// Marks between the operators of an otherwise ordinary step.
void CudaExecutor::run_timed(const Step& step, const Trace& trace) {
  size_t count = 0;
  for_each_operator(step, [&](uint32_t, uint32_t) { mark(++count); });
  const auto launch_marked = [&](bool recording) {
    size_t next = 0;
    const auto set_mark = [&] {
      const EventHandle event = mark(next++).handle();
      // Recorded in a graph, an event is otherwise only an edge of it.
      const Result result = recording
                                ? driver_.event_record_with_flags(event, own_->stream.handle(), kEventRecordExternal)
                                : driver_.event_record(event, own_->stream.handle());
      driver_.check(result, "timing launches");
    };
    set_mark();
    for_each_operator(step, [&](uint32_t first, uint32_t last) {
      for (uint32_t i = first; i <= last; ++i) launch(plan_.launches[step.bucket.first_launch + i], step);
      set_mark();
    });
  };
  const std::string where = describe(step);
  if (options_.graphs) {
    const Graph graph(device_, own_->stream, [&] { launch_marked(true); });
    graph.replay(own_->stream);
    own_->stream.synchronize(where.c_str());
  } else {
    launch_marked(false);
    own_->stream.synchronize(where.c_str());
  }
  size_t next = 0;
  for_each_operator(step, [&](uint32_t first, uint32_t last) {
    const double seconds = seconds_between(next, next + 1, where.c_str());
    ++next;
    if (!report(step, trace, first, last, seconds)) fail(DSV4C_STOPPED, "the callback stopped the step");
  });
}

Event& CudaExecutor::mark(size_t index) {
  while (own_->marks.size() <= index) own_->marks.emplace_back(device_, 0u);
  return own_->marks[index];
}

double CudaExecutor::seconds_between(size_t first_mark, size_t second_mark, const char* where) {
  float milliseconds = 0;
  const EventHandle start = mark(first_mark).handle(), end = mark(second_mark).handle();
  driver_.check(driver_.event_elapsed_time(&milliseconds, start, end), where);
  return std::max(0.0, static_cast<double>(milliseconds) * 1e-3);
}

// One operator to the observer, with its outputs if they are wanted.
bool CudaExecutor::report(const Step& step, const Trace& trace, uint32_t first, uint32_t last, double seconds) {
  const Launch* launches = plan_.launches.data() + step.bucket.first_launch;
  const Launch& launch = launches[last];
  const uint32_t output_count = trace.outputs ? launch.output_count : 0;
  uint64_t bytes_moved = 0, flops = 0;
  for (uint32_t i = first; i <= last; ++i) {
    bytes_moved += launches[i].bytes_moved;
    flops += launches[i].flops;
  }
  std::vector<ArgValue> outputs(output_count);
  traced_.resize(std::max<size_t>(traced_.size(), output_count));
  for (uint32_t i = 0; i < output_count; ++i) {
    const Arg& arg = plan_.args[launch.first_arg + launch.arg_count - output_count + i];
    const Tensor& tensor = plan_.tensors[static_cast<size_t>(arg.value)];
    uint64_t span;
    outputs[i].kind = ArgKind::TENSOR;
    outputs[i].tensor = view_of(tensor, step.memory, &span);
    traced_[i].resize(span);
    outputs[i].tensor.data = traced_[i].data();
    if (span > 0) copy_to_host(traced_[i].data(), address(tensor, step), span, "copying traced outputs");
  }
  return trace.observer({last, launch, outputs.data(), output_count, bytes_moved, flops, seconds});
}

void CudaExecutor::copy_results(const Step& step) {
  const std::string where = describe(step);
  const auto rows = static_cast<uint64_t>(dim(step.memory, Dim::LOGITS));
  void* logits = step.memory.outputs[static_cast<int>(Output::LOGITS)];
  void* sampled = step.memory.outputs[static_cast<int>(Output::SAMPLED)];
  if (step.logits && logits)
    copy_to_host(logits, own_->logits.address(), rows * plan_.header.vocab_size * sizeof(float), where.c_str());
  if (step.sampling && sampled)
    copy_to_host(sampled, own_->sampled.address(), rows * sizeof(int32_t), where.c_str());
  own_->stream.synchronize(where.c_str());
}

// Through pinned memory: one half of it is emptied while the other is filled. `where` is added to an error, which may
// be one of the launches before.
void CudaExecutor::copy_to_host(void* to, DeviceAddress from, uint64_t size, const char* where) {
  constexpr uint64_t kHalf = kStagingBytes / 2;
  std::byte* target = static_cast<std::byte*>(to);
  const uint64_t pieces = (size + kHalf - 1) / kHalf;
  const auto empty = [&](uint64_t piece) {
    const uint64_t begin = piece * kHalf;
    driver_.check(driver_.event_synchronize(own_->halves[piece % 2].handle()), where);
    std::memcpy(target + begin, own_->staging.data() + piece % 2 * kHalf, std::min(kHalf, size - begin));
  };
  for (uint64_t piece = 0; piece < pieces; ++piece) {
    if (piece >= 2) empty(piece - 2);
    const uint64_t begin = piece * kHalf;
    std::byte* half = own_->staging.data() + piece % 2 * kHalf;
    const uint64_t bytes = std::min(kHalf, size - begin);
    driver_.check(driver_.copy_to_host(half, from + begin, bytes, own_->stream.handle()), where);
    driver_.check(driver_.event_record(own_->halves[piece % 2].handle(), own_->stream.handle()), where);
  }
  for (uint64_t piece = pieces >= 2 ? pieces - 2 : 0; piece < pieces; ++piece) empty(piece);
}

std::string CudaExecutor::describe(const Step& step) const {
  return "in a step of " + std::to_string(dim(step.memory, Dim::TOKENS)) +
         " rows; a traced step tells after which launch";
}

}  // namespace dsv4c::cuda
