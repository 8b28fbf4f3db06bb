// SPDX-License-Identifier: Apache-2.0
// What the kernels of qdq.h share: E2M1 codes of a block's values, and random numbers.
#pragma once

#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/qdq.h"
#include "waybill/random.h"

namespace waybill::cuda {

// encode_one_stochastic() of E2M1, in fp32: the part of a step behind the point is exact there.
__device__ __forceinline__ std::uint32_t encode_e2m1_stochastic(float value, std::uint32_t random) {
  const std::uint32_t bits = __float_as_uint(value), magnitude = bits & kMagnitudeBits;
  if (magnitude >= 0x40c00000u) return encode_e2m1(value);  // 6 and more, NaN
  const std::uint32_t exponent = magnitude < 0x3f800000u ? 0u : (magnitude >> 23) - 127u;
  const float steps = __fmul_rn(__uint_as_float(magnitude), __uint_as_float((128u - exponent) << 23)), below = truncf(steps);
  const std::uint32_t limit = __float2uint_ru(__fmul_rn(steps - below, 0x1p32f));
  return (bits >> 28 & 8u) | min(2 * exponent + static_cast<std::uint32_t>(below) + (random < limit ? 1u : 0u), 7u);
}

// Random numbers of a group: random_u64(key, counter) with the key's part done once.
struct GroupRandom {
  static constexpr std::uint64_t kStep = 0xd1342543de82ef95ull;
  std::uint64_t mixed_key;
  __device__ __forceinline__ static GroupRandom of(const QdqCall& p, std::uint64_t draws, int group) {
    return {mix64(random_u64(draws, static_cast<std::uint64_t>(p.first_id + group * p.id_stride)))};
  }
  // place: counter * kStep + 1
  __device__ __forceinline__ std::uint32_t upper_half(std::uint64_t place) const { return static_cast<std::uint32_t>(mix64(mixed_key ^ mix64(place)) >> 32); }
};

__device__ __forceinline__ std::uint64_t seed_of(const QdqCall& p) { return p.seed.pointer != nullptr ? *p.seed.pointer : p.seed.value; }

// A value under its block's scale and the group's, as code of E2M1; kStochastic: with a random number.
template <bool kStochastic>
__device__ __forceinline__ std::uint32_t encode_in_block(float value, const BlockScale& scale, std::uint32_t random) {
  const float element = scale.reciprocal != 0 ? divide(__fmul_rn(value, scale.factor), scale.divisor, scale.reciprocal) : to_element<true>(value, scale);
  if constexpr (kStochastic) return encode_e2m1_stochastic(element, random);
  return encode_e2m1(element);
}

}  // namespace waybill::cuda
