// SPDX-License-Identifier: Apache-2.0
// Router backward with a dense part (softmax over all experts, or any loss): d_weights [T, K] and losses -> d_logits [T, E] fp32.
// One warp per token; logits are read once and d_logits is written once. Bytes: T * E * (sizeof(logit) + 4) + T * K * (id + 8).
//
// staged (sm_90, aligned rows): a bulk copy brings the row into shared memory; maximum, then exponentials and sums in place, then
//   gradients in place, the routes' part added at K entries; a bulk copy takes the row out. 16-bit logits have a row of their own.
// generic: any alignment and score; the row is read from global memory at each pass (from L2 after the first).
#include <algorithm>
#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_backward_routes.cuh"
#include "ops/router/cuda/router_staged_rows.cuh"

namespace waybill::cuda {
namespace {

// What every row of a call shares.
struct CallFactors {
  LossFactors loss;
  float per_sequence;
  bool has_aux, has_a, softmax_all;
};
template <bool kSoftmax>
__device__ __forceinline__ CallFactors call_factors(const RouterBackwardParams& p, float* a_smem) {
  CallFactors c;
  c.loss = loss_factors(p.loss);
  c.per_sequence = sequence_scale(p.loss);
  load_aux_factors(p.loss, c.loss.aux, a_smem);
  c.has_aux = p.loss.aux_coefficient != 0.0f;
  c.has_a = c.has_aux || p.loss.sequence_counts != nullptr;
  c.softmax_all = kSoftmax && p.loss.rows.renormalise == 0 && p.loss.rows.score == kScoreSoftmax;
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

constexpr int kGenericThreads = 128;
template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kGenericThreads) router_backward_generic(const __grid_constant__ RouterBackwardParams p) {
  extern __shared__ __align__(16) float dynamic_smem[];  // a [E padded], then a row [E padded] per warp
  const int warp = static_cast<int>(threadIdx.x) >> 5, padded = padded_to_4(p.loss.rows.E);
  float* routes_row = dynamic_smem + static_cast<std::size_t>(1 + warp) * padded;
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < padded; e += 128) *reinterpret_cast<float4*>(routes_row + e) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  begin_kernel();
  await_previous();
  const CallFactors c = call_factors<kSoftmax>(p, dynamic_smem);
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kGenericThreads / 32);
  for (std::int64_t t = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x; t < p.loss.rows.T; t += num_warps) {
    const RowFactors factors = row_factors(p, c, dynamic_smem, t);
    generic_row<T, kSoftmax>(p, c, factors, t, routes_row);
  }
}

constexpr int kStagedThreads = 512;
// Bytes of one warp: the output row, the input row where the types differ.
template <class T>
constexpr std::size_t staged_bytes(int E) {
  return static_cast<std::size_t>(E) * 4 + (sizeof(T) == 4 ? 0 : (static_cast<std::size_t>(E) * sizeof(T) + 15) / 16 * 16);
}

template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kStagedThreads, 2) router_backward_staged(const __grid_constant__ RouterBackwardParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float dynamic_smem[];  // a [E], then staged_bytes per warp
  __shared__ std::uint64_t barriers[kStagedThreads / 32];
  const RouterRows& rows = p.loss.rows;
  const int E = rows.E, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, warps = static_cast<int>(blockDim.x) >> 5;
  float* out = dynamic_smem + E + static_cast<std::size_t>(warp) * (staged_bytes<T>(E) / 4);
  T* row = sizeof(T) == 4 ? reinterpret_cast<T*>(out) : reinterpret_cast<T*>(out + E);
  std::uint64_t* full = barriers + warp;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(E) * sizeof(T);
  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  begin_kernel();
  await_previous();
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * warps;
  const auto fetch = [&](std::int64_t t) {
    if (lane == 0 && t < rows.T) {
      if (sizeof(T) == 4) ptx::bulk_wait_read<0>();  // the row that is on its way out
      ptx::mbarrier_arrive_expect(full, row_bytes);
      ptx::bulk_load(row, static_cast<const T*>(rows.logits) + t * rows.row_stride, row_bytes, full);
    }
  };
  const std::int64_t first = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x;
  fetch(first);
  const CallFactors c = call_factors<kSoftmax>(p, dynamic_smem);
  const bool gather = needs_logits(rows);
  std::uint32_t parity = 0;
  for (std::int64_t t = first; t < rows.T; t += num_warps, parity ^= 1u) {
    // Two slots a lane wait in registers; more routes (or parity mode) go through scatter_routes().
    const bool held = rows.K <= 64 && rows.epsilon == 0.0f && p.d_weights != nullptr;
    int id[2] = {-1, -1};
    float w[2] = {}, g[2] = {}, slope[2] = {1.0f, 1.0f};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int k = lane + 32 * s;
      if (!held || k >= rows.K) continue;
      const std::int64_t i = t * rows.K + k;
      id[s] = load_id(p.loss.ids, p.loss.id_bytes, i), w[s] = p.weights[i], g[s] = p.d_weights[i];
      if (id[s] < 0 || id[s] >= E) id[s] = -1, w[s] = 0.0f;
    }
    const RowFactors factors = row_factors(p, c, dynamic_smem, t);
    ptx::mbarrier_wait(full, parity);
    const float row_max = rows.padding != nullptr && rows.padding[t] != 0 ? -kInfinity : staged_row_max(rows, row);
    if (row_max == -kInfinity || !is_fast_row<kSoftmax>(rows.score, row_max)) {
      if (sizeof(T) != 4 && lane == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
      for (int e = lane * 4; e < E; e += 128) *reinterpret_cast<float4*>(out + e) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      __syncwarp();
      generic_row<T, kSoftmax>(p, c, factors, t, out);
      ptx::fence_async_proxy();
      __syncwarp();
      fetch(t + num_warps);
      continue;
    }
    float dot = 0.0f, unit_dot = 0.0f;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (id[s] < 0) continue;
      const float x = to_float(row[id[s]]);
      if (!scalar::is_finite(x)) id[s] = -1;
      if (gather) slope[s] = log_slope(rows.score, x);
      dot = __fmaf_rn(g[s], w[s], dot), unit_dot = __fmaf_rn(g[s], unit_weight(rows, w[s]), unit_dot);
    }
    if (held) dot = warp_sum(dot), unit_dot = warp_sum(unit_dot);
    if (!held && p.d_weights != nullptr && c.softmax_all) {
      for (int k = lane; k < rows.K; k += 32) dot = __fmaf_rn(p.d_weights[t * rows.K + k], p.weights[t * rows.K + k], dot);
      dot = warp_sum(dot);
    }
    if (sizeof(T) != 4) {
      if (lane == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
    }
    const RowSums s = staged_row_sums<T, kSoftmax, true>(rows, row, factors, row_max, out);
    if (sizeof(T) != 4) fetch(t + num_warps);
    const DenseFactors d = dense_factors<kSoftmax>(rows.score, s, c.has_a, c.loss.z, p.loss_scale, c.softmax_all ? dot : 0.0f);
#pragma unroll 2
    for (int e = lane * 4; e < E; e += 128) {
      const float4 y = *reinterpret_cast<const float4*>(out + e);
      float a[4];
      factors.at4(e, a);
      *reinterpret_cast<float4*>(out + e) = make_float4(fast_gradient<kSoftmax>(d, y.x, a[0]), fast_gradient<kSoftmax>(d, y.y, a[1]),
                                                        fast_gradient<kSoftmax>(d, y.z, a[2]), fast_gradient<kSoftmax>(d, y.w, a[3]));
    }
    __syncwarp();
    if (held) {
      const float centre = weights_are_renormalised(rows) ? unit_dot : 0.0f;
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        if (id[q] >= 0) out[id[q]] += slope[q] * w[q] * (g[q] - centre);
      }
    } else if (p.d_weights != nullptr) {
      scatter_routes<T>(p, static_cast<const T*>(rows.logits) + t * rows.row_stride, t, out);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_store(p.d_logits + t * p.d_stride, out, static_cast<std::uint32_t>(E) * 4u);
      ptx::bulk_commit();
    }
    if (sizeof(T) == 4) fetch(t + num_warps);
  }
  if (lane == 0) ptx::bulk_wait_read<0>();
#endif
}

template <class T, bool kSoftmax>
void launch_score(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) {
    cudaFuncSetAttribute(router_backward_staged<T, kSoftmax>, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
    cudaFuncSetAttribute(router_backward_generic<T, kSoftmax>, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
  }
  const bool output_aligned = p.d_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.d_logits) % 16 == 0;
  if (can_stage<T>(rows, limits) && output_aligned && rows.score != kScoreSqrtSoftplus) {
    const StagedShape shape = staged_shape(limits, static_cast<std::size_t>(rows.E) * 4, staged_bytes<T>(rows.E), kStagedThreads / 32);
    const std::int64_t needed = (rows.T + shape.warps - 1) / shape.warps;
    const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * shape.blocks));
    launch_kernel(router_backward_staged<T, kSoftmax>, grid, static_cast<unsigned>(shape.warps) * 32, shape.smem, stream, true, p);
    return;
  }
  const std::size_t smem = static_cast<std::size_t>(padded_to_4(rows.E)) * sizeof(float) * (1 + kGenericThreads / 32);
  const int blocks = std::clamp(static_cast<int>(static_cast<std::size_t>(limits.shared_per_sm) / (smem + 1024)), 1, 8);
  const std::int64_t needed = (rows.T + kGenericThreads / 32 - 1) / (kGenericThreads / 32);
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * blocks));
  launch_kernel(router_backward_generic<T, kSoftmax>, grid, kGenericThreads, smem, stream, limits.compute_major >= 9, p);
}

template <class T>
void launch(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const int score = p.loss.rows.score;
  if (score == kScoreSoftmax || score == kScoreSoftmaxSelected) return launch_score<T, true>(p, limits, stream);
  launch_score<T, false>(p, limits, stream);
}

}  // namespace

void launch_router_backward_dense(LogitType type, const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch<__nv_bfloat16>(p, limits, stream);
  launch<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
