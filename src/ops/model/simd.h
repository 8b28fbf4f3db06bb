// SPDX-License-Identifier: Apache-2.0
// Sixteen float lanes, whatever the machine's width: the same operations in the same order give the same bits with SSE2, AVX2 and
// AVX-512. A kernel is written once as an inline body; WB_SIMD_KERNEL compiles it per instruction set and picks one at run time.
#pragma once

#include <cstdint>
#include <cstring>

namespace waybill::simd {

#define WB_SIMD_INLINE inline __attribute__((always_inline))

inline constexpr std::int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = std::int32_t __attribute__((vector_size(64)));
using Bits = std::uint32_t __attribute__((vector_size(64)));

enum class Level : int { kBase = 0, kAvx2 = 1, kAvx512 = 2 };
inline Level level() {
#if defined(__x86_64__)
  static const Level value = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? Level::kAvx512
                             : __builtin_cpu_supports("avx2")                                                                              ? Level::kAvx2
                                                                                                                                           : Level::kBase;
  return value;
#else
  return Level::kBase;
#endif
}

// Defines `void name params` from `void name_body params`.
#if defined(__x86_64__)
#define WB_SIMD_KERNEL(name, params, args)                                                                    \
  __attribute__((target("avx512f,avx512dq,avx512vl"))) static void name##_avx512 params { name##_body args; } \
  __attribute__((target("avx2"))) static void name##_avx2 params { name##_body args; }                        \
  static void name##_base params { name##_body args; }                                                        \
  void name params {                                                                                          \
    switch (::waybill::simd::level()) {                                                                       \
      case ::waybill::simd::Level::kAvx512:                                                                   \
        return name##_avx512 args;                                                                            \
      case ::waybill::simd::Level::kAvx2:                                                                     \
        return name##_avx2 args;                                                                              \
      default:                                                                                                \
        return name##_base args;                                                                              \
    }                                                                                                         \
  }
#else
#define WB_SIMD_KERNEL(name, params, args) \
  void name params { name##_body args; }
#endif

static WB_SIMD_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static WB_SIMD_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
// The first n < 16 lanes from memory, the others 0.
static WB_SIMD_INLINE Floats load_part(const float* p, std::int64_t n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<std::size_t>(n) * sizeof(float));
  return load(lanes);
}
static WB_SIMD_INLINE void store_part(float* p, Floats v, std::int64_t n) {
  float lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, static_cast<std::size_t>(n) * sizeof(float));
}
static WB_SIMD_INLINE Floats splat(float x) { return x - Floats{}; }
// Lanes 0 .. n-1 keep v, the others become `other`.
static WB_SIMD_INLINE Floats keep_first(Floats v, std::int64_t n, float other) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < static_cast<std::int32_t>(n) ? v : splat(other);
}

static WB_SIMD_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Lane l holds lane l + shift of v; what wraps around is not used.
template <int shift>
static WB_SIMD_INLINE Floats down(Floats v) {
  return __builtin_shufflevector(v, v, shift, shift + 1, shift + 2, shift + 3, shift + 4, shift + 5, shift + 6, shift + 7, shift + 8, shift + 9, shift + 10,
                                 shift + 11, shift + 12, shift + 13, shift + 14, shift + 15);
}
// Fixed order: lane l with l + 8, then + 4, + 2, + 1.
static WB_SIMD_INLINE float sum(Floats v) {
  v += down<8>(v);
  v += down<4>(v);
  v += down<2>(v);
  return v[0] + v[1];
}
static WB_SIMD_INLINE float max(Floats v) {
  v = max(v, down<8>(v));
  v = max(v, down<4>(v));
  v = max(v, down<2>(v));
  return v[0] > v[1] ? v[0] : v[1];
}

// e^x to about 1 ulp for x <= 88, any value above; exactly 0 for x < -87.3 and for -Inf; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial (the coefficients of Cephes expf); 2^n by the exponent bits.
static WB_SIMD_INLINE Floats exp(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Floats low = splat(-87.3f);
  const Floats bounded = x < low ? low : x;
  const Floats shifted = bounded * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const Bits exponent = (reinterpret_cast<Bits>(shifted) - reinterpret_cast<Bits>(magic)) << 23;
  const Floats value = reinterpret_cast<Floats>(reinterpret_cast<Bits>(p) + exponent);
  return x < low ? Floats{} : value;
}

}  // namespace waybill::simd
