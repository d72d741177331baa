#include "dsv4c/testing.h"

#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/simd/simd.h"
#include "kernel.h"
#include "thread_pool.h"
#include "topology_table.h"

namespace {

thread_local std::string error_text;

dsv4c::ArgValue to_value(const dsv4c_testing_arg& arg) {
  dsv4c::ArgValue value;
  value.kind = static_cast<dsv4c::ArgKind>(arg.kind);
  value.integer = arg.integer;
  value.real = arg.real;
  if (value.kind != dsv4c::ArgKind::TENSOR) return value;
  value.tensor.data = arg.data;
  value.tensor.dtype = static_cast<dsv4c::DType>(arg.dtype);
  value.tensor.ndim = arg.ndim;
  for (int i = 0; i < 4; ++i) {
    value.tensor.size[i] = arg.size[i];
    value.tensor.stride[i] = arg.stride[i];
  }
  return value;
}

}  // namespace

int dsv4c_testing_run_kernel(const char* name, const dsv4c_testing_arg* args, uint32_t count, uint32_t threads) {
  try {
    error_text.clear();
    const dsv4c::KernelFn kernel = dsv4c::find_cpu_kernel(name);
    if (kernel == nullptr) {
      error_text = "no such kernel";
      return 1;
    }
    std::vector<dsv4c::ArgValue> values;
    for (uint32_t i = 0; i < count; ++i) values.push_back(to_value(args[i]));
    dsv4c::ThreadPool pool(threads);
    kernel(dsv4c::KernelArgs(values.data(), values.size()), pool);
    return 0;
  } catch (const std::exception& error) {
    error_text = error.what();
  } catch (...) {
    error_text = "unknown exception";
  }
  return 2;
}

const char* dsv4c_testing_simd_name(uint32_t index) {
  int count;
  const dsv4c::cpu::SimdKernels* const* variants = dsv4c::cpu::simd_variants(&count);
  return index < static_cast<uint32_t>(count) ? variants[index]->name : nullptr;
}

int dsv4c_testing_use_simd(const char* name) {
  int count;
  const dsv4c::cpu::SimdKernels* const* variants = dsv4c::cpu::simd_variants(&count);
  if (name == nullptr) {
    dsv4c::cpu::use_simd(nullptr);
    return 0;
  }
  for (int i = 0; i < count; ++i) {
    if (std::string_view(variants[i]->name) != name) continue;
    dsv4c::cpu::use_simd(variants[i]);
    return 0;
  }
  return 1;
}

int dsv4c_testing_topology(const int32_t* values, uint64_t count, uint64_t experts, uint64_t groups,
                           uint64_t sm_count) {
  const char* fault = dsv4c::topology_fault(values, count, experts, groups, sm_count);
  error_text = fault ? fault : "";
  return fault ? 1 : 0;
}

const char* dsv4c_testing_error(void) { return error_text.c_str(); }
