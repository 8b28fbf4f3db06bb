// SPDX-License-Identifier: Apache-2.0
// The routes' part of the router's gradient: K entries a row, put into a row of shared memory that is zero elsewhere or holds the dense part.
#pragma once

#include "ops/router/cuda/router_backward.cuh"

namespace waybill::cuda {

__host__ __device__ __forceinline__ bool is_aligned_output(const RouterBackwardParams& p) {
  return p.loss.rows.E % 4 == 0 && p.d_stride % 4 == 0 && (reinterpret_cast<std::uintptr_t>(p.d_logits) & 15) == 0;
}

__device__ __forceinline__ void store4(float* p, float a, float b, float c, float d, bool aligned, int e, int E) {
  if (aligned) {
    *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
    return;
  }
  const float v[4] = {a, b, c, d};
  for (int i = 0; i < 4 && e + i < E; ++i) p[i] = v[i];
}

__device__ __forceinline__ bool weights_are_renormalised(const RouterRows& rows) { return rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected; }
__device__ __forceinline__ bool needs_logits(const RouterRows& rows) { return rows.score == kScoreSigmoid || rows.score == kScoreSqrtSoftplus; }

// d log score / dx.
__device__ __forceinline__ float log_slope(int score, float x) {
  if (score == kScoreSigmoid) return scalar::log_sigmoid_slope(x);
  if (score == kScoreSqrtSoftplus) return scalar::log_sqrt_softplus_slope(x);
  return 1.0f;
}

// w without the scaling factor: exactly 1 for the only route of a renormalised row, whose gradient is then exactly 0.
__device__ __forceinline__ float unit_weight(const RouterRows& rows, float w) { return scalar::div(w, rows.scale); }

// One row by one warp, any K: adds slope * w * (g - centre) to routes_row at the row's ids and returns sum_k g_k w_k.
template <class T>
__device__ __forceinline__ float scatter_routes(const RouterBackwardParams& p, const T* row, std::int64_t t, float* routes_row) {
  const RouterRows& rows = p.loss.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float dot = 0.0f, unit_dot = 0.0f;
  bool any_score = false;
  for (int k = lane; k < rows.K; k += 32) {
    const std::int64_t i = t * rows.K + k;
    const int id = load_id(p.loss.ids, p.loss.id_bytes, i);
    if (id < 0 || id >= rows.E) continue;
    dot = __fmaf_rn(p.d_weights[i], p.weights[i], dot);
    unit_dot = __fmaf_rn(p.d_weights[i], unit_weight(rows, p.weights[i]), unit_dot);
    if (rows.epsilon > 0.0f) any_score |= selection_score(rows.score, to_float(row[id])) != 0.0f;
  }
  dot = warp_sum(dot);
  // Parity mode with every score 0: the weights are constants.
  if (rows.epsilon > 0.0f && !__any_sync(ptx::kFullWarp, any_score)) return dot;
  const float centre = weights_are_renormalised(rows) ? warp_sum(unit_dot) : 0.0f;
  for (int k = lane; k < rows.K; k += 32) {
    const std::int64_t i = t * rows.K + k;
    const int id = load_id(p.loss.ids, p.loss.id_bytes, i);
    if (id < 0 || id >= rows.E) continue;
    const float x = to_float(row[id]);
    if (!scalar::is_finite(x) || (rows.mask != nullptr && rows.mask[id] != 0)) continue;
    routes_row[id] += log_slope(rows.score, x) * p.weights[i] * (p.d_weights[i] - centre);
  }
  return dot;
}

// Makes the row zero again.
__device__ __forceinline__ void clear_routes(const RouterBackwardParams& p, std::int64_t t, float* routes_row) {
  for (int k = static_cast<int>(threadIdx.x) & 31; k < p.loss.rows.K; k += 32) {
    const int id = load_id(p.loss.ids, p.loss.id_bytes, t * p.loss.rows.K + k);
    if (id >= 0 && id < p.loss.rows.E) routes_row[id] = 0.0f;
  }
}

}  // namespace waybill::cuda
