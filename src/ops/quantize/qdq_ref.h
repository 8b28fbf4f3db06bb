// SPDX-License-Identifier: Apache-2.0
// The definitions behind quantize_dequantize(), hadamard_rows() and round_to_bf16(). Arguments are checked by the caller.
#pragma once

#include "waybill/quantize.h"

namespace waybill {

WB_API void quantize_dequantize_ref(const QuantConfig& config, const QuantizeDequantizeArgs& args);
WB_API void hadamard_rows_ref(const TensorView& x, const TensorView& rows, const TensorView& offsets, std::uint16_t signs, const TensorView& y);
WB_API void round_to_bf16_ref(const TensorView& x, const TensorView& y);

}  // namespace waybill
