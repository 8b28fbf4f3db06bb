// SPDX-License-Identifier: Apache-2.0
// What the loss and backward kernels share: factors of the losses, a row held by one warp, its score sums, the dense gradient.
// Gradients and loss values need fp32 rounding, not equal bits, so the fast exponential (2 ulp) is used throughout.
#pragma once

#include "ops/router/cuda/router_device.cuh"

namespace waybill::cuda {

inline constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float exp_fast(float x) { return ptx::ex2_approx(scalar::mul(x, kLog2E)); }

__device__ __forceinline__ float loss_weight(const RouterLossParams& p, int i) { return p.loss_weights != nullptr ? __ldg(p.loss_weights + i) : 1.0f; }

// Factors n_e -> a_e (L_row = sum_e a_e P_e) and of the z loss.
struct LossFactors {
  float aux = 0.0f, z = 0.0f;
};
// weighted: with the caller's loss weights, which are in global memory.
__device__ __forceinline__ LossFactors loss_factors(const RouterLossParams& p, bool weighted = true) {
  const double valid = p.valid_tokens == nullptr ? static_cast<double>(p.rows.T) : static_cast<double>(*p.valid_tokens);
  LossFactors f;
  if (valid <= 0) return f;
  const double aux_tokens = p.aux_tokens > 0 ? p.aux_tokens : valid, loss_tokens = p.loss_tokens > 0 ? p.loss_tokens : valid;
  f.aux = static_cast<float>(p.aux_coefficient * (static_cast<double>(p.rows.E) / p.rows.K) / (aux_tokens * loss_tokens));
  f.z = static_cast<float>(p.z_coefficient / loss_tokens);
  if (weighted) f.aux *= loss_weight(p, 0), f.z *= loss_weight(p, 2);
  return f;
}

// Out of line, for calls whose number of tokens the kernel before has counted.
__device__ __noinline__ inline LossFactors late_loss_factors(const RouterLossParams& p) { return loss_factors(p, false); }

__device__ __forceinline__ void write_loss(const RouterLossParams& p, int i, double value) {
  p.out[i] = value;
  if (p.out_f32 != nullptr) p.out_f32[i] = static_cast<float>(value);
}

__host__ __device__ constexpr int padded_to_4(int E) { return (E + 3) / 4 * 4; }

// Fills a_smem [E rounded up to 4] with factor * n_e. Every thread of the CTA; ends with a barrier.
__device__ __forceinline__ void load_aux_factors(const RouterLossParams& p, float factor, float* a_smem) {
  const bool given = p.aux_counts != nullptr && p.aux_coefficient != 0.0f;
#pragma unroll 8
  for (int e = static_cast<int>(threadIdx.x); e < padded_to_4(p.rows.E); e += static_cast<int>(blockDim.x)) {
    a_smem[e] = given && e < p.rows.E ? factor * static_cast<float>(__ldg(p.aux_counts + e)) : 0.0f;
  }
  __syncthreads();
}

// The same in two steps for kernels that stream rows: a count that is asked for behind the first rows of all CTAs waits for them (7 us).
template <int kHeld>
struct AuxCounts {
  std::int32_t held[kHeld];
};
__device__ __forceinline__ bool has_aux_counts(const RouterLossParams& p) { return p.aux_counts != nullptr && p.aux_coefficient != 0.0f; }
// Before the rows are asked for: this thread's first counts are on their way, further ones of long rows come to a_smem.
template <int kHeld>
__device__ __forceinline__ AuxCounts<kHeld> ask_for_aux_counts(const RouterLossParams& p, float* a_smem) {
  AuxCounts<kHeld> counts;
  const bool given = has_aux_counts(p);
  const auto count_of = [&](int e) {
    return given && e < p.rows.E ? static_cast<std::int32_t>(ptx::ld_relaxed_gpu(reinterpret_cast<const std::uint32_t*>(p.aux_counts) + e)) : 0;
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) counts.held[i] = count_of(static_cast<int>(threadIdx.x + i * blockDim.x));
#pragma unroll 4
  for (int e = static_cast<int>(threadIdx.x + kHeld * blockDim.x); e < padded_to_4(p.rows.E); e += static_cast<int>(blockDim.x)) {
    a_smem[e] = static_cast<float>(count_of(e));
  }
  return counts;
}
template <int kHeld>
__device__ __forceinline__ void store_aux_factors(const RouterLossParams& p, float factor, const AuxCounts<kHeld>& counts, float* a_smem) {
  const int padded = padded_to_4(p.rows.E);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int e = static_cast<int>(threadIdx.x + i * blockDim.x);
    if (e < padded) a_smem[e] = factor * static_cast<float>(counts.held[i]);
  }
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x + kHeld * blockDim.x); e < padded; e += static_cast<int>(blockDim.x)) a_smem[e] *= factor;
  __syncthreads();
}

// The sequence loss' weight / the number of sequences it is averaged over. Every thread of the CTA (it scans [B] valid counts).
__device__ __forceinline__ float sequence_scale(const RouterLossParams& p) {
  if (p.sequence_counts == nullptr) return 0.0f;
  if (p.num_sequences > 0) return static_cast<float>(1.0 / p.num_sequences) * loss_weight(p, 1);
  const int B = static_cast<int>(p.rows.T / p.sequence_length);
  int nonempty = 0;
  for (int begin = 0; begin < B; begin += static_cast<int>(blockDim.x)) {
    const int b = begin + static_cast<int>(threadIdx.x);
    nonempty += __syncthreads_count(b < B && p.sequence_valid[b] > 0);
  }
  return loss_weight(p, 1) / static_cast<float>(max(nonempty, 1));
}

// Factor of n_be for the sequence that row t is in.
__device__ __forceinline__ float sequence_factor(const RouterLossParams& p, std::int64_t t, float scale) {
  const float tokens = static_cast<float>(p.sequence_valid[t / p.sequence_length]);
  return tokens > 0.0f ? p.sequence_coefficient * (static_cast<float>(p.rows.E) / static_cast<float>(p.rows.K)) / (tokens * tokens) * scale : 0.0f;
}

// a_e of the experts of one row.
struct RowFactors {
  const float* a_smem;               // [E padded], or null
  const std::int32_t* sequence_row;  // [E] counts of the row's sequence, or null
  float sequence;
  int E;
  __device__ __forceinline__ void at4(int e, float (&a)[4]) const {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (a_smem != nullptr && e < E) v = *reinterpret_cast<const float4*>(a_smem + e);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    if (sequence_row != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] += e + i < E ? sequence * static_cast<float>(sequence_row[e + i]) : 0.0f;
    }
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

// Sums over the experts of a row, warp uniform. Two ways:
// fast: one exponential t_e an entry. Softmax: t = e^(x - max). Sigmoid: t = e^x (the row's largest logit lies in [-30, 60], so that
//   neither the largest term nor the sum overflows or vanishes).
// slow: everything else (sqrt-softplus, extreme rows), from x itself.
struct RowSums {
  float max = -kInfinity, exp_sum = 0.0f, score_sum = 0.0f, a_dot = 0.0f;  // a_dot: sum of a_e times the score
};
template <bool kSoftmax>
__device__ __forceinline__ bool is_fast_row(int score, float row_max) {
  return kSoftmax || (score == kScoreSigmoid && row_max >= -30.0f && row_max <= 60.0f);
}

// Adds four entries of a fast row; x becomes t.
template <bool kSoftmax>
__device__ __forceinline__ void add_fast(RowSums& s, float (&x)[4], const float (&a)[4], float shift) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float t = exp_fast(x[i] - shift);
    x[i] = t;
    s.exp_sum += t;
    if (kSoftmax) {
      s.a_dot = __fmaf_rn(a[i], t, s.a_dot);
    } else {
      const float sigmoid = t * ptx::rcp_approx(1.0f + t);
      s.score_sum += sigmoid;
      s.a_dot = __fmaf_rn(a[i], sigmoid, s.a_dot);
    }
  }
}
template <bool kSoftmax>
__device__ __forceinline__ void reduce_sums(RowSums& s) {
  s.exp_sum = warp_sum(s.exp_sum);
  s.a_dot = warp_sum(s.a_dot);
  s.score_sum = kSoftmax ? s.exp_sum : warp_sum(s.score_sum);
}

// Any row, read from memory at each pass (any alignment). Entries that do not exist (masked, not finite, beyond E) are -Inf.
template <class T>
__device__ __forceinline__ void read_entries(const RouterRows& rows, const T* row, int e, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = e + i < rows.E ? to_float(row[e + i]) : -kInfinity;
    const bool masked = rows.mask != nullptr && e + i < rows.E && rows.mask[e + i] != 0;
    x[i] = scalar::is_finite(x[i]) && !masked ? x[i] : -kInfinity;
  }
}
template <class T>
__device__ __forceinline__ float generic_row_max(const RouterRows& rows, const T* row) {
  float largest = -kInfinity;
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < rows.E; e += 128) {
    float x[4];
    read_entries(rows, row, e, x);
    largest = fmaxf(largest, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
  }
  return warp_max(largest);
}
template <class T, bool kSoftmax>
__device__ __forceinline__ RowSums generic_row_sums(const RouterRows& rows, const T* row, const RowFactors& factors, float row_max) {
  RowSums s;
  s.max = row_max;
  const bool fast = is_fast_row<kSoftmax>(rows.score, row_max), deep = row_max < -30.0f;
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < rows.E; e += 128) {
    float x[4], a[4];
    read_entries(rows, row, e, x);
    factors.at4(e, a);
    if (fast) {
      add_fast<kSoftmax>(s, x, a, kSoftmax ? row_max : 0.0f);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s.exp_sum += exp_fast(x[i] - row_max);
      const float value = score_and_slope(rows.score, x[i], row_max, deep).s;
      s.score_sum += value;
      s.a_dot = __fmaf_rn(a[i], value, s.a_dot);
    }
  }
  reduce_sums<kSoftmax>(s);
  return s;
}

// log sum exp of the logits from the sums of a row.
template <bool kSoftmax>
__device__ __forceinline__ float row_lse(int score, const RowSums& s) {
  return (!kSoftmax && is_fast_row<kSoftmax>(score, s.max) ? 0.0f : s.max) + scalar::log(s.exp_sum);
}

// The dense gradient of a row as a function of its entries.
struct DenseFactors {
  float shift, exp_factor, score_factor, mean_a;
};
template <bool kSoftmax>
__device__ __forceinline__ DenseFactors dense_factors(int score, const RowSums& s, bool has_a, float z_factor, float loss_scale, float routes_dot) {
  DenseFactors d;
  const float inverse_exp = scalar::div(1.0f, s.exp_sum), inverse_score = has_a ? (kSoftmax ? inverse_exp : scalar::div(1.0f, s.score_sum)) : 0.0f;
  d.shift = !kSoftmax && is_fast_row<kSoftmax>(score, s.max) ? 0.0f : s.max;
  d.mean_a = has_a ? s.a_dot * inverse_score : 0.0f;
  float softmax_part = -routes_dot;
  if (z_factor != 0.0f) softmax_part += loss_scale * 2.0f * z_factor * row_lse<kSoftmax>(score, s);
  d.exp_factor = softmax_part * inverse_exp, d.score_factor = loss_scale * inverse_score;
  return d;
}
// t of a fast row -> gradient.
template <bool kSoftmax>
__device__ __forceinline__ float fast_gradient(const DenseFactors& f, float t, float a) {
  if (kSoftmax) return t * __fmaf_rn(f.score_factor, a - f.mean_a, f.exp_factor);
  const float base = t * f.exp_factor, inverse = ptx::rcp_approx(1.0f + t);
  return __fmaf_rn(t * inverse * inverse * f.score_factor, a - f.mean_a, base);
}

}  // namespace waybill::cuda
