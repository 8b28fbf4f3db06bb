// SPDX-License-Identifier: Apache-2.0
// fp32 exp, log and the router's score functions, written with explicit fused multiply-adds and no libm: host (any instruction set)
// and device give the same bits, so near-ties of the router fall the same way everywhere. Straight-line code (selects, no branches,
// no tables), so that loops over it vectorise without changing a bit.
//
// Accuracy against the exact value, in units in the last place (tests/ops/router/scalar_math_test.cc holds it to these): exp and log
// 1; log1p_unit, softplus, log_sigmoid and sqrt_softplus 2; sigmoid 3; the slopes 4. Subnormal results included. log_sqrt_softplus has
// an absolute error of 2 ulp of 1 near its zero.
// NaN gives NaN. No function raises errno; every function is total on finite arguments, +Inf and -Inf.
#pragma once

#include <cstdint>

#include "waybill/export.h"

#define WB_SCALAR_MATH WB_HD inline __attribute__((always_inline))

namespace waybill::scalar {

// The rounded primitives. On the device the intrinsics stop the compiler from contracting a * b + c on its own.
#if defined(__CUDA_ARCH__)
WB_SCALAR_MATH float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
WB_SCALAR_MATH float add(float a, float b) { return __fadd_rn(a, b); }
WB_SCALAR_MATH float sub(float a, float b) { return __fsub_rn(a, b); }
WB_SCALAR_MATH float mul(float a, float b) { return __fmul_rn(a, b); }
WB_SCALAR_MATH float div(float a, float b) { return __fdiv_rn(a, b); }
WB_SCALAR_MATH float sqrt(float a) { return __fsqrt_rn(a); }
WB_SCALAR_MATH std::uint32_t bits_of(float a) { return __float_as_uint(a); }
WB_SCALAR_MATH float from_bits(std::uint32_t a) { return __uint_as_float(a); }
#else
WB_SCALAR_MATH float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
WB_SCALAR_MATH float add(float a, float b) { return a + b; }
WB_SCALAR_MATH float sub(float a, float b) { return a - b; }
WB_SCALAR_MATH float mul(float a, float b) { return a * b; }
WB_SCALAR_MATH float div(float a, float b) { return a / b; }
WB_SCALAR_MATH float sqrt(float a) { return __builtin_sqrtf(a); }
WB_SCALAR_MATH std::uint32_t bits_of(float a) {
  std::uint32_t u;
  __builtin_memcpy(&u, &a, 4);
  return u;
}
WB_SCALAR_MATH float from_bits(std::uint32_t a) {
  float f;
  __builtin_memcpy(&f, &a, 4);
  return f;
}
#endif

WB_SCALAR_MATH bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
WB_SCALAR_MATH float minus_abs(float x) { return from_bits(bits_of(x) | 0x80000000u); }

inline constexpr float kLn2High = 0.693145751953125f;  // 15 fractional bits: n * kLn2High is exact
inline constexpr float kLn2Low = 1.42860677e-06f;

// e^x. Rounds once into the subnormal range; 0 below -103.97, +Inf above 88.72.
WB_SCALAR_MATH float exp(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  float a = x < -105.0f ? -105.0f : x;
  a = a > 89.0f ? 89.0f : a;
  const float shifted = fma(a, 1.44269502f, kRound);
  const float nf = sub(shifted, kRound);
  const auto n = static_cast<std::int32_t>(bits_of(shifted) - 0x4b400000u);
  float r = fma(nf, -kLn2High, a);
  r = fma(nf, -kLn2Low, r);
  float q = fma(0.000198911614f, r, 0.00139338034f);
  q = fma(q, r, 0.00833331048f);
  q = fma(q, r, 0.041666463f);
  q = fma(q, r, 0.166666672f);
  q = fma(q, r, 0.5f);
  const float p = add(fma(q, mul(r, r), r), 1.0f);
  // 2^n in two factors: the first product is exact, so that a subnormal result is rounded once.
  const std::int32_t n1 = n >> 1;
  const std::int32_t n2 = n - n1;
  const float scale1 = from_bits(static_cast<std::uint32_t>(n1 + 127) << 23);
  const float scale2 = from_bits(static_cast<std::uint32_t>(n2 + 127) << 23);
  return mul(mul(p, scale1), scale2);
}

// log(1 + f) + e * ln 2 for f in [sqrt(1/2) - 1, sqrt(2) - 1] and a small integer e.
WB_SCALAR_MATH float log_reduced(float f, float e) {
  float q = fma(0.0696975365f, f, -0.114791878f);
  q = fma(q, f, 0.116857961f);
  q = fma(q, f, -0.124257766f);
  q = fma(q, f, 0.142490327f);
  q = fma(q, f, -0.166677982f);
  q = fma(q, f, 0.20000717f);
  q = fma(q, f, -0.24999997f);
  q = fma(q, f, 0.333333313f);
  const float f2 = mul(f, f);
  float tail = fma(mul(q, f), f2, mul(-0.5f, f2));
  tail = fma(e, kLn2Low, tail);
  return fma(e, kLn2High, add(f, tail));
}

// log x for x >= 0; -Inf at 0, NaN for negative x.
WB_SCALAR_MATH float log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? mul(x, 8388608.0f) : x;
  const std::uint32_t u = bits_of(scaled);
  const std::int32_t e = static_cast<std::int32_t>(u - 0x3f3504f3u) >> 23;
  const float f = sub(from_bits(u - (static_cast<std::uint32_t>(e) << 23)), 1.0f);
  const float y = log_reduced(f, static_cast<float>(tiny ? e - 23 : e));
  const float infinity = from_bits(0x7f800000u);
  const float special = x == 0.0f ? -infinity : (x == infinity ? infinity : from_bits(0x7fc00000u));
  return x > 0.0f && x < infinity ? y : special;
}

// log(1 + y) for y in [0, 1].
WB_SCALAR_MATH float log1p_unit(float y) {
  const bool upper = y > 0.41421354f;
  return log_reduced(upper ? fma(0.5f, y, -0.5f) : y, upper ? 1.0f : 0.0f);
}

// 1 / (1 + e^-x), without overflow at either end and with full relative accuracy where it is tiny.
WB_SCALAR_MATH float sigmoid(float x) {
  const float e = exp(minus_abs(x));
  return div(x < 0.0f ? e : 1.0f, add(1.0f, e));
}

// log sigmoid(x) = min(x, 0) - log1p(e^-|x|).
WB_SCALAR_MATH float log_sigmoid(float x) { return sub(x < 0.0f ? x : 0.0f, log1p_unit(exp(minus_abs(x)))); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
WB_SCALAR_MATH float softplus(float x) { return add(x > 0.0f ? x : 0.0f, log1p_unit(exp(minus_abs(x)))); }

// Below this x, softplus(x) = e^x to less than half an ulp of what is built from it here.
inline constexpr float kSoftplusTail = -16.5f;

// sqrt(log(1 + e^x)); e^(x/2) in the tail, where softplus itself would underflow.
WB_SCALAR_MATH float sqrt_softplus(float x) {
  const float tail = exp(mul(0.5f, x));
  const float body = sqrt(softplus(x));
  return x < kSoftplusTail ? tail : body;
}

// log of sqrt_softplus(x); x / 2 in the tail.
WB_SCALAR_MATH float log_sqrt_softplus(float x) {
  const float body = log(softplus(x));
  return mul(0.5f, x < kSoftplusTail ? x : body);
}

// d log s / dx for s = sigmoid: 1 - s = sigmoid(-x).
WB_SCALAR_MATH float log_sigmoid_slope(float x) { return sigmoid(-x); }

// d log s / dx for s = sqrt_softplus: sigmoid(x) / (2 softplus(x)), 1/2 in the tail.
WB_SCALAR_MATH float log_sqrt_softplus_slope(float x) {
  const bool is_tail = x < kSoftplusTail;
  const float inside = is_tail ? 0.0f : x;
  const float body = div(sigmoid(inside), mul(2.0f, softplus(inside)));
  return is_tail ? 0.5f : body;
}

// Maps a float to an integer of the same order: a < b exactly where order_key(a) < order_key(b), -0 equal to +0. Finite floats map to
// 0x00800000 .. 0xff7fffff, so 0 is free for "excluded".
WB_SCALAR_MATH std::uint32_t order_key(float x) {
  const std::uint32_t u = bits_of(add(x, 0.0f));
  return u ^ ((u >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

}  // namespace waybill::scalar
