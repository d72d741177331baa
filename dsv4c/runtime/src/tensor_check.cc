#include "tensor_check.h"

#include <cinttypes>

#include "dtype.h"
#include "error.h"

namespace dsv4c {
namespace {

using namespace format;

// Shapes of the step's inputs and outputs: two dimensions at most, FIXED where `fixed` says the size.
struct IoShape {
  const char* name;
  DType dtype;
  uint32_t ndim;
  Dim first;
  Dim second;
};

constexpr IoShape kInputShapes[kInputCount] = {
    {"TOKEN_IDS", DType::I32, 1, Dim::TOKENS, Dim::FIXED},   {"SLOTS", DType::I32, 1, Dim::TOKENS, Dim::FIXED},
    {"POSITIONS", DType::I32, 1, Dim::TOKENS, Dim::FIXED},   {"BLOCK_TABLE", DType::I32, 2, Dim::SLOTS, Dim::TABLE},
    {"LOGITS_ROWS", DType::I32, 1, Dim::LOGITS, Dim::FIXED}, {"TEMPERATURE", DType::F32, 1, Dim::LOGITS, Dim::FIXED},
    {"TOP_K", DType::I32, 1, Dim::LOGITS, Dim::FIXED},       {"TOP_P", DType::F32, 1, Dim::LOGITS, Dim::FIXED},
    {"SEED", DType::I64, 1, Dim::LOGITS, Dim::FIXED},        {"MASK", DType::I32, 2, Dim::LOGITS, Dim::FIXED},
};

constexpr IoShape kOutputShapes[kOutputCount] = {
    {"LOGITS", DType::F32, 2, Dim::LOGITS, Dim::FIXED},
    {"SAMPLED", DType::I32, 1, Dim::LOGITS, Dim::FIXED},
};

void check_io(const Tensor& tensor, size_t index, const IoShape& shape, uint64_t fixed) {
  const bool matches = tensor.dtype == static_cast<uint32_t>(shape.dtype) && tensor.ndim == shape.ndim &&
                       tensor.offset == 0 && tensor.dim[0] == static_cast<uint8_t>(shape.first) &&
                       (shape.ndim == 1 || (tensor.dim[1] == static_cast<uint8_t>(shape.second) &&
                                            (shape.second != Dim::FIXED || tensor.size[1] == fixed)));
  if (!matches) fail(DSV4C_FORMAT, "tensor %zu has not the shape and dtype of %s", index, shape.name);
}

// Bytes of `space` from `tensor`'s offset to its last element, with symbolic sizes as given; false on overflow.
bool end_of_tensor(const Tensor& tensor, uint64_t tokens, bool skip_first, uint64_t* end) {
  uint64_t last = 0;  // index of the last element
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    if (i == 0 && skip_first) continue;
    const uint64_t size = static_cast<Dim>(tensor.dim[i]) == Dim::FIXED ? tensor.size[i] : tokens;
    if (size == 0) {
      *end = tensor.offset;
      return true;
    }
    uint64_t span;
    if (__builtin_mul_overflow(size - 1, static_cast<uint64_t>(tensor.stride[i]), &span) ||
        __builtin_add_overflow(last, span, &last))
      return false;
  }
  const uint64_t element = static_cast<uint64_t>(dtype_size(static_cast<DType>(tensor.dtype)));
  return !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, element, &last) &&
         !__builtin_add_overflow(last, tensor.offset, end);
}

// Counts are only ever used as a whole: int64 [1, experts].
void check_counts(const Tensor& tensor, size_t index, const State& state, const char* name) {
  const bool whole = tensor.offset == 0 && static_cast<DType>(tensor.dtype) == DType::I64 && tensor.ndim == 2 &&
                     static_cast<Dim>(tensor.dim[0]) == Dim::FIXED && static_cast<Dim>(tensor.dim[1]) == Dim::FIXED &&
                     tensor.size[0] == 1 && tensor.size[1] == state.rows && tensor.stride[1] == 1;
  if (!whole) fail(DSV4C_FORMAT, "tensor %zu has not the shape and dtype of the counts in state plane %s", index, name);
}

void check_state_tensor(const Plan& plan, size_t index) {
  const Tensor& tensor = plan.tensors[index];
  if (tensor.index >= plan.states.size())
    fail(DSV4C_FORMAT, "tensor %zu is in state plane %u of %zu", index, tensor.index, plan.states.size());
  const State& state = plan.states[tensor.index];
  const char* name = plan.text(state.name);
  if (static_cast<StateKind>(state.kind) == StateKind::ROUTING_COUNTS) return check_counts(tensor, index, state, name);
  const Dim unit = static_cast<StateKind>(state.kind) == StateKind::SLOT ? Dim::SLOTS : Dim::BLOCKS;
  if (tensor.ndim == 0 || static_cast<Dim>(tensor.dim[0]) != unit)
    fail(DSV4C_FORMAT, "tensor %zu in state plane %s has not the %s as first dimension", index, name,
         unit == Dim::SLOTS ? "slots" : "blocks");
  const uint64_t element = static_cast<uint64_t>(dtype_size(static_cast<DType>(tensor.dtype)));
  uint64_t stride_bytes, end;
  if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.stride[0]), element, &stride_bytes) ||
      stride_bytes != unit_bytes(state))
    fail(DSV4C_FORMAT, "tensor %zu strides over state plane %s by %" PRId64 " elements, a %s has %" PRIu64 " bytes",
         index, name, tensor.stride[0], unit == Dim::SLOTS ? "slot" : "block", unit_bytes(state));
  if (!end_of_tensor(tensor, 0, true, &end) || end > unit_bytes(state))
    fail(DSV4C_FORMAT, "tensor %zu lies outside state plane %s", index, name);
}

}  // namespace

void check_tensor(const Plan& plan, size_t index) {
  const Tensor& tensor = plan.tensors[index];
  if (!is_dtype(tensor.dtype)) fail(DSV4C_FORMAT, "tensor %zu has unknown dtype %u", index, tensor.dtype);
  if (tensor.ndim > 4) fail(DSV4C_FORMAT, "tensor %zu has %u dimensions, more than 4", index, tensor.ndim);
  for (uint32_t i = 0; i < tensor.ndim; ++i) {
    if (tensor.dim[i] >= kDimCount) fail(DSV4C_FORMAT, "tensor %zu has unknown dimension %u", index, tensor.dim[i]);
    if (tensor.size[i] > INT64_MAX) fail(DSV4C_FORMAT, "tensor %zu has a size of %" PRIu64, index, tensor.size[i]);
    const Dim dim = static_cast<Dim>(tensor.dim[i]);
    const Space space = static_cast<Space>(tensor.space);
    const bool dense = tensor.stride[i] == kDense && (space == Space::INPUT || space == Space::OUTPUT);
    if (tensor.stride[i] < 0 && !dense)
      fail(DSV4C_FORMAT, "tensor %zu has a stride of %" PRId64, index, tensor.stride[i]);
    const bool allowed = dim == Dim::FIXED || space == Space::INPUT || space == Space::OUTPUT ||
                         (space == Space::STATE ? i == 0
                                                : space == Space::ARENA && (dim == Dim::TOKENS || dim == Dim::LOGITS));
    if (!allowed)
      fail(DSV4C_FORMAT, "tensor %zu has a dimension (code %u) that its space %u cannot have", index, tensor.dim[i],
           tensor.space);
  }
  if (tensor.offset % static_cast<uint64_t>(dtype_size(static_cast<DType>(tensor.dtype))) != 0)
    fail(DSV4C_FORMAT, "tensor %zu is misaligned: offset %" PRIu64, index, tensor.offset);
  switch (static_cast<Space>(tensor.space)) {
    case Space::ARENA:  // its size depends on the bucket
      return;
    case Space::WEIGHT: {
      uint64_t end;
      if (!end_of_tensor(tensor, 0, false, &end) || end > plan.header.weight_bytes)
        fail(DSV4C_FORMAT, "tensor %zu (offset %" PRIu64 ") lies outside the %" PRIu64 " bytes of WEIGHTS", index,
             tensor.offset, plan.header.weight_bytes);
      return;
    }
    case Space::STATE:
      return check_state_tensor(plan, index);
    case Space::INPUT:
      if (tensor.index >= kInputCount) fail(DSV4C_FORMAT, "tensor %zu is unknown input %u", index, tensor.index);
      return check_io(tensor, index, kInputShapes[tensor.index], static_cast<uint64_t>(plan.mask_words()));
    case Space::OUTPUT:
      if (tensor.index >= kOutputCount) fail(DSV4C_FORMAT, "tensor %zu is unknown output %u", index, tensor.index);
      return check_io(tensor, index, kOutputShapes[tensor.index], plan.header.vocab_size);
  }
  fail(DSV4C_FORMAT, "tensor %zu is in unknown space %u", index, tensor.space);
}

void check_extent(const Plan& plan, size_t index, const Bucket& bucket) {
  const Tensor& tensor = plan.tensors[index];
  if (static_cast<Space>(tensor.space) != Space::ARENA) return;
  uint64_t end;
  if (!end_of_tensor(tensor, bucket.tokens, false, &end) || end > bucket.arena_bytes)
    fail(DSV4C_FORMAT, "tensor %zu (offset %" PRIu64 ") lies outside the arena of %" PRIu64 " bytes", index,
         tensor.offset, bucket.arena_bytes);
}

}  // namespace dsv4c
