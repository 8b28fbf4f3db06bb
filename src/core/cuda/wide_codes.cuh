// SPDX-License-Identifier: Apache-2.0
// Codes of MX formats and NVFP4 to bf16 two and four at a time, without a conversion of each: to the bit what decoding, the products in fp32 and a rounding
// give. kFraction names an 8-bit format by the bits of its fraction: 3 = E4M3, 2 = E5M2.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/cuda/ptx.cuh"
#include "waybill/dtype.h"

namespace waybill::cuda {

// bf16 as the host rounds: a NaN keeps its upper bits and becomes quiet.
__device__ __forceinline__ std::uint16_t bf16_bits(float value) { return bf16::from_float(value); }

// a / b rounded correctly, from y = 1 / b rounded correctly: each step corrects the quotient by its exact remainder (Markstein 1990). The
// magnitude of b is within 2^-80 and 2^120 and a is finite; a quotient that rounds to no element may be less exact.
__device__ __forceinline__ float divide(float a, float b, float y) {
  float q = __fmul_rn(a, y);
  q = fmaf(fmaf(-b, q, a), y, q);
  q = fmaf(fmaf(-b, q, a), y, q);
  return copysignf(q, a);  // also of a zero
}

// Of a group's scale; 0 where it is out of divide()'s range.
__device__ __forceinline__ float group_reciprocal(float group) { return group >= 0x1p-80f && group <= 0x1p100f ? __frcp_rn(group) : 0.0f; }

// E2M1: the code's bits at a float's exponent and first fraction bit are the value times 2^-126.
__device__ __forceinline__ float decode_e2m1(std::uint32_t code) { return __uint_as_float((code & 7u) << 22 | (code & 8u) << 28) * 0x1p126f; }

// E4M3, likewise; its one NaN has all bits set but the sign.
__device__ __forceinline__ float decode_e4m3(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  return magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : __uint_as_float(magnitude << 20 | (code & 0x80u) << 24) * 0x1p120f;
}

__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const std::uint32_t&>(product);
}
__device__ __forceinline__ std::uint32_t both(std::uint32_t half) { return half | half << 16; }

// A byte scale as bf16.
__device__ __forceinline__ std::uint32_t e8m0_half(std::uint32_t byte) { return byte == 0 ? 0x40u : (byte == 255 ? 0x7fffu : byte << 7); }

// Two 8-bit codes in bits 15..8 and 31..24, the rest 0. A code's bits behind bf16's sign are the value times a power of two, subnormals
// included. No NaN and no infinity among the codes: special_bits().
template <int kFraction>
__device__ __forceinline__ std::uint32_t shift_pair(std::uint32_t codes) {
  static_assert(kFraction == 2 || kFraction == 3);
  return (codes & 0x80008000u) | (codes >> (kFraction + 1) & (kFraction == 3 ? 0x07f007f0u : 0x0fe00fe0u));
}
template <int kFraction>
inline constexpr int kWidenPower = kFraction == 3 ? 120 : 112;  // shift_pair() times 2^kWidenPower is the value
template <int kFraction>
__device__ __forceinline__ std::uint32_t widen_pair(std::uint32_t codes) {
  return multiply_pairs(shift_pair<kFraction>(codes), both(static_cast<std::uint32_t>(127 + kWidenPower<kFraction>) << 7));
}
// Of four codes: pairs of them where widen_pair() wants them.
__device__ __forceinline__ std::uint32_t spread_low(std::uint32_t four) { return ptx::permute_bytes(four, 0, 0x1404); }
__device__ __forceinline__ std::uint32_t spread_high(std::uint32_t four) { return ptx::permute_bytes(four, 0, 0x3424); }

// The highest bit of each of four codes that is NaN or (E5M2) infinite.
template <int kFraction>
__device__ __forceinline__ std::uint32_t special_bits(std::uint32_t four) {
  return ((four & 0x7f7f7f7fu) + (kFraction == 3 ? 0x01010101u : 0x04040404u)) & 0x80808080u;
}
// Whether one of four byte scales is no normal bf16 (0, 255).
__device__ __forceinline__ bool has_odd_scale(std::uint32_t four) {
  return ((((four - 0x01010101u) & ~four) | ((~four - 0x01010101u) & four)) & 0x80808080u) != 0;
}

// The 16 values of a block of E2M1 under one scale and the group's, as bf16; a code picks one by byte permutations.
struct E2m1Values {
  std::uint32_t low[2], high[2];  // bytes of the values of codes 0 to 7
  std::uint32_t signs;            // turned by a code's; a NaN has none

  // magnitude times scale / group, in that order, each rounded to fp32; then to bf16.
  __device__ __forceinline__ static E2m1Values of(float scale, float group, float reciprocal) {
    std::uint32_t t[4];
    E2m1Values v;
    v.signs = 0x80808080u;
    const float one = reciprocal != 0 ? divide(scale, group, reciprocal) : __fdiv_rn(scale, group);
    if (__float_as_uint(one) == 0 || (one >= 0x1p-100f && one <= 0x1p100f)) {  // powers of two of it are exact, in bf16, too
      const float more = __fmul_rn(1.5f, scale);
      const __nv_bfloat162 pair = __floats2bfloat162_rn(one, reciprocal != 0 ? divide(more, group, reciprocal) : __fdiv_rn(more, group));
      t[1] = reinterpret_cast<const std::uint32_t&>(pair);
      t[0] = multiply_pairs(t[1], 0x3f003f00u) << 16, t[2] = multiply_pairs(t[1], 0x40004000u), t[3] = multiply_pairs(t[1], 0x40804080u);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto value = [&](std::uint32_t code) { return static_cast<std::uint32_t>(bf16_bits(__fdiv_rn(__fmul_rn(decode_e2m1(code), scale), group))); };
        t[i] = value(static_cast<std::uint32_t>(2 * i)) | value(static_cast<std::uint32_t>(2 * i + 1)) << 16;
      }
      if (one != one) v.signs = 0;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v.low[i] = ptx::permute_bytes(t[2 * i], t[2 * i + 1], 0x6420), v.high[i] = ptx::permute_bytes(t[2 * i], t[2 * i + 1], 0x7531);
    }
    return v;
  }
  // Codes in the low 16 bits, the first lowest.
  __device__ __forceinline__ uint2 four(std::uint32_t codes) const {
    const std::uint32_t index = codes & 0x7777u, negative = ptx::permute_bytes(0x80u, 0, codes & 0x8888u);  // bytes 0x80, 0xff under a sign
    const std::uint32_t l = ptx::permute_bytes(low[0], low[1], index), h = ptx::permute_bytes(high[0], high[1], index) ^ (negative << 7 & signs);
    return make_uint2(ptx::permute_bytes(l, h, 0x5140), ptx::permute_bytes(l, h, 0x7362));
  }
};

}  // namespace waybill::cuda
