// SPDX-License-Identifier: Apache-2.0
// The inner loops over one row of logits. Three builds of the same source (baseline x86-64, AVX2 + FMA, AVX-512), picked by cpuid:
// every operation is exactly rounded and every sum runs over 16 fixed lanes, so all three give the same bits.
#pragma once

#include <cstdint>

#include "waybill/router.h"

namespace waybill::router_impl {

inline constexpr std::int64_t kLanes = 16;  // partial sums of a row; arrays of K values are padded to a multiple of it
inline constexpr std::int64_t kMaxSmallSort = 64;

// A row of scores before it is divided by its sum. Softmax: exp(x - largest). Sigmoid and sqrt-softplus: the score itself, or, where even
// the largest logit lies so low that scores underflow, what they tend to: exp(x - largest) and its square root. The quotient is the same
// and finite at any logits. `largest` is -Inf and `sum` 0 where no expert exists.
struct RowSum {
  float largest = 0, sum = 0;
};
inline constexpr float kTinyScores = -30.0f;  // sigmoid(x) = e^x to fp32 below this

struct RowKernels {
  const char* name;

  // 16-bit logits to fp32.
  void (*widen_bf16)(const std::uint16_t* in, std::int64_t n, float* out);
  void (*widen_f16)(const std::uint16_t* in, std::int64_t n, float* out);

  // keys[e] = order_key(score(x_e) + bias_e) for candidates, 0 for the rest. keep[e]: all ones, or 0 for masked experts.
  // Returns true where a logit is not finite.
  bool (*keys)(ScoreFunction score, const float* x, const float* bias, const std::uint32_t* keep, std::int64_t n, std::uint32_t* keys);
  bool (*has_nonfinite)(const float* x, std::int64_t n);

  // A lower bound of the k-th largest key, at least 1, from the maxima of num_buckets (a multiple of kLanes, >= k) interleaved
  // buckets; `buckets` is scratch of that many.
  std::uint32_t (*threshold)(const std::uint32_t* keys, std::int64_t n, std::int64_t k, std::int64_t num_buckets, std::uint32_t* buckets);
  // Composites (key << 32 | ~id) of the keys >= threshold in ascending id; returns how many. `out` holds n.
  std::int64_t (*collect)(const std::uint32_t* keys, std::int64_t n, std::uint32_t threshold, std::uint64_t* out);

  // The `count` <= kMaxSmallSort distinct values in descending order. values has room for kMaxSmallSort.
  void (*sort_small)(std::uint64_t* values, std::int64_t count, std::uint64_t* out);

  // u[e] proportional to the score of x_e, 0 where the expert does not exist; see RowSum.
  RowSum (*full_scores)(ScoreFunction score, const float* x, const std::uint32_t* keep, std::int64_t n, float* u);
  float (*log_sum_exp)(RowSum row);  // of the logits, for a softmax row
  void (*scale)(float* u, std::int64_t n, float factor);
  float (*dot)(const float* a, const float* b, std::int64_t n);

  // weights[k] of the chosen, K padded to a multiple of kLanes, times `scale`: normalised over the valid slots (renormalise), the softmax
  // over the row (`row` given), or the raw score. valid[k] is 1 or 0; the padding is 0.
  void (*selected_weights)(ScoreFunction score, bool renormalise, const RowSum* row, float scale, float epsilon, const float* x, const std::uint8_t* valid,
                           std::int64_t padded_k, float* scratch, float* weights);
  // slopes[k] = d log score / dx.
  void (*slopes)(ScoreFunction score, const float* x, std::int64_t n, float* slopes);

  // d[e] = p_e (a_e - mean) * scale * slope_e (p = null: 0) + z_e * softmax_scale (z = null: 0).
  void (*loss_gradient)(ScoreFunction score, const float* x, const float* p, const float* a, float mean, float scale, const float* softmax, float softmax_scale,
                        std::int64_t n, float* d);
};

const RowKernels& row_kernels();
// Every build this machine can run, for differential tests; null-terminated.
const RowKernels* const* all_row_kernels();

}  // namespace waybill::router_impl
