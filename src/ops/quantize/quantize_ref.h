// SPDX-License-Identifier: Apache-2.0
// The plain block loops behind quantize() and dequantize(). Arguments are checked by the caller.
#pragma once

#include "waybill/quantize.h"

namespace waybill {

WB_API void quantize_ref(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, ThreadPool* pool);
WB_API void dequantize_ref(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, ThreadPool* pool);

}  // namespace waybill
