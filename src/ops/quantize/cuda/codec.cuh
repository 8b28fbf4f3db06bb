// SPDX-License-Identifier: Apache-2.0
// Conversions of values and scales on the device, to the bit those of ops/quantize/codec.cc. Magnitudes are compared as integers: the bits of
// a NaN are larger than infinity's, those larger than any number's. Below sm_89, which has no instructions for it, CUDA's functions convert 8 bits.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "core/cuda/wide_codes.cuh"
#include "waybill/quantize_format.h"
#include "waybill/random.h"

namespace waybill::cuda {

template <ElementFormat kFormat>
struct Element {
  static constexpr int kFraction = kFormat == ElementFormat::kE4M3 ? 3 : kFormat == ElementFormat::kE5M2 ? 2 : 1;
  static constexpr int kBias = kFormat == ElementFormat::kE4M3 ? 7 : kFormat == ElementFormat::kE5M2 ? 15 : 1;
  static constexpr float kLargest = kFormat == ElementFormat::kE4M3 ? 448.0f : kFormat == ElementFormat::kE5M2 ? 57344.0f : 6.0f;
  static constexpr int kLargestExponent = kFormat == ElementFormat::kE4M3 ? 8 : kFormat == ElementFormat::kE5M2 ? 15 : 2;
  static constexpr std::uint32_t kLargestFraction = kFormat == ElementFormat::kE2M1 ? 0x400000u : 0x600000u;  // 1.5 or 1.75, its bits behind the point
  static constexpr bool kHasNaN = kFormat != ElementFormat::kE2M1;
};

inline constexpr std::uint32_t kMagnitudeBits = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNaNBits = 0x7fc00000u, kLargestFloatBits = 0x7f7fffffu;

// Two values to two codes, the first in the low byte.
template <ElementFormat kFormat>
__device__ __forceinline__ std::uint32_t encode_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kFormat == ElementFormat::kE4M3 ? __NV_E4M3 : __NV_E5M2);
#else
  std::uint16_t codes;
  if constexpr (kFormat == ElementFormat::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  }
  return codes;
#endif
}

// Four bits. For the magnitude a with exponent e, not below that of the subnormals, c = 1.5 * 2^(e + 22) has the unit 2^(e - 1): the step of
// the elements there. a + c then holds the rounded number of steps in its lowest bits.
__device__ __forceinline__ std::uint32_t encode_e2m1(float value) {
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & kMagnitudeBits;
  const std::uint32_t saturated = min(magnitude, 0x40c00000u), field = max(saturated & kInfinityBits, 0x3f800000u);
  const std::uint32_t c = (field + (22u << 23)) | 0x400000u;
  const std::uint32_t steps = __float_as_uint(__fadd_rn(__uint_as_float(saturated), __uint_as_float(c))) - c;
  const std::uint32_t sign = magnitude > kInfinityBits ? 0u : bits >> 28 & 8u;
  return sign | ((field >> 22) - 254u + steps);
}

template <ElementFormat kFormat>
__device__ __forceinline__ std::uint32_t encode_one(float value) {
  if constexpr (kFormat == ElementFormat::kE2M1) return encode_e2m1(value);
  return encode_pair<kFormat>(value, 0.0f) & 0xffu;
}

template <ElementFormat kFormat>
__device__ inline std::uint32_t encode_one_stochastic(float value, std::uint32_t random) {
  using E = Element<kFormat>;
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & kMagnitudeBits;
  if (magnitude > kInfinityBits || __uint_as_float(magnitude) >= E::kLargest) return encode_one<kFormat>(value);
  const int exponent = max(static_cast<int>(magnitude >> 23) - 127, 1 - E::kBias);
  const double steps = static_cast<double>(__uint_as_float(magnitude)) * __longlong_as_double(static_cast<long long>(E::kFraction - exponent + 1023) << 52);
  const int below = static_cast<int>(steps);
  const int up = static_cast<double>(random) < (steps - below) * 0x1p32 ? 1 : 0;
  constexpr int kSign = E::kHasNaN ? 0x80 : 0x8, kTop = kFormat == ElementFormat::kE4M3 ? 0x7e : kFormat == ElementFormat::kE5M2 ? 0x7b : 0x7;
  return static_cast<std::uint32_t>(((bits >> 31) != 0 ? kSign : 0) | min(((exponent + E::kBias - 1) << E::kFraction) + below + up, kTop));
}

// Exact in fp32.
template <ElementFormat kFormat>
__device__ __forceinline__ float decode_one(std::uint32_t code) {
  if constexpr (kFormat == ElementFormat::kE2M1) {
    return decode_e2m1(code);
  } else {
    std::uint32_t pair;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    pair = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), kFormat == ElementFormat::kE4M3 ? __NV_E4M3 : __NV_E5M2).x;
#else
    if constexpr (kFormat == ElementFormat::kE5M2) {
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(code)));
    } else {
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(code)));
    }
#endif
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(pair)));
    return value;
  }
}

__device__ __forceinline__ float decode_e8m0_bits(std::uint32_t byte) { return __uint_as_float(byte == 255 ? kNaNBits : (byte == 0 ? 0x400000u : byte << 23)); }

// encode_e8m0() of the magnitude with these bits.
template <ElementFormat kFormat>
__device__ __forceinline__ std::uint32_t e8m0_of(std::uint32_t amax, ScaleRule rule) {
  using E = Element<kFormat>;
  if (amax >= kInfinityBits) return amax == kInfinityBits ? 254u : 255u;
  const int up = rule == ScaleRule::kRoundUp && (amax & 0x7fffffu) > E::kLargestFraction ? 1 : 0;
  return static_cast<std::uint32_t>(max(static_cast<int>(amax >> 23) - E::kLargestExponent + up, 0));
}

// A block's scale: what is stored (a byte, or the bits of a float) and how values come into the range of the elements.
struct BlockScale {
  std::uint32_t stored;
  float factor;             // powers of two: values are multiplied by it. kE4M3: by the group's scale
  float divisor;            // kF32, kE4M3: and divided by it. NaN spoils the block; 0 (kE4M3) makes it zeros
  float reciprocal = 0.0f;  // of the divisor where divide() may be used, else 0
};

__device__ __forceinline__ float reciprocal_of(float divisor, std::uint32_t amax) {
  return amax < kInfinityBits && divisor >= 0x1p-80f && divisor <= 0x1p120f ? __frcp_rn(divisor) : 0.0f;
}

template <ElementFormat kFormat>
__device__ __forceinline__ BlockScale block_scale(std::uint32_t amax, ScaleFormat format, ScaleRule rule, float group) {
  const float finite = __uint_as_float(min(amax, kLargestFloatBits));
  const bool is_nan = amax > kInfinityBits;
  if (format == ScaleFormat::kE8M0 || format == ScaleFormat::kPowerOfTwo) {
    const std::uint32_t byte = e8m0_of<kFormat>(amax, rule);
    const float factor = __uint_as_float(byte == 255 ? kNaNBits : (byte == 254 ? 0x400000u : (254u - byte) << 23));
    return {format == ScaleFormat::kE8M0 ? byte : __float_as_uint(decode_e8m0_bits(byte)), factor, 1.0f};
  }
  if (format == ScaleFormat::kF32) {
    const float scale = amax == 0 ? 1.0f : (is_nan ? __uint_as_float(kNaNBits) : fmaxf(__fdiv_rn(finite, Element<kFormat>::kLargest), 0x1p-126f));
    return {__float_as_uint(scale), 1.0f, scale, reciprocal_of(scale, amax)};
  }
  const float wanted = is_nan ? __uint_as_float(kNaNBits) : __fmul_rn(__fdiv_rn(finite, Element<kFormat>::kLargest), group);
  const std::uint32_t byte = encode_one<ElementFormat::kE4M3>(wanted);
  const float scale = decode_one<ElementFormat::kE4M3>(byte);
  return {byte, group, scale, reciprocal_of(scale, amax)};
}

// The value that is rounded to an element. kDivides: kF32 and kE4M3 scales.
template <bool kDivides>
__device__ __forceinline__ float to_element(float value, const BlockScale& scale) {
  const float scaled = __fmul_rn(value, scale.factor);
  if constexpr (!kDivides) return scaled;
  if (scale.divisor != scale.divisor) return scale.divisor;
  return scale.divisor == 0 ? 0.0f : __fdiv_rn(scaled, scale.divisor);
}

__device__ __forceinline__ float value_of(ElementFormat format, std::uint32_t code) {
  if (format == ElementFormat::kE4M3) return decode_one<ElementFormat::kE4M3>(code);
  return format == ElementFormat::kE5M2 ? decode_one<ElementFormat::kE5M2>(code) : decode_one<ElementFormat::kE2M1>(code);
}

// Byte of a scale in the swizzled tiles of a group that starts at tile `first_tile_row` (tiles of 128 rows, 4 columns; `tile_columns` a row).
__device__ __forceinline__ std::int64_t swizzled_index(std::int64_t first_tile_row, int tile_columns, std::int64_t row, int column) {
  return ((first_tile_row + row / 128) * tile_columns + column / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

}  // namespace waybill::cuda
