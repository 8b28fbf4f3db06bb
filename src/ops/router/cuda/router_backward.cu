// SPDX-License-Identifier: Apache-2.0
// Router backward: d_weights [T, K] and the losses -> d_logits [T, E] fp32, written once. One warp per token.
//
// sparse: renormalised or elementwise scores without losses. Rows are zero but for K entries; logits are read at those K ids only
//   (not at all for softmax). Bytes: T * E * 4 written, T * K * (id + 8) read.
// dense: softmax over all experts, or any loss. The row is read once into registers (tiers of 128 experts; longer rows are read
//   twice, the second time from L2), then written once. Bytes: T * E * (sizeof(logit) + 4).
// The routes' part is stored over the dense part by the same warp after __syncwarp, which orders the two.
#include <algorithm>

#include "ops/router/cuda/router_backward.cuh"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store4(float* p, float a, float b, float c, float d, bool aligned, int e, int E) {
  if (aligned) {
    __stcs(reinterpret_cast<float4*>(p), make_float4(a, b, c, d));
    return;
  }
  const float v[4] = {a, b, c, d};
  for (int i = 0; i < 4 && e + i < E; ++i) p[i] = v[i];
}

// The routes' part of slot k: slope * w * (g - centre). `uniform`: parity mode's underflowed rows, whose weights are constants.
template <class T>
__device__ __forceinline__ float route_gradient(const RouterRows& rows, const T* row, int id, float w, float g, float centre) {
  float slope = 1.0f;
  if (rows.score == kScoreSigmoid || rows.score == kScoreSqrtSoftplus) {
    const float x = to_float(row[id]);
    slope = rows.score == kScoreSigmoid ? scalar::log_sigmoid_slope(x) : scalar::log_sqrt_softplus_slope(x);
  }
  return slope * w * (g - centre);
}

struct RouteDot {
  float dot;      // sum_k g_k w_k
  bool constant;  // the weights do not depend on the logits (parity mode, every score 0)
};
template <class T>
__device__ __forceinline__ RouteDot route_dot(const RouterBackwardParams& p, const T* row, std::int64_t t) {
  const RouterRows& rows = p.loss.rows;
  float dot = 0.0f;
  bool any_score = false;
  for (int k = static_cast<int>(threadIdx.x) & 31; k < rows.K; k += 32) {
    const std::int64_t i = t * rows.K + k;
    const int id = load_id(p.loss.ids, p.loss.id_bytes, i);
    if (id < 0 || id >= rows.E) continue;
    dot += p.d_weights[i] * p.weights[i];
    if (rows.epsilon > 0.0f) any_score |= selection_score(rows.score, to_float(row[id])) != 0.0f;
  }
  return {warp_sum(dot), rows.epsilon > 0.0f && !__any_sync(ptx::kFullWarp, any_score)};
}

template <class T>
__global__ void __launch_bounds__(kThreads, 8) router_backward_sparse(const __grid_constant__ RouterBackwardParams p) {
  const RouterRows& rows = p.loss.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool aligned = rows.E % 4 == 0 && p.d_stride % 4 == 0 && (reinterpret_cast<std::uintptr_t>(p.d_logits) & 15) == 0;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  const float inverse_scale = renormalise ? scalar::div(1.0f, rows.scale) : 0.0f;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5); t < rows.T; t += num_warps) {
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    float* out = p.d_logits + t * p.d_stride;
    const bool skip = p.d_weights == nullptr || (rows.padding != nullptr && rows.padding[t] != 0);
    const std::int64_t i = t * rows.K + lane;
    // The first 32 slots stay in registers; loads are issued before the zeros are stored.
    const bool has = !skip && lane < rows.K;
    const int id = has ? load_id(p.loss.ids, p.loss.id_bytes, i) : -1;
    const float w = has ? p.weights[i] : 0.0f, g = has ? p.d_weights[i] : 0.0f;
#pragma unroll 2
    for (int e = lane * 4; e < rows.E; e += 128) store4(out + e, 0.0f, 0.0f, 0.0f, 0.0f, aligned, e, rows.E);
    if (skip) continue;
    float centre = 0.0f;
    bool constant = false;
    if (rows.epsilon > 0.0f || rows.K > 32) {
      const RouteDot dot = route_dot(p, row, t);
      centre = dot.dot * inverse_scale, constant = dot.constant;
    } else if (renormalise) {
      centre = warp_sum(id >= 0 && id < rows.E ? w * g : 0.0f) * inverse_scale;
    }
    __syncwarp();
    if (constant) continue;
    if (id >= 0 && id < rows.E) out[id] = route_gradient(rows, row, id, w, g, centre);
    for (int k = lane + 32; k < rows.K; k += 32) {
      const int other = load_id(p.loss.ids, p.loss.id_bytes, t * rows.K + k);
      if (other < 0 || other >= rows.E) continue;
      out[other] = route_gradient(rows, row, other, p.weights[t * rows.K + k], p.d_weights[t * rows.K + k], centre);
    }
  }
}

// kVectors > 0: the row is held in registers. 0: it is read again for the second pass.
template <class T, int kVectors>
struct RowReader {
  static constexpr int kHeld = kVectors > 0 ? kVectors : 1;
  float x[kHeld][4];
  const T* row;
  const RouterRows* rows;
  bool vectorised;

  __device__ __forceinline__ void read(int v, float (&out)[4]) const {
    const int e = v * 128 + (static_cast<int>(threadIdx.x) & 31) * 4;
    if (vectorised && e < rows->E) {
      load4<T, kVectors != 0>(row + e, out);
    } else {
      for (int i = 0; i < 4; ++i) out[i] = e + i < rows->E ? to_float(row[e + i]) : -kInfinity;
    }
    for (int i = 0; i < 4; ++i) {
      if (!scalar::is_finite(out[i]) || (rows->mask != nullptr && e + i < rows->E && rows->mask[e + i] != 0)) out[i] = -kInfinity;
    }
  }
  __device__ __forceinline__ void load() {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) read(v, x[v]);
    }
  }
  // body(v, x): every vector of the row.
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    if constexpr (kVectors > 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) body(v, x[v]);
    } else {
      for (int v = 0; v * 128 < rows->E; ++v) {
        float y[4];
        read(v, y);
        body(v, y);
      }
    }
  }
};

template <class T, int kVectors>
inline constexpr int kDenseBlocks = kVectors == 18 ? 2 : (kVectors == 2 ? 4 : 3);

template <class T, int kVectors, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, kDenseBlocks<T, kVectors>) router_backward_dense(const __grid_constant__ RouterBackwardParams p) {
  extern __shared__ __align__(16) float a_smem[];  // [E]
  const RouterLossParams& loss = p.loss;
  const RouterRows& rows = loss.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const LossFactors factors = loss_factors(loss);
  const float per_sequence = sequence_scale(loss);
  load_aux_factors(loss, factors.aux, a_smem);
  const bool has_a = loss.aux_coefficient != 0.0f || loss.sequence_counts != nullptr;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  const bool softmax_all = kSoftmax && !renormalise;
  const bool aligned = rows.E % 4 == 0 && p.d_stride % 4 == 0 && (reinterpret_cast<std::uintptr_t>(p.d_logits) & 15) == 0;
  RowReader<T, kVectors> reader;
  reader.rows = &rows;
  reader.vectorised = rows.E % 4 == 0 && rows.row_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(rows.logits) % (4 * sizeof(T)) == 0;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5); t < rows.T; t += num_warps) {
    reader.row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    float* out = p.d_logits + t * p.d_stride;
    RowSums sums;
    const bool is_padding = rows.padding != nullptr && rows.padding[t] != 0;
    if (!is_padding) {
      reader.load();
      reader.each([&](int, const float(&x)[4]) { sums.max = fmaxf(sums.max, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))); });
      sums.max = warp_max(sums.max);
    }
    if (sums.max == -kInfinity) {  // padding, or nothing finite
      for (int e = lane * 4; e < rows.E; e += 128) store4(out + e, 0.0f, 0.0f, 0.0f, 0.0f, aligned, e, rows.E);
      continue;
    }
    RowFactors a{a_smem, nullptr, 0.0f};
    if (loss.sequence_counts != nullptr) {
      a.sequence_row = loss.sequence_counts + t / loss.sequence_length * rows.E;
      a.sequence = sequence_factor(loss, t, per_sequence);
    }
    const bool deep = sums.max < -30.0f;
    const bool need_exp = kSoftmax || factors.z != 0.0f;
    reader.each([&](int v, const float(&x)[4]) {
      const int e = v * 128 + lane * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = has_a && e + i < rows.E ? a.at(e + i) : 0.0f;
        if (need_exp) {
          const float y = exp_fast(x[i] - sums.max);
          sums.exp_sum += y;
          if (kSoftmax) sums.exp_dot = __fmaf_rn(factor, y, sums.exp_dot);
        }
        if (!kSoftmax && has_a) {
          const float s = score_and_slope(rows.score, x[i], sums.max, deep).s;
          sums.score_sum += s;
          sums.score_dot = __fmaf_rn(factor, s, sums.score_dot);
        }
      }
    });
    sums.exp_sum = warp_sum(sums.exp_sum);
    DenseTerm dense{};
    dense.score = kSoftmax ? kScoreSoftmax : rows.score;
    dense.deep = deep, dense.max = sums.max, dense.loss_scale = p.loss_scale;
    dense.inverse_exp_sum = need_exp ? scalar::div(1.0f, sums.exp_sum) : 0.0f;
    if (has_a) {
      if (kSoftmax) {
        dense.mean_a = warp_sum(sums.exp_dot) * dense.inverse_exp_sum;
      } else {
        dense.inverse_score_sum = scalar::div(1.0f, warp_sum(sums.score_sum));
        dense.mean_a = warp_sum(sums.score_dot) * dense.inverse_score_sum;
      }
    }
    if (factors.z != 0.0f) dense.softmax_part = p.loss_scale * 2.0f * factors.z * (sums.max + scalar::log(sums.exp_sum));
    RouteDot routes{0.0f, true};
    if (p.d_weights != nullptr) routes = route_dot(p, reader.row, t);
    if (softmax_all) dense.softmax_part -= routes.dot;
    reader.each([&](int v, const float(&x)[4]) {
      const int e = v * 128 + lane * 4;
      if (e >= rows.E) return;
      float d[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] = dense.at(x[i], has_a && e + i < rows.E ? a.at(e + i) : 0.0f);
      store4(out + e, d[0], d[1], d[2], d[3], aligned, e, rows.E);
    });
    __syncwarp();
    if (p.d_weights == nullptr) continue;
    const float centre = renormalise ? scalar::div(routes.dot, rows.scale) : 0.0f;
    for (int k = lane; k < rows.K && !routes.constant; k += 32) {
      const std::int64_t i = t * rows.K + k;
      const int id = load_id(loss.ids, loss.id_bytes, i);
      if (id < 0 || id >= rows.E) continue;
      const float x = to_float(reader.row[id]);
      if (!scalar::is_finite(x) || (rows.mask != nullptr && rows.mask[id] != 0)) continue;
      out[id] = dense.at(x, has_a ? a.at(id) : 0.0f) + route_gradient(rows, reader.row, id, p.weights[i], p.d_weights[i], centre);
    }
  }
}

template <class T, int kVectors>
void launch_dense(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const std::size_t smem = static_cast<std::size_t>(p.loss.rows.E) * sizeof(float);
  const std::int64_t needed = (p.loss.rows.T + kThreads / 32 - 1) / (kThreads / 32);
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * kDenseBlocks<T, kVectors>));
  const bool softmax = p.loss.rows.score == kScoreSoftmax || p.loss.rows.score == kScoreSoftmaxSelected;
  if (softmax) {
    router_backward_dense<T, kVectors, true><<<grid, kThreads, smem, stream>>>(p);
  } else {
    router_backward_dense<T, kVectors, false><<<grid, kThreads, smem, stream>>>(p);
  }
}

template <class T>
void launch(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  const bool has_loss = p.loss.aux_coefficient != 0.0f || p.loss.sequence_coefficient != 0.0f || p.loss.z_coefficient != 0.0f;
  if (!has_loss && !(rows.score == kScoreSoftmax && rows.renormalise == 0)) {
    const std::int64_t needed = (rows.T + kThreads / 32 - 1) / (kThreads / 32);
    const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * 8));
    router_backward_sparse<T><<<grid, kThreads, 0, stream>>>(p);
    return;
  }
  if (rows.E <= 256) return launch_dense<T, 2>(p, limits, stream);
  if (rows.E <= 1024) return launch_dense<T, 8>(p, limits, stream);
  if (rows.E <= 2304) return launch_dense<T, 18>(p, limits, stream);
  launch_dense<T, 0>(p, limits, stream);
}

}  // namespace

void launch_router_backward(LogitType type, const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch<__nv_bfloat16>(p, limits, stream);
  launch<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
