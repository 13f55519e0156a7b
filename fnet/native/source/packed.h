// Products of a few rows of float32 numbers and a matrix of codes of 4 or 8 bits. The codes are read once,
// and decoded in registers:
//
//     y[r, n] = sum over groups g of scale[g, n] sum over k in g of x[r, k] decode(codes[k, n])
//
// A byte holds two codes of 4 bits that are neighbors along k, the first in its lower half. The matrix is
// stored with n as its last axis ("wide": codes [k, n], scale [g, n]), or with k ("long": codes [n, k],
// scale [n, g]).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace fnet {

struct Packed {
  int64_t rows, inputs, outputs, groups;  // R, K, N, G
  const float* x;                         // [R, K]
  const uint8_t* codes;                   // 8 bits are signed
  const float* scale;
  const float* table;  // the values of the 16 codes of 4 bits
  float* y;            // [R, N]
};

namespace packed {

typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int8_t Signed __attribute__((vector_size(WIDTH)));

FNET_INLINE Bytes bytes(const uint8_t* from) {
  Bytes vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

FNET_INLINE Bytes bytes(const uint8_t* from, int64_t count) {
  Bytes vector = {};
  std::memcpy(&vector, from, static_cast<size_t>(count));
  return vector;
}

// The bytes as 32-bit integers. GCC converts such vectors element by element, so that these are written.
FNET_INLINE Ints unsigned_ints(Bytes codes) {
#if defined(__AVX512F__)
  return bits_of<Ints>(_mm512_cvtepu8_epi32(bits_of<__m128i>(codes)));
#elif defined(__AVX2__)
  return bits_of<Ints>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_of<int64_t>(codes))));
#else
  return __builtin_convertvector(codes, Ints);
#endif
}

FNET_INLINE Ints signed_ints(Bytes codes) {
#if defined(__AVX512F__)
  return bits_of<Ints>(_mm512_cvtepi8_epi32(bits_of<__m128i>(codes)));
#elif defined(__AVX2__)
  return bits_of<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bits_of<int64_t>(codes))));
#else
  return __builtin_convertvector(bits_of<Signed>(codes), Ints);
#endif
}

// Looks up the lowest 4 bits of each index.
class Table {
 public:
#if defined(__AVX512F__)
  explicit Table(const float* values) : values_(load(values)) {}
  FNET_INLINE Floats operator()(Ints index) const { return _mm512_permutexvar_ps(bits_of<__m512i>(index), values_); }

 private:
  Floats values_;
#elif defined(__AVX2__)
  explicit Table(const float* values) : low_(load(values)), high_(load(values + 8)) {}
  FNET_INLINE Floats operator()(Ints index) const {
    const __m256i lanes = bits_of<__m256i>(index);
    const __m256 low = _mm256_permutevar8x32_ps(low_, lanes), high = _mm256_permutevar8x32_ps(high_, lanes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28)));
  }

 private:
  Floats low_, high_;
#else
  explicit Table(const float* values) : values_(values) {}
  FNET_INLINE Floats operator()(Ints index) const {
    Floats found;
    for (int i = 0; i < WIDTH; i++) found[i] = values_[index[i] & 15];
    return found;
  }

 private:
  const float* values_;
#endif
};

// Codes of a vector of bytes: COUNT vectors of values, of neighbors along k.
struct Four {
  static constexpr int COUNT = 2;
  Table table;
  explicit Four(const float* values) : table(values) {}
  FNET_INLINE void decode(Bytes codes, Floats* values) const {
    const Ints wide = unsigned_ints(codes);
    values[0] = table(wide);
    values[1] = table(wide >> 4);
  }
};

struct Eight {
  static constexpr int COUNT = 1;
  explicit Eight(const float*) {}
  FNET_INLINE void decode(Bytes codes, Floats* values) const {
    values[0] = __builtin_convertvector(signed_ints(codes), Floats);
  }
};

constexpr int64_t AHEAD = 16;  // steps

// ---- wide: VECTORS x WIDTH outputs of R rows; the last vector has `count` outputs if PARTIAL

template <class Code, int R, int VECTORS, bool PARTIAL>
void wide_tile(const Packed& p, const Code& code, int64_t row, int64_t n, int64_t count) {
  constexpr int COUNT = Code::COUNT;
  const int64_t steps = p.inputs / p.groups / COUNT;  // bytes of a column and group
  Floats total[R][VECTORS] = {};
  const uint8_t* codes = p.codes + n;
  const float* x = p.x + row * p.inputs;
  for (int64_t group = 0; group < p.groups; group++) {
    Floats sum[R][VECTORS] = {};
    for (int64_t step = 0; step < steps; step++, codes += p.outputs, x += COUNT) {
      FNET_UNROLL
      for (int v = 0; v < VECTORS; v++) {
        Floats values[COUNT];
        code.decode(PARTIAL ? bytes(codes, count) : bytes(codes + v * WIDTH), values);
        FNET_UNROLL
        for (int r = 0; r < R; r++)
          FNET_UNROLL
          for (int i = 0; i < COUNT; i++) sum[r][v] += broadcast(x[r * p.inputs + i]) * values[i];
      }
      // The hardware does not see that the next lines are a row away.
      FNET_UNROLL
      for (int line = 0; line < VECTORS * WIDTH; line += 64) __builtin_prefetch(codes + AHEAD * p.outputs + line);
    }
    FNET_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      const float* at = p.scale + group * p.outputs + n + v * WIDTH;
      const Floats scale = PARTIAL ? load(at, count) : load(at);
      FNET_UNROLL
      for (int r = 0; r < R; r++) total[r][v] += sum[r][v] * scale;
    }
  }
  FNET_UNROLL
  for (int r = 0; r < R; r++)
    FNET_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      float* at = p.y + (row + r) * p.outputs + n + v * WIDTH;
      PARTIAL ? store(at, total[r][v], count) : store(at, total[r][v]);
    }
}

template <class Code, int R>
void wide_rows(const Packed& p, const Code& code, int64_t row, int64_t n, int64_t end) {
  constexpr int VECTORS = (WIDTH == 16 ? 8 : 4) / R;
  for (; n + VECTORS * WIDTH <= end; n += VECTORS * WIDTH) wide_tile<Code, R, VECTORS, false>(p, code, row, n, WIDTH);
  for (; n + WIDTH <= end; n += WIDTH) wide_tile<Code, R, 1, false>(p, code, row, n, WIDTH);
  if (n < end) wide_tile<Code, R, 1, true>(p, code, row, n, end - n);
}

// ---- long: N outputs of R rows. x is split into the numbers of the first and of the second codes.

template <class Code, int R, int N>
void long_tile(const Packed& p, const Code& code, const float* split, int64_t row, int64_t n) {
  constexpr int COUNT = Code::COUNT;
  const int64_t bytes_of_row = p.inputs / COUNT, bytes_of_group = bytes_of_row / p.groups;
  Floats total[R][N] = {};
  for (int64_t group = 0; group < p.groups; group++) {
    Floats sum[R][N] = {};
    const int64_t begin = group * bytes_of_group, end = begin + bytes_of_group;
    auto add = [&](int64_t k, auto&& read_codes, auto&& read) {
      FNET_UNROLL
      for (int j = 0; j < N; j++) {
        Floats values[COUNT];
        code.decode(read_codes(p.codes + (n + j) * bytes_of_row + k), values);
        FNET_UNROLL
        for (int r = 0; r < R; r++)
          FNET_UNROLL
          for (int i = 0; i < COUNT; i++) sum[r][j] += read(split + ((row + r) * COUNT + i) * bytes_of_row + k) * values[i];
      }
    };
    int64_t k = begin;
    for (; k + WIDTH <= end; k += WIDTH)
      add(k, [](const uint8_t* at) { return bytes(at); }, [](const float* at) { return load(at); });
    if (k < end) {
      const int64_t count = end - k;
      add(k, [=](const uint8_t* at) { return bytes(at, count); }, [=](const float* at) { return load(at, count); });
    }
    FNET_UNROLL
    for (int j = 0; j < N; j++) {
      const Floats scale = broadcast(p.scale[(n + j) * p.groups + group]);
      FNET_UNROLL
      for (int r = 0; r < R; r++) total[r][j] += sum[r][j] * scale;
    }
  }
  FNET_UNROLL
  for (int r = 0; r < R; r++)
    FNET_UNROLL
    for (int j = 0; j < N; j++) p.y[(row + r) * p.outputs + n + j] = fnet::total(total[r][j]);
}

template <class Code, int R>
void long_rows(const Packed& p, const Code& code, const float* split, int64_t row, int64_t n, int64_t end) {
  constexpr int N = (WIDTH == 16 ? 8 : 4) / R;
  for (; n + N <= end; n += N) long_tile<Code, R, N>(p, code, split, row, n);
  for (; n < end; n++) long_tile<Code, R, 1>(p, code, split, row, n);
}

template <class Code>
void product(Pool& pool, const Packed& p, bool wide) {
  constexpr int COUNT = Code::COUNT;
  const Code code(p.table);
  Memory<float> split;
  if (!wide) {
    split.grow(p.rows * p.inputs);
    const int64_t half = p.inputs / COUNT;
    for (int64_t r = 0; r < p.rows; r++)
      for (int64_t k = 0; k < p.inputs; k++) split[r * p.inputs + k % COUNT * half + k / COUNT] = p.x[r * p.inputs + k];
  }
  // Tasks of some ten kilobytes of codes, of whole tiles.
  const int64_t unit = wide ? WIDTH * (WIDTH == 16 ? 8 : 4) : 8;
  const int64_t units = (p.outputs + unit - 1) / unit;
  const int64_t kilobytes = p.inputs / COUNT * p.outputs / 1024;
  const int64_t tasks = std::max<int64_t>(1, std::min({units, 8 * pool.threads(), kilobytes / 16}));
  parallel(pool, tasks, [&](int64_t task) {
    const int64_t begin = units * task / tasks * unit, end = std::min(p.outputs, units * (task + 1) / tasks * unit);
    int64_t row = 0;
    auto rows = [&](auto size) {
      constexpr int R = decltype(size)::value;
      for (; row + R <= p.rows; row += R) {
        if (wide) {
          wide_rows<Code, R>(p, code, row, begin, end);
        } else {
          long_rows<Code, R>(p, code, split.data(), row, begin, end);
        }
      }
    };
    rows(std::integral_constant<int, 4>());
    rows(std::integral_constant<int, 2>());
    rows(std::integral_constant<int, 1>());
  });
}

}  // namespace packed

// Computes y. With 4 bits, the groups have even lengths.
inline void packed_product(Pool& pool, const Packed& p, int64_t bits, bool wide) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (p.inputs == 0) {
    std::fill(p.y, p.y + p.rows * p.outputs, 0.0f);
  } else if (bits == 4) {
    packed::product<packed::Four>(pool, p, wide);
  } else {
    packed::product<packed::Eight>(pool, p, wide);
  }
}

}  // namespace fnet
