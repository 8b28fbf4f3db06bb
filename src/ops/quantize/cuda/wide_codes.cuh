// SPDX-License-Identifier: Apache-2.0
// core/cuda/wide_codes.cuh for formats by their names.
#pragma once

#include "core/cuda/wide_codes.cuh"
#include "ops/quantize/cuda/codec.cuh"

namespace waybill::cuda {

template <ElementFormat kFormat>
__device__ __forceinline__ std::uint32_t widen_pair(std::uint32_t codes) {
  static_assert(kFormat != ElementFormat::kE2M1);
  return widen_pair<Element<kFormat>::kFraction>(codes);
}

// Whether one of four codes is NaN or (E5M2) infinite.
template <ElementFormat kFormat>
__device__ __forceinline__ bool has_special(std::uint32_t four) {
  static_assert(kFormat != ElementFormat::kE2M1);
  return special_bits<Element<kFormat>::kFraction>(four) != 0;
}

}  // namespace waybill::cuda
