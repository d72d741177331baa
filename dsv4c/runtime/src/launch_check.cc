#include "launch_check.h"

#include <string_view>

#include "dtype.h"
#include "error.h"
#include "kernel.h"

namespace dsv4c {
namespace {

using namespace format;

// The operators' arguments in order, then, after >, their outputs. Of a tensor, one letter a dimension:
//   T N D ...  equal wherever the letter stands in the launch
//   t r s b v  rows of the step, rows with logits, slots, blocks, the vocabulary
//   *          any size
//   &          all leading dimensions, equal wherever it stands
// then :i (int32), :l (int64), :f (float32), :a (float32, bfloat16 or float16). @N is input N of the step. ? before an
// argument: it may be absent. # before a letter: the counts of the routing to so many experts. i is an integer, i= with a letter one of that size, f a number.
struct Signature {
  std::string_view kernel;
  std::string_view arguments;
};

constexpr Signature kSignatures[] = {
    {"add", "&W:a &W:a i > &W:a"},
    {"attention", "tHD:a tD:a s** ?s** ?b** ?b** ?tK:i H:a @1 @2 @3 i i i f > tHD:a"},
    {"commit_ring", "tD:a s** ?s** @1 @2 i >"},
    {"compress", "tW:a tW:a QW:a D:a F:a @1 @2 @3 s*2W b** ?b** i=Q i f i i >"},
    {"count_routing", "tK:i #E >"},
    {"embedding", "@0 vD:a i > tD:a"},
    {"fp4_round", "&W:a i > &W:a"},
    {"fp8_round", "&W:a i i > &W:a"},
    {"gather_rows", "tND:a @4 > rND:a"},
    {"grouped_linear", "T*:a O* ?** i i i > TO:a"},
    {"hadamard", "&W:a > &W:a"},
    {"linear", "T*:a O* ?** i i i > TO:a"},
    {"mhc_combine", "TD:a TND:a TN:f TNN:f > TND:a"},
    {"mhc_head", "TND:a N* *:a N:a f f > TD:a"},
    {"mhc_mix", "TND:a M* *:a M:a i f f > TD:a TN:f TNN:f"},
    {"moe_ffn", "TD:a TK:i TK:f E** ?E** ED* ?E** i i f i > TD:a"},
    {"rms_norm", "&W:a ?W:a f > &W:a"},
    {"rope", "&W:a @2 *:f i > &W:a"},
    {"route_hash", "tE:a vK:l @0 f > tK:i tK:f"},
    {"route_topk", "TE:a E:a i=K f > TK:i TK:f"},
    {"sample", "rv:f @4 @2 @5 @6 @7 @8 ?@9 > r:i"},
    {"select_entries", "tHW:a tH:a b** ?b** @1 @2 @3 i=K i f > tK:i"},
    {"swiglu", "TI:a TI:a f i > TI:a"},
};

const Signature* find_signature(std::string_view name) {
  constexpr std::string_view kNamespace = "dsv4::";
  if (name.starts_with(kNamespace)) name.remove_prefix(kNamespace.size());
  for (const Signature& signature : kSignatures)
    if (signature.kernel == name) return &signature;
  return nullptr;
}

struct Size {
  Dim dim = Dim::FIXED;
  uint64_t fixed = 0;
  bool operator==(const Size&) const = default;
};

Size size_of(const Tensor& tensor, uint32_t i) {
  const Dim dim = static_cast<Dim>(tensor.dim[i]);
  return {dim, dim == Dim::FIXED ? tensor.size[i] : 0};
}

bool fits_dtype(char code, uint32_t dtype) {
  const DType found = static_cast<DType>(dtype);
  switch (code) {
    case 'i':
      return found == DType::I32;
    case 'l':
      return found == DType::I64;
    case 'f':
      return found == DType::F32;
    default:
      return found == DType::F32 || found == DType::BF16 || found == DType::F16;
  }
}

// Compares one launch with a signature, remembering what each letter stands for.
class Matcher {
 public:
  explicit Matcher(const Plan& plan) : plan_(plan) {}

  bool argument(std::string_view wanted, const Arg& arg) {
    const ArgKind kind = static_cast<ArgKind>(arg.kind);
    if (wanted.front() == '?') {
      if (kind == ArgKind::NONE) return true;
      wanted.remove_prefix(1);
    }
    if (wanted == "f") return kind == ArgKind::FLOAT;
    if (wanted.front() == 'i') {
      if (kind != ArgKind::INT) return false;
      return wanted.size() == 1 || (arg.value >= 0 && same(wanted[2], {Dim::FIXED, static_cast<uint64_t>(arg.value)}));
    }
    if (kind != ArgKind::TENSOR) return false;
    const Tensor& tensor = plan_.tensors[static_cast<size_t>(arg.value)];
    if (wanted.front() == '#') return is_counts(tensor) && same(wanted[1], size_of(tensor, 1));
    if (wanted.front() == '@')
      return static_cast<Space>(tensor.space) == Space::INPUT && tensor.index == static_cast<uint32_t>(wanted[1] - '0');
    const size_t colon = wanted.find(':');
    if (colon != std::string_view::npos && !fits_dtype(wanted[colon + 1], tensor.dtype)) return false;
    return shape(wanted.substr(0, colon), tensor);
  }

 private:
  // `check_tensor` knows that such a tensor is [1, experts].
  bool is_counts(const Tensor& tensor) const {
    return static_cast<Space>(tensor.space) == Space::STATE &&
           static_cast<StateKind>(plan_.states[tensor.index].kind) == StateKind::ROUTING_COUNTS;
  }

  bool shape(std::string_view letters, const Tensor& tensor) {
    uint32_t first = 0;
    if (letters.front() == '&') {
      letters.remove_prefix(1);
      if (tensor.ndim < letters.size()) return false;
      first = tensor.ndim - static_cast<uint32_t>(letters.size());
      if (!same_leading(tensor, first)) return false;
    }
    if (tensor.ndim != first + letters.size()) return false;
    for (uint32_t i = 0; i < letters.size(); ++i)
      if (!same(letters[i], size_of(tensor, first + i))) return false;
    return true;
  }

  bool same_leading(const Tensor& tensor, uint32_t count) {
    if (leading_count_ < 0) {
      leading_count_ = static_cast<int>(count);
      for (uint32_t i = 0; i < count; ++i) leading_[i] = size_of(tensor, i);
      return true;
    }
    if (leading_count_ != static_cast<int>(count)) return false;
    for (uint32_t i = 0; i < count; ++i)
      if (!(leading_[i] == size_of(tensor, i))) return false;
    return true;
  }

  bool same(char letter, Size found) {
    switch (letter) {
      case '*':
        return true;
      case 't':
        return found == Size{Dim::TOKENS, 0};
      case 'r':
        return found == Size{Dim::LOGITS, 0};
      case 's':
        return found == Size{Dim::SLOTS, 0};
      case 'b':
        return found == Size{Dim::BLOCKS, 0};
      case 'v':
        return found == Size{Dim::FIXED, plan_.header.vocab_size};
      case '2':
        return found == Size{Dim::FIXED, 2};
      default:
        break;
    }
    Size& known = letters_[letter - 'A'];
    if (!(seen_ & 1u << (letter - 'A'))) {
      seen_ |= 1u << (letter - 'A');
      known = found;
    }
    return known == found;
  }

  const Plan& plan_;
  Size letters_[26];
  uint32_t seen_ = 0;
  Size leading_[4];
  int leading_count_ = -1;
};

std::string_view next_word(std::string_view& text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(word.size());
  return word;
}

// Limits of every GPU since compute capability 8.0.
constexpr uint32_t kMaxGridX = 0x7FFFFFFF, kMaxGridYZ = 65535;
constexpr uint32_t kMaxThreads = 1024, kMaxBlockZ = 64;
constexpr uint32_t kMaxSharedBytes = 1 << 20;
constexpr uint32_t kMaxCluster = 16;
// A kernel takes 4 KiB of parameters: a pointer each, and some that the runtime adds.
constexpr uint32_t kMaxPointers = 500;

bool is_grid(const Launch& launch) {
  const uint32_t cluster = launch.cluster > 1 ? launch.cluster : 1;
  return launch.grid_x >= 1 && launch.grid_x <= kMaxGridX && launch.grid_y >= 1 && launch.grid_y <= kMaxGridYZ &&
         launch.grid_z >= 1 && launch.grid_z <= kMaxGridYZ && cluster <= kMaxCluster && launch.grid_x % cluster == 0;
}

bool is_block(const Launch& launch) {
  return launch.block_x >= 1 && launch.block_x <= kMaxThreads && launch.block_y >= 1 &&
         launch.block_y <= kMaxThreads && launch.block_z >= 1 && launch.block_z <= kMaxBlockZ &&
         uint64_t{launch.block_x} * launch.block_y * launch.block_z <= kMaxThreads;
}

}  // namespace

void check_call(const Plan& plan, size_t launch_index, const Bucket& bucket) {
  const Launch& launch = plan.launches[launch_index];
  const char* name = plan.text(launch.name);
  if (launch.flags & ~static_cast<uint32_t>(kHead | kSample | kStage | kCooperative | kProgrammatic))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has unknown flags %u", launch_index, name, launch.flags);
  if (launch.arg_count > kMaxPointers)
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has %u arguments; a kernel takes at most %u", launch_index, name,
         launch.arg_count, kMaxPointers);
  for (uint32_t i = 0; i < launch.arg_count; ++i)
    if (static_cast<ArgKind>(plan.args[launch.first_arg + i].kind) != ArgKind::TENSOR)
      fail(DSV4C_FORMAT, "plan: argument %u of launch %zu (%s) is not a tensor; a kernel of a GPU takes pointers", i,
           launch_index, name);
  if (!is_grid(launch))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has a grid of %u x %u x %u blocks in clusters of %u", launch_index, name,
         launch.grid_x, launch.grid_y, launch.grid_z, launch.cluster);
  if (!is_block(launch) || launch.shared_bytes > kMaxSharedBytes)
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has blocks of %u x %u x %u threads with %u bytes of shared memory",
         launch_index, name, launch.block_x, launch.block_y, launch.block_z, launch.shared_bytes);
  if ((launch.flags & kProgrammatic) &&
      (launch_index == bucket.first_launch || !(plan.launches[launch_index - 1].flags & kStage)))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) may overlap the call before it, which is none of its operator",
         launch_index, name);
  if (!(launch.flags & kStage)) return;
  if (launch.output_count != 0)
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has outputs, but more calls of its operator follow", launch_index, name);
  const size_t next = launch_index + 1;
  const uint32_t when = kHead | kSample;
  if (next == size_t{bucket.first_launch} + bucket.launch_count || plan.launches[next].name != launch.name ||
      (plan.launches[next].flags & when) != (launch.flags & when))
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) is not followed by the other calls of its operator", launch_index, name);
}

void check_arguments(const Plan& plan, size_t launch_index) {
  const Launch& launch = plan.launches[launch_index];
  const char* kernel = plan.text(plan.kernels[launch.kernel].name);
  const Signature* signature = find_signature(kernel);
  // A kernel that is not an operator checks its arguments itself.
  if (!signature) return;
  Matcher matcher(plan);
  std::string_view rest = signature->arguments;
  uint32_t used = 0, inputs = 0;
  for (std::string_view word = next_word(rest); !word.empty(); word = next_word(rest)) {
    if (word == ">") {
      inputs = used;
      continue;
    }
    if (used >= launch.arg_count || !matcher.argument(word, plan.args[launch.first_arg + used]))
      fail(DSV4C_FORMAT, "plan: argument %u of launch %zu (%s) does not fit kernel %s", used, launch_index,
           plan.text(launch.name), kernel);
    ++used;
  }
  if (used != launch.arg_count || launch.output_count != used - inputs)
    fail(DSV4C_FORMAT, "plan: launch %zu (%s) has %u arguments and %u outputs, kernel %s takes %u and %u", launch_index,
         plan.text(launch.name), launch.arg_count, launch.output_count, kernel, used, used - inputs);
}

}  // namespace dsv4c
