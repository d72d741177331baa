#include "cpu/kernels.h"

namespace dsv4c {

namespace {

struct Entry {
  std::string_view name;
  KernelFn function;
};

constexpr Entry kKernels[] = {
    {"add", cpu::add},
    {"attention", cpu::attention},
    {"commit_ring", cpu::commit_ring},
    {"compress", cpu::compress},
    {"count_routing", cpu::count_routing},
    {"embedding", cpu::embedding},
    {"fp4_round", cpu::fp4_round},
    {"fp8_round", cpu::fp8_round},
    {"gather_rows", cpu::gather_rows},
    {"grouped_linear", cpu::grouped_linear},
    {"hadamard", cpu::hadamard},
    {"linear", cpu::linear},
    {"mhc_combine", cpu::mhc_combine},
    {"mhc_head", cpu::mhc_head},
    {"mhc_mix", cpu::mhc_mix},
    {"moe_ffn", cpu::moe_ffn},
    {"rms_norm", cpu::rms_norm},
    {"rope", cpu::rope},
    {"route_hash", cpu::route_hash},
    {"route_topk", cpu::route_topk},
    {"sample", cpu::sample},
    {"select_entries", cpu::select_entries},
    {"swiglu", cpu::swiglu},
};

}  // namespace

KernelFn find_cpu_kernel(std::string_view name) {
  for (const Entry& kernel : kKernels) {
    if (kernel.name == name) return kernel.function;
  }
  return nullptr;
}

}  // namespace dsv4c
