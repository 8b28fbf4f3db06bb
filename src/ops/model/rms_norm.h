// SPDX-License-Identifier: Apache-2.0
// RMSNorm over the last dimension: y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon). fp32.
#pragma once

#include "waybill/stream.h"

namespace waybill {

// x, y [rows, width] contiguous (y may be x), weight [width], rstd [rows] saved for backward (may be null).
WB_API void rms_norm_forward(const TensorView& x, const TensorView& weight, float epsilon, const TensorView& y, float* rstd, Stream stream = {});

// dx = rstd * (dy * weight - xhat * mean(dy * weight * xhat)) with xhat = x * rstd; written, or added when `accumulate`.
// d_weight [width] += sum over rows of dy * xhat, in chunks of 64 rows, chunks in order. dx may be dy.
WB_API void rms_norm_backward(const TensorView& x, const TensorView& weight, const float* rstd, const TensorView& dy, const TensorView& dx, bool accumulate,
                              const TensorView& d_weight, Stream stream = {});

namespace ref {
void rms_norm_forward(const TensorView& x, const TensorView& weight, float epsilon, const TensorView& y, float* rstd);
void rms_norm_backward(const TensorView& x, const TensorView& weight, const float* rstd, const TensorView& dy, const TensorView& dx, bool accumulate,
                       const TensorView& d_weight);
}  // namespace ref

}  // namespace waybill
