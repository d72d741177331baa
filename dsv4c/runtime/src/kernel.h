#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "dtype.h"

namespace dsv4c {

class ThreadPool;

// A tensor with the sizes of this step. Strides count elements of `dtype`; an unused dimension has size 1, stride 0.
// A stride may exceed the row (columns of a merged projection), or be 0 (a broadcast).
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::F32;
  uint32_t ndim = 0;
  int64_t size[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Codes as in the engine file.
enum class ArgKind : uint32_t {
  NONE = 0,  // an absent optional tensor
  TENSOR = 1,
  INT = 2,  // also bool and dtype (as DType)
  FLOAT = 3,
};

struct ArgValue {
  ArgKind kind = ArgKind::NONE;
  TensorView tensor;
  int64_t integer = 0;
  double real = 0;
};

// Arguments of one launch: those of the operator's schema in order, then one tensor per output.
// A wrong index or kind can only come from a plan that does not fit its kernel; the session reports it.
class KernelArgs {
 public:
  KernelArgs(const ArgValue* values, size_t count) : values_(values), count_(count) {}

  size_t count() const { return count_; }
  // False for an absent optional tensor.
  bool has(size_t i) const { return at(i).kind != ArgKind::NONE; }
  const TensorView& tensor(size_t i) const { return expect(i, ArgKind::TENSOR).tensor; }
  int64_t integer(size_t i) const { return expect(i, ArgKind::INT).integer; }
  double real(size_t i) const { return expect(i, ArgKind::FLOAT).real; }

 private:
  const ArgValue& at(size_t i) const {
    if (i >= count_) throw std::logic_error("kernel argument is missing");
    return values_[i];
  }
  const ArgValue& expect(size_t i, ArgKind kind) const {
    const ArgValue& value = at(i);
    if (value.kind != kind) throw std::logic_error("kernel argument has another kind");
    return value;
  }

  const ArgValue* values_;
  size_t count_;
};

// A kernel that cannot handle its arguments (a dtype it does not know) throws std::logic_error saying which.
using KernelFn = void (*)(const KernelArgs&, ThreadPool&);

// Null for an unknown name. `name` is that of the operator without its namespace: "rms_norm".
KernelFn find_cpu_kernel(std::string_view name);

}  // namespace dsv4c
