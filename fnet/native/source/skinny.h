// Products of a few rows and a matrix of float32 or bfloat16 numbers, which is read once:
//
//     y[r, n] = sum over k of x[r, k] w[k, n]
//
// XLA's product copies the matrix into another order first, which for a few rows takes longer than the
// product. Here a tile of sums for some rows and neighboring outputs stays in registers. The matrix is
// stored with n as its last axis ("wide": [K, N]), or with k ("long": [N, K]).
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "simd.h"

namespace fnet {

template <class Weight>
struct Skinny {
  int64_t rows, inputs, outputs;  // R, K, N
  const float* x;                 // [R, K]
  const Weight* w;
  float* y;  // [R, N]
};

namespace skinny {

// Rows and vectors of a tile. Its sums, a vector of each column and one value fit into the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST = 8, VECTORS = 3;
#else
constexpr int MOST = 4, VECTORS = 2;
#endif
constexpr int64_t STRIP = VECTORS * WIDTH, DEPTH = 32;  // outputs, and inputs, of a block of the matrix

// Adds the products of R rows with `depth` rows of the matrix, which are `stride` apart, to y. From
// `next` on, as many rows will be needed soon; the hardware does not see that.
template <class Weight, int R, bool PARTIAL, bool FETCH>
void wide_tile(const float* x, int64_t inputs, const Weight* w, int64_t stride, int64_t depth, const Weight* next,
               float* y, int64_t outputs, int64_t count, bool begins) {
  Floats sums[R][VECTORS] = {};
  int64_t counts[VECTORS];
  for (int v = 0; v < VECTORS; v++) counts[v] = std::clamp<int64_t>(count - v * WIDTH, 0, WIDTH);
  if (!begins) {
    FNET_UNROLL
    for (int r = 0; r < R; r++)
      FNET_UNROLL
      for (int v = 0; v < VECTORS; v++) {
        const float* at = y + r * outputs + v * WIDTH;
        sums[r][v] = PARTIAL ? load(at, counts[v]) : load(at);
      }
  }
  for (int64_t k = 0; k < depth; k++, w += stride) {
    Floats column[VECTORS];
    FNET_UNROLL
    for (int v = 0; v < VECTORS; v++) column[v] = PARTIAL ? load(w + v * WIDTH, counts[v]) : load(w + v * WIDTH);
    if (FETCH) {
      constexpr int LINE = 64 / sizeof(Weight);
      FNET_UNROLL
      for (int line = 0; line < STRIP; line += LINE) __builtin_prefetch(next + k * outputs + line);
    }
    FNET_UNROLL
    for (int r = 0; r < R; r++) {
      const Floats value = broadcast(x[r * inputs + k]);
      FNET_UNROLL
      for (int v = 0; v < VECTORS; v++) sums[r][v] += value * column[v];
    }
  }
  FNET_UNROLL
  for (int r = 0; r < R; r++)
    FNET_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      float* at = y + r * outputs + v * WIDTH;
      PARTIAL ? store(at, sums[r][v], counts[v]) : store(at, sums[r][v]);
    }
}

// Calls f(row, integral constant) for blocks of rows.
template <class F>
FNET_INLINE void in_blocks(int64_t rows, F&& f) {
  int64_t row = 0;
  auto blocks = [&](auto size) {
    for (; row + size.value <= rows; row += size.value) f(row, size);
  };
  blocks(std::integral_constant<int, MOST>());
  blocks(std::integral_constant<int, 4>());
  blocks(std::integral_constant<int, 2>());
  blocks(std::integral_constant<int, 1>());
}

template <class Weight>
void wide_strips(const Skinny<Weight>& p, int64_t begin, int64_t end) {
  alignas(64) Weight copy[DEPTH * STRIP];
  for (int64_t k = 0; k < p.inputs; k += DEPTH) {
    const int64_t depth = std::min(DEPTH, p.inputs - k);
    for (int64_t n = begin; n < end; n += STRIP) {
      const Weight* w = p.w + k * p.outputs + n;
      const Weight* next = w + STRIP;
      const bool whole = n + STRIP <= end;
      int64_t stride = p.outputs;
      if (whole && p.rows > MOST) {  // rows that lie a power of two apart exclude each other from the cache
        for (int64_t i = 0; i < depth; i++) std::memcpy(copy + i * STRIP, w + i * stride, sizeof(Weight) * STRIP);
        w = copy, stride = STRIP;
      }
      in_blocks(p.rows, [&](int64_t row, auto size) {
        constexpr int R = decltype(size)::value;
        const auto tile = !whole     ? wide_tile<Weight, R, true, false>
                          : row == 0 ? wide_tile<Weight, R, false, true>
                                     : wide_tile<Weight, R, false, false>;
        tile(p.x + row * p.inputs + k, p.inputs, w, stride, depth, next, p.y + row * p.outputs + n, p.outputs,
             end - n, k == 0);
      });
    }
  }
}

template <class Weight, int R, int N>
void long_tile(const Skinny<Weight>& p, int64_t row, int64_t n) {
  Floats sums[R][N] = {};
  auto add = [&](int64_t k, auto&& read) {
    Floats column[N];
    FNET_UNROLL
    for (int j = 0; j < N; j++) {
      column[j] = read(p.w + (n + j) * p.inputs + k);
      if (row == 0) __builtin_prefetch(p.w + (n + N + j) * p.inputs + k);
    }
    FNET_UNROLL
    for (int r = 0; r < R; r++) {
      const Floats values = read(p.x + (row + r) * p.inputs + k);
      FNET_UNROLL
      for (int j = 0; j < N; j++) sums[r][j] += values * column[j];
    }
  };
  int64_t k = 0;
  for (; k + WIDTH <= p.inputs; k += WIDTH) add(k, [](const auto* at) { return load(at); });
  if (k < p.inputs) add(k, [&](const auto* at) { return load(at, p.inputs - k); });
  for (int r = 0; r < R; r++)
    for (int j = 0; j < N; j++) p.y[(row + r) * p.outputs + n + j] = total(sums[r][j]);
}

template <class Weight>
void long_strips(const Skinny<Weight>& p, int64_t begin, int64_t end) {
  int64_t n = begin;
  auto outputs = [&](auto count) {
    constexpr int N = decltype(count)::value;
    for (; n + N <= end; n += N)
      in_blocks(p.rows, [&](int64_t row, auto size) { long_tile<Weight, decltype(size)::value, N>(p, row, n); });
  };
  outputs(std::integral_constant<int, VECTORS>());
  outputs(std::integral_constant<int, 1>());
}

}  // namespace skinny

template <class Weight>
void skinny_product(Pool& pool, const Skinny<Weight>& p, bool wide) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (p.inputs == 0) {
    std::fill(p.y, p.y + p.rows * p.outputs, 0.0f);
    return;
  }
  const int64_t unit = wide ? skinny::STRIP : 8 * skinny::VECTORS;
  const int64_t units = (p.outputs + unit - 1) / unit;
  const int64_t kilobytes = p.inputs * p.outputs * static_cast<int64_t>(sizeof(Weight)) / 1024;
  const int64_t tasks = std::max<int64_t>(1, std::min({units, 4 * pool.threads(), kilobytes / 64}));
  parallel(pool, tasks, [&](int64_t task) {
    const int64_t begin = units * task / tasks * unit, end = std::min(p.outputs, units * (task + 1) / tasks * unit);
    wide ? skinny::wide_strips(p, begin, end) : skinny::long_strips(p, begin, end);
  });
}

}  // namespace fnet
