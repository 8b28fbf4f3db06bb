// SPDX-License-Identifier: Apache-2.0
#include "ops/model/attention_rows.h"

#include <cmath>
#include <limits>

#include "ops/model/simd.h"

namespace waybill::attention {
namespace {

WB_SIMD_INLINE void softmax_rows_body(float* scores, std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t first_limit, float scale,
                                      float* lse) {
  using namespace simd;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < rows; ++i) {
    float* row = scores + i * stride;
    const std::int64_t limit = first_limit + i, full = limit / kLanes * kLanes, tail = limit - full;
    Floats best = splat(kLowest);
    for (std::int64_t j = 0; j < full; j += kLanes) best = max(best, load(row + j));
    if (tail > 0) best = max(best, keep_first(load(row + full), tail, kLowest));
    const float top = max(best) * scale;
    Floats total{};
    for (std::int64_t j = 0; j < full; j += kLanes) {
      const Floats p = exp(load(row + j) * scale - top);
      total += p;
      store(row + j, p);
    }
    std::int64_t end = full;
    if (tail > 0) {
      const Floats p = keep_first(exp(load(row + full) * scale - top), tail, 0.0f);
      total += p;
      store(row + full, p);
      end += kLanes;
    }
    const float denominator = sum(total), inverse = 1.0f / denominator;
    for (std::int64_t j = 0; j < end; j += kLanes) store(row + j, load(row + j) * inverse);
    for (std::int64_t j = end; j < width; j += kLanes) store(row + j, Floats{});
    if (lse != nullptr) lse[i] = top + std::log(denominator);
  }
}

WB_SIMD_INLINE void softmax_backward_rows_body(float* scores, float* d_probs, std::int64_t stride, std::int64_t rows, std::int64_t width,
                                               std::int64_t first_limit, float scale, const float* lse, const float* delta) {
  using namespace simd;
  for (std::int64_t i = 0; i < rows; ++i) {
    float *s = scores + i * stride, *d = d_probs + i * stride;
    const std::int64_t limit = first_limit + i, full = limit / kLanes * kLanes, tail = limit - full;
    const float log_sum = lse[i], mean = delta[i];
    for (std::int64_t j = 0; j < full; j += kLanes) {
      const Floats p = exp(load(s + j) * scale - log_sum);
      store(d + j, p * (load(d + j) - mean) * scale);
      store(s + j, p);
    }
    std::int64_t end = full;
    if (tail > 0) {
      const Floats p = keep_first(exp(load(s + full) * scale - log_sum), tail, 0.0f);
      store(d + full, keep_first(p * (load(d + full) - mean) * scale, tail, 0.0f));
      store(s + full, p);
      end += kLanes;
    }
    for (std::int64_t j = end; j < width; j += kLanes) {
      store(s + j, Floats{});
      store(d + j, Floats{});
    }
  }
}

WB_SIMD_INLINE void dot_rows_body(const float* a, const float* b, std::int64_t row_stride, std::int64_t rows, std::int64_t D, float* delta) {
  using namespace simd;
  const std::int64_t full = D / kLanes * kLanes, tail = D - full;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float *x = a + i * row_stride, *y = b + i * row_stride;
    Floats total{};
    for (std::int64_t j = 0; j < full; j += kLanes) total += load(x + j) * load(y + j);
    if (tail > 0) total += load_part(x + full, tail) * load_part(y + full, tail);
    delta[i] = sum(total);
  }
}

}  // namespace

WB_SIMD_KERNEL(softmax_rows, (float* scores, std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t first_limit, float scale, float* lse),
               (scores, stride, rows, width, first_limit, scale, lse))
WB_SIMD_KERNEL(softmax_backward_rows,
               (float* scores, float* d_probs, std::int64_t stride, std::int64_t rows, std::int64_t width, std::int64_t first_limit, float scale,
                const float* lse, const float* delta),
               (scores, d_probs, stride, rows, width, first_limit, scale, lse, delta))
WB_SIMD_KERNEL(dot_rows, (const float* a, const float* b, std::int64_t row_stride, std::int64_t rows, std::int64_t D, float* delta),
               (a, b, row_stride, rows, D, delta))

}  // namespace waybill::attention
