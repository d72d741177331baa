#include "warpgroup.h"

#include <algorithm>

#include "shared_barriers.h"

namespace emulate {

constexpr unsigned PRODUCT_ROWS = 64, PRODUCT_K_BYTES = 32, PRODUCT_N = 256;
constexpr unsigned MATRIX_BYTES = 128;  // 8 columns of 16 bytes along k

// The registers of the sums, as the threads have named them in a product and not got them back yet.
struct Accumulator {
  unsigned columns;
  float* d[GROUP];
  unsigned open[GROUP];  // products that the thread has not waited for
  std::vector<float> values;  // [GROUP][columns / 2]
};

struct Product {
  std::shared_ptr<Accumulator> accumulator;
  unsigned element_bytes;  // 1: e4m3, 2: f16
  bool accumulate;
  const unsigned char* b;
  unsigned k_stride, n_stride;
  unsigned a[GROUP][4];
  bool calculated = false;
};

// Codes of NaN, which poison consists of, stay NaN.
static float float_of_e4m3(unsigned char code) {
  if ((code & 0x7F) == 0x7F) return __builtin_nanf("");
  const unsigned exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude =
      exponent ? __builtin_ldexpf(8.0f + mantissa, (int)exponent - 10) : __builtin_ldexpf(mantissa, -9);
  return code & 0x80 ? -magnitude : magnitude;
}

struct E4m3Table {
  float values[256];
  E4m3Table() {
    for (int code = 0; code < 256; code++) values[code] = float_of_e4m3((unsigned char)code);
  }
};
static const E4m3Table e4m3_table;

static float float_of_f16(unsigned bits) {
  const unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
                          : exponent    ? __builtin_ldexpf(1024.0f + mantissa, (int)exponent - 25)
                                        : __builtin_ldexpf(mantissa, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}
struct F16Table {
  std::vector<float> values;
  F16Table() : values(1 << 16) {
    for (unsigned bits = 0; bits < values.size(); bits++) values[bits] = float_of_f16(bits);
  }
};
static float element_of(const unsigned char* bytes, unsigned element_bytes) {
  static const F16Table f16_table;
  return element_bytes == 1 ? e4m3_table.values[*bytes] : f16_table.values[bytes[0] | (unsigned)bytes[1] << 8];
}

// d[4j + i] of a lane: its row of 16 and column.
static unsigned product_row(unsigned thread, unsigned i) {
  return thread / LANES * 16 + thread % LANES / 4 + i / 2 * 8;
}
static unsigned product_column(unsigned thread, unsigned j, unsigned i) { return 8 * j + 2 * (thread % 4) + i % 2; }

static void calculate(Product& product) {
  static float a[PRODUCT_ROWS][PRODUCT_K_BYTES], b[PRODUCT_K_BYTES][PRODUCT_N], d[PRODUCT_ROWS][PRODUCT_N];
  Accumulator& sums = *product.accumulator;
  const unsigned columns = sums.columns, size = product.element_bytes, k_count = PRODUCT_K_BYTES / size;
  for (unsigned thread = 0; thread < GROUP; thread++)
    for (unsigned i = 0; i < 4; i++)
      for (unsigned byte = 0; byte < 4; byte += size)
        a[product_row(thread, i % 2 * 2)][(i / 2 * 16 + 4 * (thread % 4) + byte) / size] =
            element_of((const unsigned char*)&product.a[thread][i] + byte, size);
  for (unsigned byte = 0; byte < PRODUCT_K_BYTES; byte += size)
    for (unsigned n = 0; n < columns; n++)
      b[byte / size][n] =
          element_of(product.b + n / 8 * product.n_stride + byte / 16 * product.k_stride + n % 8 * 16 + byte % 16, size);
  const auto each = [&](auto&& visit) {
    for (unsigned thread = 0; thread < GROUP; thread++)
      for (unsigned e = 0; e < columns / 2; e++)
        visit(d[product_row(thread, e % 4)][product_column(thread, e / 4, e)], sums.values[thread * columns / 2 + e]);
  };
  each([&](float& sum, const float& value) { sum = product.accumulate ? value : 0; });
  for (unsigned row = 0; row < PRODUCT_ROWS; row++)
    for (unsigned k = 0; k < k_count; k++)
      for (unsigned n = 0; n < columns; n++) d[row][n] += a[row][k] * b[k][n];
  each([](const float& sum, float& value) { value = sum; });
  product.calculated = true;
}

// ---- fences between ordinary stores and what reads shared memory beside the threads ----

void shared_proxy_fence() {
  AsyncView& view = running->view;
  if (view.read.empty()) view.bytes.assign(dynamic_shared, dynamic_shared + dynamic_shared_bytes);
  for (const auto& [from, to] : view.read) std::memcpy(view.bytes.data() + from, dynamic_shared + from, to - from);
}

// The first product of a block is checked against all stores so far; others against those since its bytes were first
// read, so that only these need be kept at a fence.
static void check_view(size_t from, size_t to, bool first, int line) {
  AsyncView& view = running->view;
  const auto inside = [=](const std::pair<size_t, size_t>& range) { return range.first <= from && to <= range.second; };
  const bool known = std::any_of(view.read.begin(), view.read.end(), inside);
  if (known || first) {
    const unsigned char* now = dynamic_shared + from;
    const auto* different = std::mismatch(now, now + (to - from), view.bytes.data() + from).first;
    if (different != now + (to - from))
      report("a product in line %d reads byte %zu of shared memory, which was stored without a shared_proxy_fence "
             "since", line, shared_byte(different));
  } else {
    std::memcpy(view.bytes.data() + from, dynamic_shared + from, to - from);
  }
  if (known) return;
  view.read.emplace_back(from, to);
  std::sort(view.read.begin(), view.read.end());
  size_t last = 0;
  for (const auto& range : view.read) {
    if (range.first <= view.read[last].second) view.read[last].second = std::max(view.read[last].second, range.second);
    else view.read[++last] = range;
  }
  view.read.resize(last + 1);
}

static void check_view(const Product& product, int line) {
  AsyncView& view = running->view;
  const bool first = view.read.empty();
  if (view.bytes.empty()) view.bytes.assign(dynamic_shared_bytes, POISON);
  for (unsigned n = 0; n < product.accumulator->columns / 8; n++)
    for (unsigned k = 0; k < 2; k++) {
      const size_t from = shared_byte(product.b + n * product.n_stride + k * product.k_stride);
      check_view(from, from + MATRIX_BYTES, first, line);
    }
}

// ---- what the threads call ----

unsigned long long product_operand(const void* shared, int k_stride, int n_stride, int line) {
  const size_t byte = shared_byte(shared);
  if (byte >= dynamic_shared_bytes || byte % 16 || k_stride % 16 || n_stride % 16 || k_stride < 0 || n_stride < 0 ||
      k_stride >= 1 << 18 || n_stride >= 1 << 18) {
    report("thread %u: product_operand in line %d at byte %lld of dynamic shared memory with strides of %d and %d "
           "bytes; all must be multiples of 16", current, line, (long long)byte, k_stride, n_stride);
    stop();
  }
  return byte >> 4 | (unsigned long long)(k_stride >> 4) << 16 | (unsigned long long)(n_stride >> 4) << 32;
}

// The accumulator of a group whose threads name these registers.
static std::shared_ptr<Accumulator> find_accumulator(Warpgroup& group, unsigned columns, int line) {
  std::shared_ptr<Accumulator> found;
  for (const auto& one : group.accumulators)
    for (unsigned thread = 0; thread < GROUP && !found; thread++)
      if (one->open[thread] && one->d[thread] == group.operands[thread].d) found = one;
  if (!found) {
    found = std::make_shared<Accumulator>();
    found->columns = columns;
    found->values.resize(GROUP * columns / 2);
    for (unsigned thread = 0; thread < GROUP; thread++) {
      float* d = group.operands[thread].d;
      found->d[thread] = d;
      found->open[thread] = 0;
      std::memcpy(&found->values[thread * columns / 2], d, columns / 2 * sizeof(float));
      std::memset(d, POISON, columns / 2 * sizeof(float));
    }
    group.accumulators.push_back(found);
    return found;
  }
  for (unsigned thread = 0; thread < GROUP; thread++)
    if (!found->open[thread] || found->d[thread] != group.operands[thread].d || found->columns != columns) {
      report("threads of a warpgroup diverge in a product in line %d: some have waited for the sums before, or name "
             "other registers", line);
      stop();
    }
  return found;
}

void warpgroup_product(float* d, unsigned columns, unsigned element_bytes, const unsigned (&a)[4],
                              unsigned long long b, bool accumulate, int line) {
  const unsigned number = current / GROUP, begin = number * GROUP;
  if (columns % 8 || columns == 0 || columns > PRODUCT_N || begin + GROUP > running->threads.size()) {
    report("thread %u: a product in line %d of %u columns and four warps; the block has %zu threads", current, line,
           columns, running->threads.size());
    stop();
  }
  if (!self().products_begun) {
    report("thread %u: a product in line %d without a product_begin since the last wait", current, line);
    stop();
  }
  Warpgroup& group = running->warpgroups[number];
  const ProductCall call = {b, columns, element_bytes, accumulate, line};
  if (group.waiting.empty()) group.call = call;
  if (!(group.call == call)) {
    report("threads of a warpgroup diverge: thread %u is at a product in line %d, thread %u at one in line %d (of B "
           "0x%llX, 0x%llX; of %u, %u columns; accumulating: %d, %d)", current, line, group.waiting[0],
           group.call.line, b, group.call.b, columns, group.call.columns, accumulate, group.call.accumulate);
    stop();
  }
  ProductOperands& own = group.operands[current % GROUP];
  own.d = d;
  std::memcpy(own.a, a, sizeof own.a);
  group.waiting.push_back(current);
  if (group.waiting.size() < GROUP) return wait_at(State::AT_PRODUCT, "product", line, &group);

  auto product = std::make_shared<Product>();
  product->b = dynamic_shared + (b & 0x3FFF) * 16;
  product->k_stride = (unsigned)(b >> 16 & 0x3FFF) * 16;
  product->n_stride = (unsigned)(b >> 32 & 0x3FFF) * 16;
  product->element_bytes = element_bytes;
  product->accumulate = accumulate;
  const size_t end = (b & 0x3FFF) * 16 + (columns / 8 - 1) * product->n_stride + product->k_stride + MATRIX_BYTES;
  if (end > dynamic_shared_bytes || b & ~0x3FFF'3FFF'3FFFull) {
    report("a product in line %d reads byte %zu of dynamic shared memory, which has %zu (B is described by 0x%016llX)",
           line, end - 1, dynamic_shared_bytes, b);
    stop();
  }
  product->accumulator = find_accumulator(group, columns, line);
  check_view(*product, line);
  stop_if_failed();
  for (unsigned thread = 0; thread < GROUP; thread++) {
    product->accumulator->open[thread]++;
    std::memcpy(product->a[thread], group.operands[thread].a, sizeof own.a);
    auto& groups = running->threads[begin + thread].product_groups;
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(product);
  }
  if (reversed) calculate(*product);
  else group.queue.push_back(product);
  group.waiting.pop_back();
  make_ready(group.waiting);
}

void product_begin() { self().products_begun = true; }

void product_commit() {
  auto& groups = self().product_groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

void product_wait(unsigned pending) {
  self().products_begun = false;
  auto& groups = self().product_groups;
  if (groups.empty()) return;
  Warpgroup& group = running->warpgroups[current / GROUP];
  const unsigned thread = current % GROUP;
  const size_t committed = groups.size() - 1;
  const size_t done = committed > pending ? committed - pending : 0;
  for (size_t i = 0; i < done; i++)
    for (const auto& product : groups[i]) {
      for (; !product->calculated; group.queue.pop_front()) calculate(*group.queue.front());
      Accumulator& sums = *product->accumulator;
      if (--sums.open[thread]) continue;
      const unsigned each = sums.columns / 2;
      std::memcpy(sums.d[thread], &sums.values[thread * each], each * sizeof(float));
      if (std::none_of(sums.open, sums.open + GROUP, [](unsigned open) { return open; }))
        group.accumulators.erase(std::find(group.accumulators.begin(), group.accumulators.end(), product->accumulator));
    }
  groups.erase(groups.begin(), groups.begin() + done);
}

void check_products() {
  for (const Warpgroup& group : running->warpgroups)
    if (!group.accumulators.empty()) report("products that no thread waited for at the end of the block");
}

}  // namespace emulate
