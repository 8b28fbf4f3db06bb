// SPDX-License-Identifier: Apache-2.0
// The router's gate matmul: logits = x W^T, and its backward. Logits and gradients are fp32, whatever the operands' type.
//
//   x [T, H], weight [E, H]: both bf16 or both fp32. logits, d_logits [T, E], d_x [T, H], d_weight [E, H]: fp32. All contiguous, all on
//   one device. Sums in fp32 (host: double), in an order that depends on the shapes only; bf16 operands meet fp32 gradients without
//   rounding them to bf16 (CUDA: two bf16 terms, 16 bits of mantissa). T = 0 is legal.
//   CUDA: queued on stream.native; the first call of a shape makes plans, call it once before capturing. cuBLASLt is loaded then.
// Throws kInvalidArgument naming rule and values; kUnsupported for device memory without the CUDA kernels or cuBLASLt.
#pragma once

#include "waybill/stream.h"
#include "waybill/tensor.h"

namespace waybill {

WB_API void gate_forward(const TensorView& x, const TensorView& weight, const TensorView& logits, Stream stream = {});

// d_x and d_weight are written where given (a null view: not wanted); d_weight is added to when `accumulate`.
WB_API void gate_backward(const TensorView& x, const TensorView& weight, const TensorView& d_logits, const TensorView& d_x, const TensorView& d_weight,
                          bool accumulate, Stream stream = {});

}  // namespace waybill
