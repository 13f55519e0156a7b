// Vectors of float32 for AVX-512, AVX2, NEON, and any other CPU, by the vector extensions of GCC and
// Clang. The library is compiled on the machine that runs it (-march=native), so the width is known here
// and no code chooses at run time. Arithmetic is written with operators: the compiler contracts
// `a * b + c` to a fused multiply-add (-ffp-contract=fast).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fnet {

// A register tile of a matrix product holds ROWS x COLUMNS vectors of sums. Beside them, a row of
// COLUMNS vectors and one broadcast value must fit into the registers: 32, or 16 for AVX2 and SSE.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, ROWS = 6, COLUMNS = 4;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, ROWS = 6, COLUMNS = 2;
#elif defined(__aarch64__)
constexpr int WIDTH = 4, ROWS = 6, COLUMNS = 4;
#else
constexpr int WIDTH = 4, ROWS = 6, COLUMNS = 2;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

// Loops over a register tile must be unrolled completely, or the sums live in memory.
#define FNET_UNROLL _Pragma("GCC unroll 16")

#if defined(__GNUC__)
#define FNET_INLINE inline __attribute__((always_inline))
#else
#define FNET_INLINE inline
#endif

struct bfloat16 {
  uint16_t bits;
};

template <class To, class From>
FNET_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "a value keeps its size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- float32: whole vectors, and the first `count` elements (0 to WIDTH) with zeros behind them

FNET_INLINE Floats broadcast(float value) { return value - Floats{}; }  // -0 - 0 is -0

FNET_INLINE Floats load(const float* from) {
  Floats vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

FNET_INLINE void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof(vector)); }

#if defined(__AVX512F__)
FNET_INLINE __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
FNET_INLINE Floats load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }
FNET_INLINE void store(float* to, Floats vector, int64_t count) { _mm512_mask_storeu_ps(to, first(count), vector); }
#elif defined(__AVX2__)
FNET_INLINE __m256i first(int64_t count) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), index);
}
FNET_INLINE Floats load(const float* from, int64_t count) { return _mm256_maskload_ps(from, first(count)); }
FNET_INLINE void store(float* to, Floats vector, int64_t count) { _mm256_maskstore_ps(to, first(count), vector); }
#else
FNET_INLINE Floats load(const float* from, int64_t count) {
  Floats vector = {};
  for (int64_t i = 0; i < count; i++) vector[i] = from[i];
  return vector;
}
FNET_INLINE void store(float* to, Floats vector, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = vector[i];
}
#endif

#if defined(__AVX512F__)
FNET_INLINE float total(Floats vector) { return _mm512_reduce_add_ps(vector); }
#else
FNET_INLINE float total(Floats vector) {
  float sums[WIDTH];
  store(sums, vector);
  FNET_UNROLL
  for (int half = WIDTH / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}
#endif

// ---- bfloat16: widened to float32, and rounded to the nearest (ties to even; a NaN becomes quiet)

FNET_INLINE float widen(float value) { return value; }
FNET_INLINE float widen(bfloat16 value) { return bits_of<float>(static_cast<uint32_t>(value.bits) << 16); }

template <class To>
FNET_INLINE To narrow(float value);
template <>
FNET_INLINE float narrow<float>(float value) {
  return value;
}
template <>
FNET_INLINE bfloat16 narrow<bfloat16>(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// ---- float32 words in another order: two vectors element by element, and a square of WIDTH vectors

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define FNET_SHUFFLEVECTOR
#endif
#endif

// a[H W/2], b[H W/2], a[H W/2 + 1], b[H W/2 + 1] and so on, for the half H (0 or 1) of W = WIDTH elements.
#if defined(FNET_SHUFFLEVECTOR)
template <int HALF, size_t... I>
FNET_INLINE Words zipped(Words a, Words b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I % 2 * WIDTH + HALF * WIDTH / 2 + I / 2)...);
}
#else  // GCC before 12
template <int HALF, size_t... I>
FNET_INLINE Words zipped(Words a, Words b, std::index_sequence<I...>) {
  return __builtin_shuffle(a, b, Words{(I % 2 * WIDTH + HALF * WIDTH / 2 + I / 2)...});
}
#endif

// Swaps rows and columns: log2(WIDTH) times, the first half of the rows is zipped with the second half.
FNET_INLINE void transpose(Words (&rows)[WIDTH]) {
  constexpr auto every = std::make_index_sequence<WIDTH>();
  FNET_UNROLL
  for (int round = 1; round < WIDTH; round *= 2) {
    Words zips[WIDTH];
    FNET_UNROLL
    for (int i = 0; i < WIDTH / 2; i++) {
      zips[2 * i] = zipped<0>(rows[i], rows[i + WIDTH / 2], every);
      zips[2 * i + 1] = zipped<1>(rows[i], rows[i + WIDTH / 2], every);
    }
    FNET_UNROLL
    for (int i = 0; i < WIDTH; i++) rows[i] = zips[i];
  }
}

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

FNET_INLINE Floats load(const bfloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return bits_of<Floats>(__builtin_convertvector(halves, Words) << 16);
}

FNET_INLINE Floats load(const bfloat16* from, int64_t count) {
  Halves halves = {};
  std::memcpy(&halves, from, 2 * static_cast<size_t>(count));
  return bits_of<Floats>(__builtin_convertvector(halves, Words) << 16);
}

FNET_INLINE Halves rounded(Floats vector) {
  const Words bits = bits_of<Words>(vector);
  const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(vector != vector ? quiet : nearest, Halves);
}

FNET_INLINE void store(bfloat16* to, Floats vector) {
  const Halves halves = rounded(vector);
  std::memcpy(to, &halves, sizeof(halves));
}

FNET_INLINE void store(bfloat16* to, Floats vector, int64_t count) {
  const Halves halves = rounded(vector);
  std::memcpy(to, &halves, 2 * static_cast<size_t>(count));
}

// ---- what a matrix product multiplies: float32 values, or pairs of bfloat16 values along the contraction

FNET_INLINE Floats broadcast(const float* from) { return broadcast(*from); }
FNET_INLINE Floats multiplied(Floats sums, Floats a, Floats b) { return a * b + sums; }

// Intel's CPUs (which have AMX) take longer for a product of pairs than for two of float32.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define FNET_PAIRS
// The first value is in the lower half. Pairs are read where two values lie in memory, so only memcpy may
// look at them.
struct Pair {
  bfloat16 values[2];
};
FNET_INLINE Words broadcast(const Pair* from) { return bits_of<uint32_t>(*from) - Words{}; }
FNET_INLINE Words load(const Pair* from) {
  Words vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}
FNET_INLINE Words load(const Pair* from, int64_t count) {
  Words vector = {};
  std::memcpy(&vector, from, 4 * static_cast<size_t>(count));
  return vector;
}
FNET_INLINE Floats multiplied(Floats sums, Words a, Words b) {
  return _mm512_dpbf16_ps(sums, bits_of<__m512bh>(a), bits_of<__m512bh>(b));
}
#endif

}  // namespace fnet
