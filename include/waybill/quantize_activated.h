// SPDX-License-Identifier: Apache-2.0
// quantize() and quantize_both() (waybill/quantize.h) of an expert activation's result, or of its gradient, from the pre-activations: neither is written.
#pragma once

#include "waybill/activation.h"
#include "waybill/quantize.h"

namespace waybill {

// What is quantised: a = weight * act(h) [S, F], or, where da is given, the gradient dh [S, 2F or F] of h. The values are those that activation_forward()
// and activation_backward() would store in a tensor of h's type, so bf16 ones are rounded once before they are quantised.
struct ActivatedRows {
  ActivationConfig activation;
  TensorView h;              // [S, 2F or F] fp32 or bf16
  TensorView weight;         // [S] fp32, or null (= 1)
  TensorView da = {};        // [S, F] of h's type: quantise dh
  TensorView d_weight = {};  // [S] fp32, written where it is given (beside da), as by activation_backward()
  // GPU. partial_sums: with d_weight, fp32 [S, ceil(F / 64)]. wide: where the fused kernels refuse the call, room for the values in h's type, [S, F] or
  // [S, 2F or F]; activation and quantiser then run one after the other. May be null: such a call is an error that says why.
  TensorView partial_sums = {}, wide = {};
};

// To the bit activation_forward() or activation_backward() into a tensor of h's type, then quantize(): rows past offsets[L] are neither read nor written.
// CPU: finished on return. GPU: as quantize(); implementations cuda (bf16 with rows aligned to 16 bytes and F a multiple of 8; 8-bit elements in blocks of
// 1 x 32 and 32 x 1 (powers of two), 1 x 128 and 128 x 1, NVFP4 in 1 x 16; a gated gradient with blocks along the row: F a multiple of the block) and
// cuda_unfused (needs `wide`).
WB_API void quantize_activated(const QuantConfig& config, const ActivatedRows& x, const TensorView& offsets, const QuantizedView& out, Stream stream = {},
                               StatusWord* status = nullptr);
// Both directions from one read of h.
WB_API void quantize_both_activated(const QuantConfig& rows, const QuantConfig& columns, const ActivatedRows& x, const TensorView& offsets,
                                    const QuantizedView& rows_out, const QuantizedView& columns_out, Stream stream = {}, StatusWord* status = nullptr);

}  // namespace waybill
