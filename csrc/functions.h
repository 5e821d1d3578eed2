// exp and tanh that a compiler can vectorize, in contrast to the functions of the C++ library. On CUDA
// exp of floats is CUDA's own. NaN stays NaN; exp overflows to infinity, and underflows to subnormals
// and then to 0.
//
// exp(x) = 2^n (1 + e) with n = round(x / ln 2), r = x - n ln 2, |r| <= 0.35, e = exp(r) - 1 as a
// series. tanh |y| = -E / (2 + E) with E = exp(-2 |y|) - 1 = 2^n e + (2^n - 1), and its derivative
// is 4 exp(-2 |y|) / (2 + E)^2. These forms avoid the cancellation in 1 - tanh^2 and in 1 + E.
#pragma once

#include <cmath>
#include <cstring>

#include "team.h"

namespace burst {

template <class F>
struct Format;

template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr int mantissa = 23, bias = 127;
  static constexpr int terms = 7;  // 0.35^8 / 8! = 5e-9
  static constexpr float low = -104, high = 89;  // exp is 0 below, infinite above
  // ln 2 in two parts; the first has few bits, so its product with n is exact
  static constexpr float ln2 = 0x1.62e4p-1f, ln2_rest = 1.42860682e-06f;
  static constexpr float rounding = 0x1.8p23f;  // x + rounding has round(x) in its last bits
};

template <>
struct Format<double> {
  using Bits = uint64_t;
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr int terms = 13;  // 0.35^14 / 14! = 5e-18
  static constexpr double low = -746, high = 710;
  static constexpr double ln2 = 0x1.62e42fee00000p-1, ln2_rest = 1.9082149292705877e-10;
  static constexpr double rounding = 0x1.8p52;
};

BURST_BOTH constexpr double inverse_factorial(int k) {
  return k < 2 ? 1.0 : inverse_factorial(k - 1) / k;
}

// 1 / K! + r / (K + 1)! + ... up to 1 / LAST!
template <int K, int LAST, class F>
BURST_BOTH F series(F r) {
  constexpr F first = F(inverse_factorial(K));
  if constexpr (K == LAST) {
    return first;
  } else {
    return first + r * series<K + 1, LAST>(r);
  }
}

// Returns 2^n for an argument n + rounding, if 2^n is a normal number.
template <class F>
BURST_BOTH F power_of_two(F shifted) {
  using Bits = typename Format<F>::Bits;
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + Format<F>::bias) << Format<F>::mantissa;
  F power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Returns 1 / 2^k for x >= 0 in [2^k, 2^(k+1)), limited to normal numbers.
template <class F>
BURST_BOTH F inverse(F x) {
  using Bits = typename Format<F>::Bits;
  constexpr Bits largest = 2 * Format<F>::bias - 1;
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits >>= Format<F>::mantissa;
  bits = bits < 1 ? 1 : bits > largest ? largest : bits;
  bits = (2 * Format<F>::bias - bits) << Format<F>::mantissa;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// n, n + rounding, and e; see the top of this file.
template <class F>
struct Split {
  F shifted, n, e;

  explicit BURST_BOTH Split(F x) {
    using C = Format<F>;
    shifted = x * F(1.4426950408889634) + C::rounding;
    n = shifted - C::rounding;
    const F r = (x - n * C::ln2) - n * C::ln2_rest;
    e = r * series<1, C::terms>(r);
  }
};

template <class F>
BURST_BOTH F exponential(F x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(F) == sizeof(float)) {
    return expf(x);
  }
#endif
  using C = Format<F>;
  x = x < C::low ? C::low : x;
  x = x > C::high ? C::high : x;
  const Split<F> part(x);
  // 2^n in two factors, because 2^n may be outside the normal numbers although the result is not
  const F half = part.n * F(0.5) + C::rounding;
  const F rest = (part.n - (half - C::rounding)) + C::rounding;
  return (1 + part.e) * power_of_two(half) * power_of_two(rest);
}

template <class F>
struct Tanh {
  F value, slope;

  explicit BURST_BOTH Tanh(F y) {
    F x = -2 * std::fabs(y);
    x = x < -80 ? F(-80) : x;  // tanh is 1 there
    const Split<F> part(x);
    const F power = power_of_two(part.shifted);
    const F less = power * part.e + (power - 1);
    const F share = 1 / (2 + less);
    value = std::copysign(-less / (2 + less), y);
    slope = 4 * (power + power * part.e) * share * share;
  }
};

}  // namespace burst
