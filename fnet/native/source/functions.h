// The exponential function, the logistic function and tanh of vectors of float32. NaN stays NaN, and
// infinite arguments give the limits. Compared with long double for every 101st float32 number, results
// that are not subnormal are within 1 unit in the last place for exp, and within 2.5 for the other two.
// -0 counts as 0.
#pragma once

#include "simd.h"

namespace fnet {

FNET_INLINE Floats smaller(Floats x, float limit) { return x > limit ? broadcast(limit) : x; }  // NaN stays
FNET_INLINE Floats larger(Floats x, float limit) { return x < limit ? broadcast(limit) : x; }

// e^x = power * (1 + rest), where power is a power of two, and |rest| < 0.42.
struct Exponential {
  Floats power, rest;
};

// 2^n for an integer n. 2^128 is infinite.
#if defined(__AVX512F__)
FNET_INLINE Floats power_of_two(Floats n) { return _mm512_scalef_ps(broadcast(1.0f), n); }
#else
FNET_INLINE Floats power_of_two(Floats n) {  // as two factors, because 2^n may have no exponent
  const Ints whole = __builtin_convertvector(n, Ints), half = whole >> 1;
  return bits_of<Floats>(bits_of<Words>(half + 127) << 23) * bits_of<Floats>(bits_of<Words>(whole - half + 127) << 23);
}
#endif

// For -150 log(2) <= x <= 128 log(2), or NaN.
FNET_INLINE Exponential exponential(Floats x) {
  const Floats shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x * 1.44269504f + shift) - shift;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n log(2)
  Floats p = broadcast(0.00138145837f);
  p = p * r + 0.00836872403f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  return {power_of_two(n), p * (r * r) + r};
}

FNET_INLINE Floats exp(Floats x) {
  const Exponential e = exponential(larger(smaller(x, 89.0f), -104.0f));
  return e.power * e.rest + e.power;
}

FNET_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// tanh(x) = m / (m + 2) for m = e^2x - 1, which is exact near 0, too.
FNET_INLINE Floats tanh(Floats x) {
  const Exponential e = exponential(larger(smaller(x + x, 40.0f), -40.0f));
  const Floats m = e.power * e.rest + (e.power - 1.0f);
  return m / (m + 2.0f);
}

}  // namespace fnet
