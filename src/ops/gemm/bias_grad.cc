// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/bias_grad.h"

#include <algorithm>

namespace waybill::detail {
namespace {

constexpr std::int64_t kColumns = 256;  // columns summed at a time, in a buffer on the stack

template <class Element>
void sum_columns(const Element* dy, std::int64_t N, const std::int32_t* a_rows, std::int64_t begin, std::int64_t end, std::int64_t width, float* sum) {
  std::fill(sum, sum + width, 0.0f);
  for (std::int64_t s = begin; s < end; ++s) {
    if (a_rows != nullptr && a_rows[s] < 0) continue;
    const Element* row = dy + s * N;
    for (std::int64_t n = 0; n < width; ++n) sum[n] += static_cast<float>(row[n]);
  }
}

}  // namespace

void bias_grad(const GroupedGemmWgradArgs& args, ThreadPool* pool) {
  const std::int64_t L = args.d_bias.shape[0], N = args.d_bias.shape[1];
  const std::int32_t* offsets = args.offsets.as<std::int32_t>();
  const std::int32_t* a_rows = args.a_rows ? args.a_rows.as<std::int32_t>() : nullptr;
  float* d_bias = args.d_bias.as<float>();
  const std::int64_t chunks = (N + kColumns - 1) / kColumns;
  parallel_for(pool, L * chunks, 8, [&](std::int64_t first, std::int64_t last) {
    float sum[kColumns];
    for (std::int64_t task = first; task < last; ++task) {
      const std::int64_t g = task / chunks, n = task % chunks * kColumns, width = std::min(kColumns, N - n);
      if (offsets[g] == offsets[g + 1] && args.accumulate) continue;
      if (args.dy.dtype == DType::kF32) {
        sum_columns(static_cast<const float*>(args.dy.data) + n, N, a_rows, offsets[g], offsets[g + 1], width, sum);
      } else {
        sum_columns(static_cast<const bf16*>(args.dy.data) + n, N, a_rows, offsets[g], offsets[g + 1], width, sum);
      }
      float* out = d_bias + g * N + n;
      for (std::int64_t i = 0; i < width; ++i) out[i] = args.accumulate ? out[i] + sum[i] : sum[i];
    }
  });
}

}  // namespace waybill::detail
