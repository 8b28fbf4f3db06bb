// SPDX-License-Identifier: Apache-2.0
// The softmax parts of attention on a block of score rows. Rows are `stride` floats apart, stride a multiple of 16; row i sees the
// first first_limit + i keys; entries up to `width` (a multiple of 16, <= stride) are written, those past the limit with 0.
#pragma once

#include <cstdint>

namespace waybill::attention {

// scores -> probabilities; lse[i] = log sum exp(scale * score).
void softmax_rows(float* scores, std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t first_limit, float scale, float* lse);

// scores -> probabilities exp(scale * score - lse); d_probs -> scale * p * (dp - delta), the gradient of the raw scores.
void softmax_backward_rows(float* scores, float* d_probs, std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t first_limit, float scale,
                           const float* lse, const float* delta);

// delta[i] = sum_d a[i, d] * b[i, d]; rows of a and b are row_stride apart.
void dot_rows(const float* a, const float* b, std::int64_t row_stride, std::int64_t rows, std::int64_t D, float* delta);

}  // namespace waybill::attention
