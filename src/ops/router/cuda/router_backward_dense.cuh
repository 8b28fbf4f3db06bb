// SPDX-License-Identifier: Apache-2.0
// What the dense backward kernels share: the factors of a call and a row, and a row by one warp straight from and to global memory.
#pragma once

#include "ops/router/cuda/router_backward_routes.cuh"

namespace waybill::cuda {

// What every row of a call shares.
struct CallFactors {
  LossFactors loss;
  float per_sequence;
  bool has_aux, has_a, softmax_all;
};
template <bool kSoftmax>
__device__ __forceinline__ void set_call_factors(const RouterBackwardParams& p, CallFactors& c) {
  c.per_sequence = sequence_scale(p.loss);
  c.has_aux = p.loss.aux_coefficient != 0.0f;
  c.has_a = c.has_aux || p.loss.sequence_counts != nullptr;
  c.softmax_all = kSoftmax && p.loss.rows.renormalise == 0 && p.loss.rows.score == kScoreSoftmax;
}
template <bool kSoftmax>
__device__ __forceinline__ CallFactors call_factors(const RouterBackwardParams& p, float* a_smem) {
  CallFactors c;
  c.loss = loss_factors(p.loss);
  set_call_factors<kSoftmax>(p, c);
  load_aux_factors(p.loss, c.loss.aux, a_smem);
  return c;
}
__device__ __forceinline__ RowFactors row_factors(const RouterBackwardParams& p, const CallFactors& c, const float* a_smem, std::int64_t t) {
  RowFactors a{a_smem, nullptr, 0.0f, p.loss.rows.E};
  if (p.loss.sequence_counts != nullptr) {
    a.sequence_row = p.loss.sequence_counts + t / p.loss.sequence_length * p.loss.rows.E;
    a.sequence = sequence_factor(p.loss, t, c.per_sequence);
  }
  return a;
}

// One row by one warp, straight from and to global memory. routes_row [E padded]: zero on entry and on return.
template <class T, bool kSoftmax>
__device__ __noinline__ void generic_row(const RouterBackwardParams& p, const CallFactors& c, const RowFactors& factors, std::int64_t t, float* routes_row) {
  const RouterRows& rows = p.loss.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool aligned = is_aligned_output(p);
  const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
  float* out = p.d_logits + t * p.d_stride;
  const float row_max = rows.padding != nullptr && rows.padding[t] != 0 ? -kInfinity : generic_row_max(rows, row);
  if (row_max == -kInfinity) {
    for (int e = lane * 4; e < rows.E; e += 128) store4(out + e, 0.0f, 0.0f, 0.0f, 0.0f, aligned, e, rows.E);
    return;
  }
  float dot = 0.0f;
  if (p.d_weights != nullptr) dot = scatter_routes<T>(p, row, t, routes_row);
  const RowSums s = generic_row_sums<T, kSoftmax>(rows, row, factors, row_max);
  const DenseFactors d = dense_factors<kSoftmax>(rows.score, s, c.has_a, c.loss.z, p.loss_scale, c.softmax_all ? dot : 0.0f);
  const bool fast = is_fast_row<kSoftmax>(rows.score, row_max), deep = row_max < -30.0f;
  __syncwarp();
  for (int e = lane * 4; e < rows.E; e += 128) {
    float x[4], a[4], y[4];
    read_entries(rows, row, e, x);
    factors.at4(e, a);
    const float4 r = *reinterpret_cast<const float4*>(routes_row + e);
    const float routes[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (fast) {
        y[i] = fast_gradient<kSoftmax>(d, exp_fast(x[i] - d.shift), a[i]);
      } else {
        const ScoreSlope score = score_and_slope(rows.score, x[i], row_max, deep);
        y[i] = d.score_factor * score.s * (a[i] - d.mean_a) * score.slope + exp_fast(x[i] - row_max) * d.exp_factor;
      }
      y[i] += routes[i];
    }
    store4(out + e, y[0], y[1], y[2], y[3], aligned, e, rows.E);
  }
  __syncwarp();
  if (p.d_weights != nullptr) clear_routes(p, t, routes_row);
  __syncwarp();
}

}  // namespace waybill::cuda
