// SPDX-License-Identifier: Apache-2.0
// What the loss and backward kernels share: the factors of the losses, score sums of a row, and the dense gradient of one logit.
// Gradients and loss values need fp32 rounding, not equal bits, so the fast exponential (2 ulp) is used throughout.
#pragma once

#include "ops/router/cuda/router_device.cuh"

namespace waybill::cuda {

inline constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float exp_fast(float x) { return ptx::ex2_approx(scalar::mul(x, kLog2E)); }

// Factors n_e -> a_e (L_row = sum_e a_e P_e) and of the z loss.
struct LossFactors {
  float aux = 0.0f, z = 0.0f;
};
__device__ __forceinline__ LossFactors loss_factors(const RouterLossParams& p) {
  const double valid = p.valid_tokens == nullptr ? static_cast<double>(p.rows.T) : static_cast<double>(*p.valid_tokens);
  LossFactors f;
  if (valid <= 0) return f;
  const double aux_tokens = p.aux_tokens > 0 ? p.aux_tokens : valid, loss_tokens = p.loss_tokens > 0 ? p.loss_tokens : valid;
  f.aux = static_cast<float>(p.aux_coefficient * (static_cast<double>(p.rows.E) / p.rows.K) / (aux_tokens * loss_tokens));
  f.z = static_cast<float>(p.z_coefficient / loss_tokens);
  return f;
}

// Fills a_smem [E] with factor * n_e. Every thread of the CTA; ends with a barrier.
__device__ __forceinline__ void load_aux_factors(const RouterLossParams& p, float factor, float* a_smem) {
  for (int e = static_cast<int>(threadIdx.x); e < p.rows.E; e += static_cast<int>(blockDim.x)) {
    a_smem[e] = p.aux_counts == nullptr || p.aux_coefficient == 0.0f ? 0.0f : factor * static_cast<float>(p.aux_counts[e]);
  }
  __syncthreads();
}

// 1 / the number of sequences the loss is averaged over. Every thread of the CTA (it scans [B] valid counts).
__device__ __forceinline__ float sequence_scale(const RouterLossParams& p) {
  if (p.sequence_counts == nullptr) return 0.0f;
  if (p.num_sequences > 0) return static_cast<float>(1.0 / p.num_sequences);
  const int B = static_cast<int>(p.rows.T / p.sequence_length);
  int nonempty = 0;
  for (int begin = 0; begin < B; begin += static_cast<int>(blockDim.x)) {
    const int b = begin + static_cast<int>(threadIdx.x);
    nonempty += __syncthreads_count(b < B && p.sequence_valid[b] > 0);
  }
  return 1.0f / static_cast<float>(max(nonempty, 1));
}

// Factor of n_be for the sequence that row t is in.
__device__ __forceinline__ float sequence_factor(const RouterLossParams& p, std::int64_t t, float scale) {
  const float tokens = static_cast<float>(p.sequence_valid[t / p.sequence_length]);
  return tokens > 0.0f ? p.sequence_coefficient * (static_cast<float>(p.rows.E) / static_cast<float>(p.rows.K)) / (tokens * tokens) * scale : 0.0f;
}

// a_e of four neighbouring experts of row t.
struct RowFactors {
  const float* a_smem;                // [E], or null
  const std::int32_t* sequence_row;   // [E] counts of the row's sequence, or null
  float sequence;
  __device__ __forceinline__ float at(int e) const {
    float a = a_smem != nullptr ? a_smem[e] : 0.0f;
    if (sequence_row != nullptr) a += sequence * static_cast<float>(sequence_row[e]);
    return a;
  }
};

// The raw score relative to the row's best and its log-derivative. `deep`: every logit of the row is below -30, where
// sigmoid(x) = e^x and sqrt-softplus = e^(x/2) to fp32, so that scores stay representable however small.
struct ScoreSlope {
  float s, slope;
};
__device__ __forceinline__ ScoreSlope score_and_slope(int score, float x, float row_max, bool deep) {
  if (deep) {
    const float half = score == kScoreSqrtSoftplus ? 0.5f : 1.0f;
    return {exp_fast(half * (x - row_max)), half};
  }
  if (score == kScoreSigmoid) {
    const float e = exp_fast(scalar::minus_abs(x)), inverse = ptx::rcp_approx(1.0f + e);
    return x < 0.0f ? ScoreSlope{e * inverse, inverse} : ScoreSlope{inverse, e * inverse};
  }
  return {scalar::sqrt_softplus(x), scalar::log_sqrt_softplus_slope(x)};
}

// Row scalars after the first pass.
struct RowSums {
  float max = -kInfinity;                  // of the logits that exist
  float exp_sum = 0.0f, exp_dot = 0.0f;    // softmax: sum of e^(x - max), and times a_e
  float score_sum = 0.0f, score_dot = 0.0f;  // other scores
};

// Gradient of one logit without the routes' own part.
struct DenseTerm {
  int score;          // kScoreSoftmax for both softmax scores
  bool deep;
  float max, inverse_exp_sum, inverse_score_sum;
  float mean_a;       // sum_e a_e P_e
  float softmax_part; // factor of softmax_e: z loss and softmax over all
  float loss_scale;
  __device__ __forceinline__ float at(float x, float a) const {
    if (score == kScoreSoftmax) return exp_fast(x - max) * inverse_exp_sum * (loss_scale * (a - mean_a) + softmax_part);
    const ScoreSlope s = score_and_slope(score, x, max, deep);
    float d = loss_scale * (s.s * inverse_score_sum) * (a - mean_a) * s.slope;
    if (softmax_part != 0.0f) d += exp_fast(x - max) * inverse_exp_sum * softmax_part;
    return d;
  }
};

}  // namespace waybill::cuda
