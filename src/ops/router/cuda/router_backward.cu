// SPDX-License-Identifier: Apache-2.0
// Router backward without a dense part (no losses, weights of a few experts): d_weights [T, K] -> d_logits [T, E] fp32, zero but for K
// entries a row. kLanes lanes a token, so that small K fills the warp; a warp's rows are assembled in shared memory, which is zero
// but for the routes, and leave in one bulk copy (sm_90, aligned rows) or in 16-byte stores. Logits are read at the K ids only, and
// not at all for softmax. Sigmoid: where the forward pass kept weight / score of the row (factors), 1 - score comes from the weight
// alone unless it is below kSmallestRest, where the rounding of the score would show. Bytes: T * E * 4 written, T * K * (id + 8) read.
#include <algorithm>
#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_backward_routes.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Sigmoid's log-slope is 1 - score = (factor - weight) / factor; the difference is exact from score 1/2 on, so its relative error is that
// of the weight's last place over the rest: 2 to 6e-6 at the limit.
constexpr float kSmallestRest = 0.04f;
__device__ __forceinline__ bool rest_is_known(float weight, float factor) { return factor > 0.0f && factor - weight >= kSmallestRest * factor; }

// Slots a lane holds in registers; rows with more routes take scatter_routes().
template <class T, int kLanes, int kSlots>
__global__ void __launch_bounds__(kThreads, kSlots == 1 ? 4 : 3)
    router_backward_sparse(const __grid_constant__ RouterBackwardParams p, int warps_used, bool bulk) {
  extern __shared__ __align__(128) float dynamic_smem[];
  constexpr int kRows = 32 / kLanes;
  const RouterRows& rows = p.loss.rows;
  const int E = rows.E, padded = padded_to_4(E);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, sub = lane % kLanes, sub_row = lane / kLanes;
  float* buffer = dynamic_smem + static_cast<std::size_t>(warp) * kRows * padded;  // [kRows, padded]
  float* mine = buffer + static_cast<std::size_t>(sub_row) * padded;
  const bool renormalise = weights_are_renormalised(rows), gather = needs_logits(rows) || rows.epsilon > 0.0f;
  const bool aligned = is_aligned_output(p);
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * warps_used, num_groups = (rows.T + kRows - 1) / kRows;
  begin_kernel();
  for (int e = lane * 4; e < kRows * padded; e += 128) *reinterpret_cast<float4*>(buffer + e) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  await_previous();
  // Slots of one group of rows; the next group's are loaded before this one's are used.
  struct Slots {
    int id[kSlots];
    float w[kSlots], g[kSlots], x[kSlots], factor;
  };
  const bool held = rows.K <= kLanes * kSlots;
  const auto is_active = [&](std::int64_t t) { return t < rows.T && p.d_weights != nullptr && !(rows.padding != nullptr && rows.padding[t] != 0); };
  const auto load = [&](std::int64_t group, Slots& n) {
    const std::int64_t t = group * kRows + sub_row;
    const bool active = held && is_active(t);
    n.factor = active && p.factors != nullptr && rows.epsilon == 0.0f ? p.factors[t] : 0.0f;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int k = sub + s * kLanes;
      const std::int64_t i = t * rows.K + k;
      const bool has = active && k < rows.K;
      n.id[s] = has ? load_id(p.loss.ids, p.loss.id_bytes, i) : -1;
      n.w[s] = has ? p.weights[i] : 0.0f, n.g[s] = has ? p.d_weights[i] : 0.0f;
    }
  };
  const auto gather_logits = [&](std::int64_t group, Slots& n) {
    const T* row = static_cast<const T*>(rows.logits) + (group * kRows + sub_row) * rows.row_stride;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (n.id[s] < 0 || n.id[s] >= E || (rows.mask != nullptr && rows.mask[n.id[s]] != 0)) n.id[s] = -1, n.w[s] = 0.0f;
      n.x[s] = gather && n.id[s] >= 0 && !rest_is_known(n.w[s], n.factor) ? to_float(row[n.id[s]]) : 0.0f;
    }
  };
  const std::int64_t first_group = static_cast<std::int64_t>(blockIdx.x) * warps_used + warp;
  Slots next;
  load(first_group, next);
  for (std::int64_t group = first_group; group < num_groups; group += num_warps) {
    const std::int64_t t = group * kRows + sub_row;
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    const bool active = is_active(t);
    Slots now = next;
    gather_logits(group, now);
    load(group + num_warps, next);
    int(&id)[kSlots] = now.id;
    const auto slope_of = [&](int s) {
      return rest_is_known(now.w[s], now.factor) ? (now.factor - now.w[s]) * ptx::rcp_approx(now.factor) : log_slope(rows.score, now.x[s]);
    };
    float(&w)[kSlots] = now.w, (&g)[kSlots] = now.g, (&x)[kSlots] = now.x;
    __syncwarp();
    if (held) {
      float dot = 0.0f;
      bool any_score = false;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        dot = __fmaf_rn(unit_weight(rows, w[s]), g[s], dot);
        if (rows.epsilon > 0.0f && id[s] >= 0) any_score |= selection_score(rows.score, x[s]) != 0.0f;
      }
#pragma unroll
      for (int step = kLanes / 2; step > 0; step >>= 1) dot += __shfl_xor_sync(ptx::kFullWarp, dot, step);
      bool is_constant = false;
      if (rows.epsilon > 0.0f) {
        const unsigned lanes = kLanes == 32 ? 0xffffffffu : ((1u << (kLanes & 31)) - 1u) << (sub_row * kLanes & 31);
        is_constant = (__ballot_sync(ptx::kFullWarp, any_score) & lanes) == 0;
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (id[s] >= 0 && !is_constant && scalar::is_finite(x[s])) mine[id[s]] = slope_of(s) * w[s] * (g[s] - (renormalise ? dot : 0.0f));
      }
    } else if (active) {
      scatter_routes<T>(p, row, t, mine);
    }
    const std::int64_t first = group * kRows;
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kRows), rows.T - first));
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (bulk) {
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        if (p.d_stride == E) {
          ptx::bulk_store(p.d_logits + first * p.d_stride, buffer, static_cast<std::uint32_t>(count * E) * 4u);
        } else {
          for (int r = 0; r < count; ++r)
            ptx::bulk_store(p.d_logits + (first + r) * p.d_stride, buffer + static_cast<std::size_t>(r) * padded, static_cast<std::uint32_t>(E) * 4u);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
    } else
#endif
    {
      __syncwarp();
      for (int r = 0; r < count; ++r) {
        float* out = p.d_logits + (first + r) * p.d_stride;
        for (int e = lane * 4; e < E; e += 128) {
          const float4 v = *reinterpret_cast<const float4*>(buffer + static_cast<std::size_t>(r) * padded + e);
          store4(out + e, v.x, v.y, v.z, v.w, aligned, e, E);
        }
      }
    }
    __syncwarp();
    if (group + num_warps >= num_groups) break;
    if (held) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (id[s] >= 0) mine[id[s]] = 0.0f;
      }
    } else if (active) {
      clear_routes(p, t, mine);
    }
    __syncwarp();
  }
}

template <class T, int kLanes, int kSlots>
void launch_lanes(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  constexpr int kRows = 32 / kLanes;
  const std::size_t per_warp = static_cast<std::size_t>(kRows) * padded_to_4(rows.E) * sizeof(float);
  const auto available = static_cast<std::size_t>(limits.shared_per_block - 1024);
  const int warps = static_cast<int>(std::clamp<std::size_t>(available / per_warp, 1, kWarps));
  const std::size_t smem = per_warp * static_cast<std::size_t>(warps);
  const auto kernel = router_backward_sparse<T, kLanes, kSlots>;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
  const bool bulk = limits.compute_major >= 9 && rows.E % 4 == 0 && p.d_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.d_logits) % 16 == 0;
  const std::int64_t groups = (rows.T + kRows - 1) / kRows, needed = (groups + warps - 1) / warps;
  const int resident = std::clamp(static_cast<int>(static_cast<std::size_t>(limits.shared_per_sm) / (smem + 1024)), 1, 2048 / kThreads);
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * resident));
  launch_kernel(kernel, grid, static_cast<unsigned>(warps) * 32, smem, stream, limits.compute_major >= 9, p, warps, bulk);
}

template <class T>
void launch(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  if (rows.K <= 8 && rows.E <= 1024) return launch_lanes<T, 8, 1>(p, limits, stream);
  if (rows.K <= 16 && rows.E <= 1024) return launch_lanes<T, 16, 1>(p, limits, stream);
  launch_lanes<T, 32, 2>(p, limits, stream);
}

}  // namespace

void launch_router_backward(LogitType type, const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  const bool has_loss = p.loss.aux_coefficient != 0.0f || p.loss.sequence_coefficient != 0.0f || p.loss.z_coefficient != 0.0f;
  if (has_loss || (rows.score == kScoreSoftmax && rows.renormalise == 0)) return launch_router_backward_dense(type, p, limits, stream);
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch<__nv_bfloat16>(p, limits, stream);
  launch<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
