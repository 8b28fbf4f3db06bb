// SPDX-License-Identifier: Apache-2.0
// quantize() and quantize_both() (waybill/quantize.h) of rows that a list finds, so that no copy in that order need exist.
#pragma once

#include "waybill/quantize.h"

namespace waybill {

// Row s of the S = rows.shape[0] that are quantised is x's row rows[s] (int32 [S], contiguous, on x's device; -1 = a row of zeros). Otherwise as
// quantize(), whose results on a copy in that order these are, to the bit. A GPU does not check the values of rows.
WB_API void quantize_gathered(const QuantConfig& config, const TensorView& x, const TensorView& rows, const TensorView& offsets, const QuantizedView& out,
                              Stream stream = {}, StatusWord* status = nullptr);
WB_API void quantize_both_gathered(const QuantConfig& rows, const QuantConfig& columns, const TensorView& x, const TensorView& list, const TensorView& offsets,
                                   const QuantizedView& rows_out, const QuantizedView& columns_out, Stream stream = {}, StatusWord* status = nullptr);

}  // namespace waybill
