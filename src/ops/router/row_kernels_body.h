// SPDX-License-Identifier: Apache-2.0
// The source of every build of the row kernels: always-inline functions that row_kernels.cc wraps once per instruction set. Loops
// are plain and branch-free so that the compiler vectorises them; sums go to kLanes fixed lanes by index, in blocks, so that their
// order does not depend on the vector width.
#pragma once

#include <cstring>

#include "core/scalar_math.h"
#include "ops/router/row_kernels.h"

#define WB_BODY inline __attribute__((always_inline))

namespace waybill::router_impl::body {

inline constexpr float kMinusInfinity = -__builtin_inff();

WB_BODY void widen_bf16(const std::uint16_t* in, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = scalar::from_bits(static_cast<std::uint32_t>(in[i]) << 16);
}

// Exact: scaling by 2^112 turns the half's exponent into the float's, subnormals included; Inf and NaN get the full exponent.
WB_BODY void widen_f16(const std::uint16_t* in, std::int64_t n, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t h = in[i];
    const float magnitude = scalar::mul(scalar::from_bits((h & 0x7fffu) << 13), 5.192296858534828e33f);
    const std::uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    out[i] = scalar::from_bits(scalar::bits_of(magnitude) | special | ((h & 0x8000u) << 16));
  }
}

template <ScoreFunction kScore>
WB_BODY float score_of(float x) {
  if constexpr (kScore == ScoreFunction::kSigmoid) return scalar::sigmoid(x);
  if constexpr (kScore == ScoreFunction::kSqrtSoftplus) return scalar::sqrt_softplus(x);
  return x;
}
// Proportional to the score; kIsTiny where largest < kTinyScores.
template <ScoreFunction kScore, bool kIsTiny>
WB_BODY float unnormalised(float x, float largest) {
  if constexpr (kScore == ScoreFunction::kSigmoid && !kIsTiny) return scalar::sigmoid(x);
  if constexpr (kScore == ScoreFunction::kSqrtSoftplus && !kIsTiny) return scalar::sqrt_softplus(x);
  if constexpr (kScore == ScoreFunction::kSqrtSoftplus) return scalar::exp(0.5f * (x - largest));
  return scalar::exp(x - largest);
}
template <ScoreFunction kScore>
WB_BODY float slope_of(float x) {
  if constexpr (kScore == ScoreFunction::kSigmoid) return scalar::log_sigmoid_slope(x);
  if constexpr (kScore == ScoreFunction::kSqrtSoftplus) return scalar::log_sqrt_softplus_slope(x);
  return 1.0f;
}

WB_BODY std::uint32_t finite_mask(float x) { return (scalar::bits_of(x) & 0x7f800000u) != 0x7f800000u ? 0xffffffffu : 0u; }

template <ScoreFunction kScore>
WB_BODY bool keys(const float* x, const float* bias, const std::uint32_t* keep, std::int64_t n, std::uint32_t* out) {
  std::uint32_t all_finite = 0xffffffffu;
  for (std::int64_t e = 0; e < n; ++e) {
    const float key = scalar::add(score_of<kScore>(x[e]), bias[e]);
    const std::uint32_t is_finite = finite_mask(x[e]);
    all_finite &= is_finite;
    out[e] = scalar::order_key(key) & is_finite & finite_mask(key) & keep[e];
  }
  return all_finite == 0;
}

WB_BODY bool has_nonfinite(const float* x, std::int64_t n) {
  std::uint32_t all_finite = 0xffffffffu;
  for (std::int64_t e = 0; e < n; ++e) all_finite &= finite_mask(x[e]);
  return all_finite == 0;
}

WB_BODY std::uint32_t max_u32(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }

// Bucket b holds the keys at b, b + num_buckets, ... The k-th largest bucket maximum has k keys at or above it, so no chosen key is
// below it. Ranks by counting: every maximum against every other.
WB_BODY std::uint32_t threshold(const std::uint32_t* in, std::int64_t n, std::int64_t k, std::int64_t num_buckets, std::uint32_t* buckets) {
  for (std::int64_t block = 0; block < num_buckets; block += kLanes) {
    std::uint32_t largest[kLanes] = {};
    std::int64_t i = block;
    for (; i + kLanes <= n; i += num_buckets) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = max_u32(largest[lane], in[i + lane]);
    }
    for (std::int64_t lane = 0; i + lane < n; ++lane) largest[lane] = max_u32(largest[lane], in[i + lane]);
    for (std::int64_t lane = 0; lane < kLanes; ++lane) buckets[block + lane] = largest[lane];
  }
  std::uint32_t bound = 0xffffffffu;
  for (std::int64_t block = 0; block < num_buckets; block += kLanes) {
    std::int32_t num_larger[kLanes] = {};
    for (std::int64_t b = 0; b < num_buckets; ++b) {
      const std::uint32_t other = buckets[b];
      for (std::int64_t lane = 0; lane < kLanes; ++lane) num_larger[lane] += other > buckets[block + lane] ? 1 : 0;
    }
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const std::uint32_t candidate = num_larger[lane] < k ? buckets[block + lane] : 0xffffffffu;
      bound = candidate < bound ? candidate : bound;
    }
  }
  return max_u32(bound, 1);
}

WB_BODY std::uint64_t composite(std::uint32_t key, std::int64_t id) {
  return (static_cast<std::uint64_t>(key) << 32) | (0xffffffffu - static_cast<std::uint32_t>(id));
}

WB_BODY std::int64_t collect(const std::uint32_t* in, std::int64_t n, std::uint32_t bound, std::uint64_t* out) {
  constexpr std::int64_t kBlock = 32;
  std::int64_t count = 0, i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    std::uint32_t largest = 0;
    for (std::int64_t j = 0; j < kBlock; ++j) largest = max_u32(largest, in[i + j]);
    if (largest < bound) continue;
    for (std::int64_t j = 0; j < kBlock; ++j) {
      out[count] = composite(in[i + j], i + j);
      count += in[i + j] >= bound ? 1 : 0;
    }
  }
  for (; i < n; ++i) {
    out[count] = composite(in[i], i);
    count += in[i] >= bound ? 1 : 0;
  }
  return count;
}

// Descending, by counting for each value how many are larger: no branch depends on the data. values[count, padded) is overwritten.
WB_BODY void sort_small(std::uint64_t* values, std::int64_t count, std::uint64_t* out) {
  const std::int64_t padded = (count + 7) / 8 * 8;
  for (std::int64_t i = count; i < padded; ++i) values[i] = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t value = values[i];
    std::uint64_t num_larger = 0;
    for (std::int64_t block = 0; block < padded; block += 8) {
      for (std::int64_t j = 0; j < 8; ++j) num_larger += values[block + j] > value ? 1 : 0;
    }
    out[num_larger] = value;
  }
}

// Lanes to one value, in one fixed order.
WB_BODY float fold_lanes(const float* lanes) {
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// A block of 16 steps a lane is summed before it joins the total: the rounding error of long rows stays that of short ones.
inline constexpr std::int64_t kSumBlock = 16 * kLanes;

WB_BODY float sum(const float* u, std::int64_t n) {
  float total[kLanes] = {};
  for (std::int64_t block = 0; block < n; block += kSumBlock) {
    float part[kLanes] = {};
    const std::int64_t end = block + kSumBlock < n ? block + kSumBlock : n;
    std::int64_t e = block;
    for (; e + kLanes <= end; e += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) part[lane] += u[e + lane];
    }
    for (std::int64_t lane = 0; e + lane < end; ++lane) part[lane] += u[e + lane];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) total[lane] += part[lane];
  }
  return fold_lanes(total);
}

template <ScoreFunction kScore, bool kIsTiny>
WB_BODY void unnormalised_row(const float* x, const std::uint32_t* keep, float largest, std::int64_t n, float* u) {
  for (std::int64_t e = 0; e < n; ++e) {
    const std::uint32_t exists = finite_mask(x[e]) & keep[e];
    const float value = unnormalised<kScore, kIsTiny>(x[e], largest);
    u[e] = exists != 0 ? value : 0.0f;
  }
}

template <ScoreFunction kScore>
WB_BODY RowSum full_scores(const float* x, const std::uint32_t* keep, std::int64_t n, float* u) {
  std::uint32_t largest_key = 0;  // integers, so that the maximum vectorises
  for (std::int64_t e = 0; e < n; ++e) largest_key = max_u32(largest_key, scalar::order_key(x[e]) & finite_mask(x[e]) & keep[e]);
  RowSum row{kMinusInfinity, 0.0f};
  if (largest_key == 0) return row;
  row.largest = scalar::from_bits((largest_key >> 31) != 0 ? largest_key ^ 0x80000000u : ~largest_key);
  if (row.largest < kTinyScores)
    unnormalised_row<kScore, true>(x, keep, row.largest, n, u);
  else
    unnormalised_row<kScore, false>(x, keep, row.largest, n, u);
  row.sum = sum(u, n);
  return row;
}

WB_BODY float log_sum_exp(RowSum row) { return row.largest + scalar::log(row.sum); }

WB_BODY void scale(float* u, std::int64_t n, float factor) {
  for (std::int64_t e = 0; e < n; ++e) u[e] *= factor;
}

WB_BODY float dot(const float* a, const float* b, std::int64_t n) {
  float total[kLanes] = {};
  for (std::int64_t block = 0; block < n; block += kSumBlock) {
    float part[kLanes] = {};
    const std::int64_t end = block + kSumBlock < n ? block + kSumBlock : n;
    std::int64_t e = block;
    for (; e + kLanes <= end; e += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane) part[lane] += a[e + lane] * b[e + lane];
    }
    for (std::int64_t lane = 0; e + lane < end; ++lane) part[lane] += a[e + lane] * b[e + lane];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) total[lane] += part[lane];
  }
  return fold_lanes(total);
}

template <ScoreFunction kScore>
WB_BODY void selected_weights(bool renormalise, const RowSum* row, float scale, float epsilon, const float* x, const std::uint8_t* valid, std::int64_t padded_k,
                              float* scratch, float* weights) {
  if (renormalise && epsilon > 0) {  // parity: s / (sum + epsilon)
    float sum = 0;
    std::int32_t num_valid = 0;
    for (std::int64_t k = 0; k < padded_k; ++k) scratch[k] = score_of<kScore>(x[k]);
    for (std::int64_t k = 0; k < padded_k; ++k) {
      sum += valid[k] != 0 ? scratch[k] : 0.0f;
      num_valid += valid[k];
    }
    for (std::int64_t k = 0; k < padded_k; ++k) {
      const float w = sum > 0 ? scratch[k] / (sum + epsilon) : 1.0f / static_cast<float>(num_valid);
      weights[k] = valid[k] != 0 ? scale * w : 0.0f;
    }
    return;
  }
  if (!renormalise && row == nullptr) {
    for (std::int64_t k = 0; k < padded_k; ++k) {
      const float s = score_of<kScore>(x[k]);
      weights[k] = valid[k] != 0 ? scale * s : 0.0f;
    }
    return;
  }
  RowSum over{kMinusInfinity, 0.0f};
  if (renormalise) {
    for (std::int64_t k = 0; k < padded_k; ++k) over.largest = valid[k] != 0 && x[k] > over.largest ? x[k] : over.largest;
  } else {
    over = *row;
  }
  if (over.largest < kTinyScores) {
    for (std::int64_t k = 0; k < padded_k; ++k) scratch[k] = unnormalised<kScore, true>(x[k], over.largest);
  } else {
    for (std::int64_t k = 0; k < padded_k; ++k) scratch[k] = unnormalised<kScore, false>(x[k], over.largest);
  }
  if (renormalise) {
    double sum = 0;  // K may be E: a long sum in slot order
    for (std::int64_t k = 0; k < padded_k; ++k) sum += valid[k] != 0 ? scratch[k] : 0.0f;
    over.sum = static_cast<float>(sum);
  }
  for (std::int64_t k = 0; k < padded_k; ++k) {
    const float w = scale * (scratch[k] / over.sum);
    weights[k] = valid[k] != 0 ? w : 0.0f;
  }
}

template <ScoreFunction kScore>
WB_BODY void slopes(const float* x, std::int64_t n, float* out) {
  for (std::int64_t k = 0; k < n; ++k) out[k] = slope_of<kScore>(x[k]);
}

template <ScoreFunction kScore>
WB_BODY void score_gradient(const float* x, const float* p, const float* a, float mean, float scale, std::int64_t n, float* d) {
  for (std::int64_t e = 0; e < n; ++e) {
    const float value = p[e] * (a[e] - mean) * scale * slope_of<kScore>(x[e]);
    d[e] = p[e] > 0 ? value : 0.0f;  // also where the logit is NaN
  }
}

template <ScoreFunction kScore>
WB_BODY void loss_gradient(const float* x, const float* p, const float* a, float mean, float scale, const float* softmax, float softmax_scale, std::int64_t n,
                           float* d) {
  if (p != nullptr) {
    score_gradient<kScore>(x, p, a, mean, scale, n, d);
    if (softmax != nullptr) {
      for (std::int64_t e = 0; e < n; ++e) d[e] += softmax[e] * softmax_scale;
    }
  } else {
    for (std::int64_t e = 0; e < n; ++e) d[e] = softmax[e] * softmax_scale;
  }
}

}  // namespace waybill::router_impl::body
