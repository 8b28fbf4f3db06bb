// SPDX-License-Identifier: Apache-2.0
#include "ops/model/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ops/model/simd.h"
#include "waybill/grouped_gemm.h"

namespace waybill {
namespace {

// Logits become scale * (softmax - onehot) when `gradient`; losses[r] is 0 and the row 0 where the target is -1.
WB_SIMD_INLINE void loss_rows_body(float* logits, const std::int32_t* targets, std::int64_t rows, std::int64_t vocab, float scale, bool gradient,
                                   double* losses) {
  using namespace simd;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const std::int64_t full = vocab / kLanes * kLanes, tail = vocab - full;
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = logits + r * vocab;
    losses[r] = 0;
    if (targets[r] < 0) {
      if (gradient) std::memset(row, 0, static_cast<std::size_t>(vocab) * sizeof(float));
      continue;
    }
    Floats best = splat(kLowest);
    for (std::int64_t j = 0; j < full; j += kLanes) best = max(best, load(row + j));
    if (tail > 0) best = max(best, keep_first(load_part(row + full, tail), tail, kLowest));
    const float top = max(best), target_logit = row[targets[r]];
    // Lanes are emptied into a double every 1,024 columns, so that the sum stays exact enough for any vocabulary.
    double total = 0;
    for (std::int64_t first = 0; first < full; first += 64 * kLanes) {
      Floats lanes{};
      for (std::int64_t j = first; j < full && j < first + 64 * kLanes; j += kLanes) {
        const Floats e = exp(load(row + j) - top);
        lanes += e;
        if (gradient) store(row + j, e);
      }
      total += static_cast<double>(sum(lanes));
    }
    if (tail > 0) {
      const Floats e = keep_first(exp(load_part(row + full, tail) - top), tail, 0.0f);
      total += static_cast<double>(sum(e));
      if (gradient) store_part(row + full, e, tail);
    }
    losses[r] = std::log(total) + (static_cast<double>(top) - static_cast<double>(target_logit));
    if (!gradient) continue;
    const float factor = static_cast<float>(static_cast<double>(scale) / total);
    for (std::int64_t j = 0; j < full; j += kLanes) store(row + j, load(row + j) * factor);
    for (std::int64_t j = full; j < vocab; ++j) row[j] *= factor;
    row[targets[r]] -= scale;
  }
}
WB_SIMD_KERNEL(loss_rows, (float* logits, const std::int32_t* targets, std::int64_t rows, std::int64_t vocab, float scale, bool gradient, double* losses),
               (logits, targets, rows, vocab, scale, gradient, losses))

CrossEntropySum run(const TensorView& x, const TensorView& head, const std::int32_t* targets, float scale, const TensorView& dx, const TensorView& d_head,
                    Stream stream) {
  WB_CHECK(x.rank == 2 && head.rank == 2 && x.shape[1] == head.shape[1] && head.is_contiguous(), "cross_entropy: x {} does not fit head {}", x.describe(),
           head.describe());
  const std::int64_t T = x.shape[0], vocab = head.shape[0], chunk = cross_entropy_chunk_rows(vocab);
  for (std::int64_t t = 0; t < T; ++t)
    WB_CHECK(targets[t] >= -1 && targets[t] < vocab, "cross_entropy: target {} at row {} is outside [-1, {})", targets[t], t, vocab);
  const bool gradient = static_cast<bool>(dx);
  CrossEntropySum result;
  Tensor logits(DType::kF32, {std::min(T, chunk), vocab});
  std::vector<double> losses(static_cast<std::size_t>(std::min(T, chunk)));
  for (std::int64_t first = 0; first < T; first += chunk) {
    const std::int64_t rows = std::min(chunk, T - first);
    const TensorView x_rows = x.rows(first, first + rows), l = logits.view().rows(0, rows);
    gemm({.a = x_rows, .b = head, .c = l, .transpose_b = true}, stream);
    parallel_for(stream.pool, rows, 16, [&](std::int64_t begin, std::int64_t end) {
      loss_rows(l.as<float>() + begin * vocab, targets + first + begin, end - begin, vocab, scale, gradient, losses.data() + begin);
    });
    for (std::int64_t r = 0; r < rows; ++r) {
      result.loss += losses[static_cast<std::size_t>(r)];
      result.count += targets[first + r] >= 0 ? 1 : 0;
    }
    if (!gradient) continue;
    gemm({.a = l, .b = head, .c = dx.rows(first, first + rows)}, stream);
    gemm({.a = l, .b = x_rows, .c = d_head, .transpose_a = true, .accumulate = true}, stream);
  }
  return result;
}

}  // namespace

CrossEntropySum cross_entropy_forward(const TensorView& x, const TensorView& head, const std::int32_t* targets, Stream stream) {
  return run(x, head, targets, 0.0f, {}, {}, stream);
}

CrossEntropySum cross_entropy_forward_backward(const TensorView& x, const TensorView& head, const std::int32_t* targets, float scale, const TensorView& dx,
                                               const TensorView& d_head, Stream stream) {
  WB_CHECK(dx.rank == 2 && dx.shape == x.shape && d_head.rank == 2 && d_head.shape == head.shape, "cross_entropy: dx {} and d_head {} do not fit x {}, head {}",
           dx.describe(), d_head.describe(), x.describe(), head.describe());
  return run(x, head, targets, scale, dx, d_head, stream);
}

}  // namespace waybill
