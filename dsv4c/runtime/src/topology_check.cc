#include "topology_check.h"

#include <cinttypes>
#include <cstring>
#include <set>
#include <tuple>
#include <vector>

#include "dtype.h"
#include "error.h"
#include "topology_table.h"

namespace dsv4c {
namespace {

using namespace format;

// A table of 512 experts and 256 multiprocessors is a fortieth of it.
constexpr uint64_t kMaxTableInts = 1 << 16;

bool is_list(const Tensor& tensor, Space space) {
  return static_cast<Space>(tensor.space) == space && static_cast<DType>(tensor.dtype) == DType::I32 &&
         tensor.ndim == 1 && static_cast<Dim>(tensor.dim[0]) == Dim::FIXED && tensor.stride[0] == 1;
}

bool is_packed_experts(const Tensor& tensor) {
  const DType dtype = static_cast<DType>(tensor.dtype);
  return static_cast<Space>(tensor.space) == Space::WEIGHT && (dtype == DType::F4E2M1X2 || dtype == DType::F8E4M3) &&
         tensor.ndim == 2;
}

bool is_placed_experts(const Plan& plan, const Launch& launch) {
  std::string_view name = plan.text(plan.kernels[launch.kernel].name);
  constexpr std::string_view kNamespace = "dsv4::";
  if (name.starts_with(kNamespace)) name.remove_prefix(kNamespace.size());
  return name == "placed_experts";
}

class Checker {
 public:
  Checker(const Plan& plan, Bytes weights) : plan_(plan), weights_(weights) {}

  // The calls of one operator: `first` to `last` of the plan's launches.
  void check(size_t first, size_t last, uint32_t sm_count) {
    // The call that multiplies says how many experts and groups there are: of its arguments, the list of where the
    // places of each group begin, the table if there are groups, and the packed experts follow one another.
    const Launch& multiply = plan_.launches[last];
    uint64_t experts = 0, groups = 0;
    for (uint32_t i = 2; i < multiply.arg_count; ++i) {
      const Tensor& heads = tensor(multiply, i - 2);
      if (!is_packed_experts(tensor(multiply, i)) || !is_list(tensor(multiply, i - 1), Space::WEIGHT) ||
          !is_list(heads, Space::ARENA) || heads.size[0] < 2)
        continue;
      experts = tensor(multiply, i).size[0];
      groups = heads.size[0] - 1;
    }
    for (size_t index = first; index <= last; ++index) {
      const Launch& launch = plan_.launches[index];
      for (uint32_t i = 0; i < launch.arg_count; ++i) {
        const Tensor& table = tensor(launch, i);
        if (is_list(table, Space::WEIGHT)) check(launch, table, experts, groups, sm_count);
      }
    }
  }

 private:
  const Tensor& tensor(const Launch& launch, uint32_t arg) const {
    return plan_.tensors[static_cast<size_t>(plan_.args[launch.first_arg + arg].value)];
  }

  void check(const Launch& launch, const Tensor& table, uint64_t experts, uint64_t groups, uint32_t sm_count) {
    const uint64_t size = table.size[0];
    // Most buckets share their tables.
    if (!checked_.insert({table.offset, size, experts, groups, sm_count}).second) return;
    const char* fault = "its operator does not say of how many experts and groups";
    if (experts != 0) {
      fault = "it is too long";
      if (size <= kMaxTableInts) {
        std::vector<int32_t> values(size);
        // `check_tensor` knows that it lies in the weights.
        if (size > 0) std::memcpy(values.data(), weights_.data + table.offset, size * sizeof(int32_t));
        fault = topology_fault(values.data(), size, experts, groups, sm_count);
      }
    }
    if (!fault) return;
    const std::string layer = launch.layer == kNoIndex ? "" : " of layer " + std::to_string(launch.layer);
    fail(DSV4C_FORMAT,
         "the expert topology%s (launch %s, %u streaming multiprocessors, offset %" PRIu64
         " of WEIGHTS) is damaged: %s",
         layer.c_str(), plan_.text(launch.name), sm_count, table.offset, fault);
  }

  const Plan& plan_;
  Bytes weights_;
  std::set<std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint32_t>> checked_;
};

}  // namespace

void check_topologies(const Plan& plan, Bytes weights) {
  Checker checker(plan, weights);
  for (const Bucket& bucket : plan.buckets) {
    const size_t end = size_t{bucket.first_launch} + bucket.launch_count;
    for (size_t first = bucket.first_launch; first < end; ++first) {
      size_t last = first;
      while (plan.launches[last].flags & kStage) ++last;
      if (is_placed_experts(plan, plan.launches[last])) checker.check(first, last, sm_count_of(plan, bucket));
      first = last;
    }
  }
}

}  // namespace dsv4c
