// The loops of every variant, over the vector type V of the file that includes this. Everything is in an unnamed
// namespace: a function compiled for one instruction set must not be merged with that of another.
//
// V has kLanes, kTileTokens (rows of x that a tile of weights meets at a time), kDirectSums (registers for sums where
// weights are decoded beside them), F (a register) and the operations used below; V::decode<E>(codes, factor, to)
// writes the kChunk / kLanes registers of a chunk, multiplied by the scale that V::factor<E>(scale) was made of.

#include <cstdint>
#include <cstring>

#include "cpu/simd/simd.h"

#define DSV4C_INLINE inline __attribute__((always_inline))

namespace dsv4c::cpu {

namespace {

// exp(r) for |r| <= log(2) / 2, highest power first.
constexpr int kExpTerms = 8;
constexpr float kExp[kExpTerms] = {1.9841270e-4f, 1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f,
                                   1.6666667e-1f, 0.5f,          1.0f,          1.0f};

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class V>
struct Loops {
  using F = typename V::F;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = static_cast<int>(kChunk) / kLanes;  // of a chunk
  // Rows of x whose accumulators are kept while the weights go by.
  static constexpr int64_t kTokenBlock = 64;
  // Columns of a tile of decoded weights: 16 KB, half of a small first-level cache.
  static constexpr int64_t kTileChunks = 16;
  static constexpr int64_t kTileColumns = kTileChunks * kChunk;

  // Chunks in a cache line of codes.
  template <Encoding E>
  static constexpr int64_t kLineChunks = chunk_bytes(E) < 64 ? 64 / chunk_bytes(E) : 1;

  // Chunks first..first+count of R rows, times T rows of x.
  template <Encoding E, int R, int T>
  static DSV4C_INLINE void accumulate(const StoredRows& w, int64_t first, int64_t count, const float* const* x,
                                      F (&sums)[R][T]) {
    int64_t chunk = first;
    int64_t group = 0;
    const int64_t group_chunks = w.scales == nullptr ? first + count : w.group / kChunk;
    if (chunk > 0) group = chunk / group_chunks;
    for (; chunk < first + count; ++group) {
      const int64_t end = smaller(first + count, (group + 1) * group_chunks);
      F factors[R];
      for (int r = 0; r < R; ++r) {
        factors[r] = V::template factor<E>(w.scales == nullptr ? 1.0f : w.scales[r * w.scale_stride + group]);
      }
      for (; chunk < end; ++chunk) {
        // The next rows, a cache line at a time. The processor's own prefetching ends with the page, and rows are often
        // no longer than that.
        if (E != Encoding::F32 && chunk % kLineChunks<E> == 0) {
          const uint8_t* next = w.codes + R * w.row_bytes + chunk * chunk_bytes(E);
          for (int r = 0; r < R; ++r) __builtin_prefetch(next + r * w.row_bytes, 0, 2);
        }
        for (int r = 0; r < R; ++r) {
          F values[kVectors];
          V::template decode<E>(w.codes + r * w.row_bytes + chunk * chunk_bytes(E), factors[r], values);
          for (int t = 0; t < T; ++t) {
            for (int v = 0; v < kVectors; ++v) {
              sums[r][t] = V::fma(values[v], V::load(x[t] + chunk * kChunk + v * kLanes), sums[r][t]);
            }
          }
        }
      }
    }
  }

  // The partial last chunk of at most kBlockRows rows, padded with zeros, as rows of their own.
  struct Tail {
    alignas(64) uint8_t codes[kBlockRows][kChunk * 4];
    float scales[kBlockRows];
    StoredRows rows;
  };

  template <Encoding E>
  static void make_tail(const StoredRows& w, int64_t rows, int64_t columns, Tail* tail) {
    const int64_t full = columns / kChunk;
    const int64_t bytes = (columns % kChunk * chunk_bytes(E) + kChunk - 1) / kChunk;
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(tail->codes[r], 0, sizeof tail->codes[r]);
      std::memcpy(tail->codes[r], w.codes + r * w.row_bytes + full * chunk_bytes(E), static_cast<size_t>(bytes));
      if (w.scales != nullptr) tail->scales[r] = w.scales[r * w.scale_stride + full * kChunk / w.group];
    }
    tail->rows = {E, tail->codes[0], kChunk * 4, w.scales == nullptr ? nullptr : tail->scales, 1, kChunk};
  }

  // The last columns of a row of x, padded with zeros.
  template <Encoding E>
  static void copy_tail(const float* x, int64_t columns, float* to) {
    const int64_t full = columns / kChunk * kChunk;
    const int64_t count = is_packed(E) ? kChunk : columns - full;
    std::memset(to, 0, kChunk * sizeof(float));
    std::memcpy(to, x + full, static_cast<size_t>(count) * sizeof(float));
  }

  static StoredRows from_row(const StoredRows& w, int64_t row) {
    StoredRows rest = w;
    rest.codes += row * w.row_bytes;
    if (w.scales != nullptr) rest.scales += row * w.scale_stride;
    return rest;
  }

  template <int R, int T>
  static DSV4C_INLINE void put_sums(const F (&sums)[R][T], float* out, int64_t out_stride) {
    for (int t = 0; t < T; ++t) {
      int r = 0;
      for (; r + 4 <= R; r += 4) {
        V::sum4(sums[r][t], sums[r + 1][t], sums[r + 2][t], sums[r + 3][t], out + t * out_stride + r);
      }
      for (; r < R; ++r) out[t * out_stride + r] = V::sum(sums[r][t]);
    }
  }

  // R rows of weights, decoded in registers, times T rows of x.
  template <Encoding E, int R, int T>
  static void project_rows(const StoredRows& w, const StoredRows* tail, int64_t columns, const float* const* x,
                           float* out, int64_t out_stride) {
    F sums[R][T];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) sums[r][t] = V::zero();
    }
    accumulate<E, R, T>(w, 0, columns / kChunk, x, sums);
    if (tail != nullptr) {
      alignas(64) float ends[T][kChunk];
      const float* pointers[T];
      for (int t = 0; t < T; ++t) {
        copy_tail<E>(x[t], columns, ends[t]);
        pointers[t] = ends[t];
      }
      accumulate<E, R, T>(*tail, 0, 1, pointers, sums);
    }
    put_sums(sums, out, out_stride);
  }

  template <Encoding E, int R, int T>
  static DSV4C_INLINE void project_from(const StoredRows& w, const StoredRows* tail, int64_t row, int64_t columns,
                                        const float* const* x, float* out, int64_t out_stride) {
    const StoredRows rest = tail == nullptr ? StoredRows() : from_row(*tail, row);
    project_rows<E, R, T>(from_row(w, row), tail == nullptr ? nullptr : &rest, columns, x, out + row, out_stride);
  }

  // Few rows of x: reading the weights is what takes the time.
  template <Encoding E, int T>
  static void project_directly(const StoredRows& w, int64_t rows, int64_t columns, const float* const* x, float* out,
                               int64_t out_stride) {
    Tail tail;
    const StoredRows* ends = nullptr;
    if (columns % kChunk != 0) {
      make_tail<E>(w, rows, columns, &tail);
      ends = &tail.rows;
    }
    constexpr int kRows = V::kDirectSums / T >= 8 ? 8 : V::kDirectSums / T >= 4 ? 4 : 2;
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) project_from<E, kRows, T>(w, ends, row, columns, x, out, out_stride);
    for (; row < rows; ++row) project_from<E, 1, T>(w, ends, row, columns, x, out, out_stride);
  }

  // Decoded weights and sums of many rows of x.
  struct Tile {
    alignas(64) float weights[kBlockRows][kTileColumns];
    // A register for every row of x and row of the weights.
    alignas(64) float sums[kTokenBlock * kBlockRows * kLanes];
    alignas(64) float ends[kTokenBlock][kChunk];
  };

  static constexpr int64_t place(int64_t token, int64_t row) { return (token * kBlockRows + row) * kLanes; }

  template <int R, int T>
  static DSV4C_INLINE void multiply(const float* const (&w)[R], const float* const (&x)[T], int64_t columns,
                                    float* sums) {
    F local[R][T];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) local[r][t] = V::load(sums + place(t, r));
    }
    for (int64_t c = 0; c < columns; c += kLanes) {
      F values[R];
      for (int r = 0; r < R; ++r) values[r] = V::load(w[r] + c);
      for (int t = 0; t < T; ++t) {
        const F input = V::load(x[t] + c);
        for (int r = 0; r < R; ++r) local[r][t] = V::fma(values[r], input, local[r][t]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) V::store(sums + place(t, r), local[r][t]);
    }
  }

  template <int R>
  static void multiply_rows(const float* weights, int64_t stride, const float* const* x, int64_t offset,
                            int64_t tokens, int64_t columns, float* sums) {
    const float* w[R];
    for (int r = 0; r < R; ++r) w[r] = weights + r * stride;
    int64_t token = 0;
    for (; token + V::kTileTokens <= tokens; token += V::kTileTokens) {
      const float* rows[V::kTileTokens];
      for (int t = 0; t < V::kTileTokens; ++t) rows[t] = x[token + t] + offset;
      multiply<R, V::kTileTokens>(w, rows, columns, sums + place(token, 0));
    }
    for (; token < tokens; ++token) {
      const float* const rows[1] = {x[token] + offset};
      multiply<R, 1>(w, rows, columns, sums + place(token, 0));
    }
  }

  static void multiply_tile(const float* weights, int64_t stride, int64_t rows, const float* const* x, int64_t offset,
                            int64_t tokens, int64_t columns, Tile* tile) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      multiply_rows<4>(weights + row * stride, stride, x, offset, tokens, columns, tile->sums + place(0, row));
    }
    for (; row < rows; ++row) {
      multiply_rows<1>(weights + row * stride, stride, x, offset, tokens, columns, tile->sums + place(0, row));
    }
  }

  // Chunks first..first+count of the rows into the tile.
  template <Encoding E>
  static void decode_tile(const StoredRows& w, int64_t rows, int64_t first, int64_t count, Tile* tile) {
    const int64_t group_chunks = w.scales == nullptr ? first + count : w.group / kChunk;
    const int64_t first_group = first / group_chunks;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* codes = w.codes + r * w.row_bytes;
      float* to = tile->weights[r];
      int64_t chunk = first;
      for (int64_t group = first_group; chunk < first + count; ++group) {
        const int64_t end = smaller(first + count, (group + 1) * group_chunks);
        const F factor = V::template factor<E>(w.scales == nullptr ? 1.0f : w.scales[r * w.scale_stride + group]);
        for (; chunk < end; ++chunk) {
          F values[kVectors];
          V::template decode<E>(codes + chunk * chunk_bytes(E), factor, values);
          for (int v = 0; v < kVectors; ++v) V::store(to + (chunk - first) * kChunk + v * kLanes, values[v]);
        }
      }
    }
  }

  template <Encoding E>
  static void project_tiles(const StoredRows& w, int64_t rows, int64_t columns, const float* const* x, int64_t tokens,
                            float* out, int64_t out_stride) {
    Tile tile;
    const int64_t chunks = columns / kChunk;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      for (int64_t t = 0; t < tokens; ++t) V::store(tile.sums + place(t, r), V::zero());
    }
    for (int64_t first = 0; first < chunks; first += kTileChunks) {
      const int64_t count = smaller(kTileChunks, chunks - first);
      const int64_t offset = first * kChunk;
      if constexpr (E == Encoding::F32) {
        multiply_tile(reinterpret_cast<const float*>(w.codes) + offset, w.row_bytes / 4, rows, x, offset, tokens,
                      count * kChunk, &tile);
      } else {
        decode_tile<E>(w, rows, first, count, &tile);
        multiply_tile(tile.weights[0], kTileColumns, rows, x, offset, tokens, count * kChunk, &tile);
      }
    }
    if (columns % kChunk != 0) {
      Tail tail;
      make_tail<E>(w, rows, columns, &tail);
      decode_tile<E>(tail.rows, rows, 0, 1, &tile);
      const float* ends[kTokenBlock];
      for (int64_t t = 0; t < tokens; ++t) {
        copy_tail<E>(x[t], columns, tile.ends[t]);
        ends[t] = tile.ends[t];
      }
      multiply_tile(tile.weights[0], kTileColumns, rows, ends, 0, tokens, kChunk, &tile);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) {
        const float* sums = tile.sums + place(t, r);
        V::sum4(V::load(sums), V::load(sums + kLanes), V::load(sums + 2 * kLanes), V::load(sums + 3 * kLanes),
                out + t * out_stride + r);
      }
      for (; r < rows; ++r) out[t * out_stride + r] = V::sum(V::load(tile.sums + place(t, r)));
    }
  }

  template <Encoding E>
  static void project_encoded(const StoredRows& w, int64_t rows, int64_t columns, const float* const* x,
                              int64_t tokens, float* out, int64_t out_stride) {
    if (tokens == 1) return project_directly<E, 1>(w, rows, columns, x, out, out_stride);
    if (tokens == 2) return project_directly<E, 2>(w, rows, columns, x, out, out_stride);
    if (tokens == 3) return project_directly<E, 3>(w, rows, columns, x, out, out_stride);
    if (tokens == 4) return project_directly<E, 4>(w, rows, columns, x, out, out_stride);
    for (int64_t token = 0; token < tokens; token += kTokenBlock) {
      project_tiles<E>(w, rows, columns, x + token, smaller(kTokenBlock, tokens - token), out + token * out_stride,
                       out_stride);
    }
  }

  static void project(const StoredRows& w, int64_t rows, int64_t columns, const float* const* x, int64_t tokens,
                      float* out, int64_t out_stride) {
    switch (w.encoding) {
      case Encoding::F32:
        return project_encoded<Encoding::F32>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::BF16:
        return project_encoded<Encoding::BF16>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::F16:
        return project_encoded<Encoding::F16>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::E4M3:
        return project_encoded<Encoding::E4M3>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::E2M1:
        return project_encoded<Encoding::E2M1>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::I8:
        return project_encoded<Encoding::I8>(w, rows, columns, x, tokens, out, out_stride);
      case Encoding::I4:
        return project_encoded<Encoding::I4>(w, rows, columns, x, tokens, out, out_stride);
    }
  }

  // VECTORS registers of columns of H heads.
  template <int H, int VECTORS>
  static DSV4C_INLINE void add_weighted_block(const float* factors, int64_t heads, const float* const* rows,
                                              int64_t count, int64_t column, int64_t columns, float* sums) {
    F local[H][VECTORS];
    for (int h = 0; h < H; ++h) {
      for (int v = 0; v < VECTORS; ++v) local[h][v] = V::load(sums + h * columns + column + v * kLanes);
    }
    for (int64_t i = 0; i < count; ++i) {
      F values[VECTORS];
      for (int v = 0; v < VECTORS; ++v) values[v] = V::load(rows[i] + column + v * kLanes);
      for (int h = 0; h < H; ++h) {
        const F factor = V::broadcast(factors[i * heads + h]);
        for (int v = 0; v < VECTORS; ++v) local[h][v] = V::fma(factor, values[v], local[h][v]);
      }
    }
    for (int h = 0; h < H; ++h) {
      for (int v = 0; v < VECTORS; ++v) V::store(sums + h * columns + column + v * kLanes, local[h][v]);
    }
  }

  template <int H>
  static void add_weighted_heads(const float* factors, int64_t heads, const float* const* rows, int64_t count,
                                 int64_t columns, float* sums) {
    int64_t column = 0;
    for (; column + 2 * kLanes <= columns; column += 2 * kLanes) {
      add_weighted_block<H, 2>(factors, heads, rows, count, column, columns, sums);
    }
    for (; column + kLanes <= columns; column += kLanes) {
      add_weighted_block<H, 1>(factors, heads, rows, count, column, columns, sums);
    }
    for (; column < columns; ++column) {
      for (int h = 0; h < H; ++h) {
        float sum = sums[h * columns + column];
        for (int64_t i = 0; i < count; ++i) sum += factors[i * heads + h] * rows[i][column];
        sums[h * columns + column] = sum;
      }
    }
  }

  static void add_weighted(const float* factors, int64_t heads, const float* const* rows, int64_t count,
                           int64_t columns, float* sums) {
    int64_t head = 0;
    for (; head + 4 <= heads; head += 4) {
      add_weighted_heads<4>(factors + head, heads, rows, count, columns, sums + head * columns);
    }
    for (; head < heads; ++head) {
      add_weighted_heads<1>(factors + head, heads, rows, count, columns, sums + head * columns);
    }
  }

  static float dot(const float* a, const float* b, int64_t count) {
    F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    int64_t i = 0;
    for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
      for (int v = 0; v < 4; ++v) sums[v] = V::fma(V::load(a + i + v * kLanes), V::load(b + i + v * kLanes), sums[v]);
    }
    float rest = 0;
    for (; i < count; ++i) rest += a[i] * b[i];
    return V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3]))) + rest;
  }

  static void exponentials(float* x, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) V::store(x + i, V::exponential(V::load(x + i)));
    if (i == count) return;
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, static_cast<size_t>(count - i) * sizeof(float));
    V::store(rest, V::exponential(V::load(rest)));
    std::memcpy(x + i, rest, static_cast<size_t>(count - i) * sizeof(float));
  }

  static void expand_f16(const uint16_t* from, int64_t count, float* to) {
    alignas(64) float values[kChunk];
    for (int64_t i = 0; i < count; i += kChunk) {
      uint16_t halves[kChunk] = {};
      const size_t part = static_cast<size_t>(smaller(kChunk, count - i));
      std::memcpy(halves, from + i, part * sizeof *from);
      F decoded[kVectors];
      V::template decode<Encoding::F16>(reinterpret_cast<const uint8_t*>(halves), V::broadcast(1.0f), decoded);
      for (int v = 0; v < kVectors; ++v) V::store(values + v * kLanes, decoded[v]);
      std::memcpy(to + i, values, part * sizeof *to);
    }
  }

  static void expand_e8m0(const uint8_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t code = from[i];
      const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23;
      std::memcpy(to + i, &bits, sizeof bits);
    }
  }

  static constexpr SimdKernels kernels(const char* name) {
    return {name, project, add_weighted, dot, exponentials, expand_f16, expand_e8m0};
  }
};

}  // namespace

}  // namespace dsv4c::cpu
