// SPDX-License-Identifier: Apache-2.0
// Scalar access to fp32 and bf16 tensors, for references and slow paths. Indices count elements and are 64-bit.
#pragma once

#include "waybill/tensor.h"

namespace waybill::detail {

inline float load_element(const TensorView& view, std::int64_t index) {
  return view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[index] : static_cast<float>(static_cast<const bf16*>(view.data)[index]);
}

inline void store_element(const TensorView& view, std::int64_t index, float value) {
  if (view.dtype == DType::kF32) {
    static_cast<float*>(view.data)[index] = value;
  } else {
    static_cast<bf16*>(view.data)[index] = bf16(value);
  }
}

}  // namespace waybill::detail
