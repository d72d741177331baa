#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernel.h"
#include "plan_reader.h"

namespace dsv4c {

// One run of a bucket. Inputs and outputs are in the host's memory; a backend copies what its machine cannot reach.
struct StepMemory {
  int64_t dims[format::kDimCount] = {};  // actual sizes by Dim
  std::byte* const* states = nullptr;    // one plane each, in the executor's memory
  const void* inputs[format::kInputCount] = {};  // by Input; an absent mask is null
  uint64_t block_table_version = 0;              // changes with the bytes of the block table
  void* outputs[format::kOutputCount] = {};      // by Output; null: nobody wants it
};

// An operator that has run; on a GPU it may have taken several launches, of which this is the last.
struct LaunchReport {
  uint32_t index;  // in its bucket
  const format::Launch& launch;
  const ArgValue* outputs;  // in the host's memory
  uint32_t output_count;    // 0 if only times are asked for
  uint64_t bytes_moved;
  uint64_t flops;
  double seconds;
};

// Called after every operator of a traced step; false stops the step.
using LaunchObserver = std::function<bool(const LaunchReport&)>;

struct Trace {
  LaunchObserver observer;
  // Without outputs a GPU need not stop after every operator, so that the times are those of an ordinary step.
  bool outputs = true;
};

// A session's side of a backend: its memory where launches run, and the steps over it. Used by one thread at a time.
class Executor {
 public:
  virtual ~Executor() = default;

  // Zeroed memory for the state planes, called once. `what` says in errors what it is for. Only launches and the calls
  // below may follow the address.
  virtual std::byte* allocate_state(uint64_t size, const char* what) = 0;
  virtual void fill(std::byte* at, uint8_t value, uint64_t size) = 0;
  virtual void copy(std::byte* to, const std::byte* from, uint64_t size) = 0;
  virtual void read(void* to, const std::byte* from, uint64_t size) = 0;
  virtual void write(std::byte* to, const void* from, uint64_t size) = 0;
  // The calls above may return early; this one returns when they are done, or throws what went wrong.
  virtual void finish() = 0;

  // Memory for the logits of that many rows; called before a step changes anything.
  virtual void reserve_logits(uint64_t rows) = 0;
  // Runs the launches of `bucket` in order: HEAD ones if dims say that logits are wanted, SAMPLE ones if `sampling`.
  virtual void run(const format::Bucket& bucket, const StepMemory& memory, bool sampling, const Trace* trace) = 0;
};

struct ExecutorOptions {
  bool poison = false;  // the arena holds NaN bytes before every step
  bool graphs = true;   // launches may be recorded once and replayed
};

// Executes the launches of a plan on one kind of machine. Used by several sessions at once.
class Backend {
 public:
  virtual ~Backend() = default;
  // What the engine's plan must fit.
  virtual Machine machine() const = 0;
  // Called once, before the first executor.
  virtual void load(const Plan& plan) = 0;
  // What `load` took to bring the weights to where launches read them.
  virtual double weight_seconds() const { return 0; }
  virtual std::unique_ptr<Executor> executor(const ExecutorOptions& options) const = 0;
};

// Whether a launch takes part in a step that wants logits, or tokens too.
inline bool takes_part(const format::Launch& launch, bool logits, bool sampling) {
  if ((launch.flags & (format::kHead | format::kSample)) && !logits) return false;
  return !(launch.flags & format::kSample) || sampling;
}

// What holds every step of a session.
uint64_t largest_arena(const Plan& plan);
uint32_t largest_bucket(const Plan& plan);  // rows

}  // namespace dsv4c
