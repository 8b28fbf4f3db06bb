// SPDX-License-Identifier: Apache-2.0
// Router backward with a dense part (softmax over all experts, or any loss): d_weights [T, K] and losses -> d_logits [T, E] fp32.
// One warp per token; logits are read once and d_logits is written once. Bytes: T * E * (sizeof(logit) + 4) + T * K * (id + 8).
//
// staged (sm_90, aligned rows): a bulk copy brings the row into shared memory; maximum (softmax), then exponentials and sums in place, then
//   gradients in place, the routes' part added at K entries; a bulk copy takes the row out. 16-bit logits have a row of their own. kBuffers 2:
//   the next row is on its way while this one leaves.
// generic: any alignment and score; the row is read from global memory at each pass (from L2 after the first).
#include <algorithm>
#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_backward_dense.cuh"
#include "ops/router/cuda/router_staged_rows.cuh"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {
namespace {

constexpr int kGenericThreads = 128;  // four CTAs an SM: with no bound the compiler spills around the call of generic_row
template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kGenericThreads, 4) router_backward_generic(const __grid_constant__ RouterBackwardParams p) {
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

// Threads of a CTA, two CTAs an SM. Long rows leave room for 11 warps, which may then have more registers.
constexpr int kStagedThreads = 512, kLongThreads = 352;
// Bytes of one warp: the output row, the input row where the types differ.
template <class T>
constexpr std::size_t staged_bytes(int E) {
  return static_cast<std::size_t>(E) * 4 + (sizeof(T) == 4 ? 0 : (static_cast<std::size_t>(E) * sizeof(T) + 15) / 16 * 16);
}

template <class T, bool kSoftmax, int kBuffers, int kThreads>
__global__ void __launch_bounds__(kThreads, 2) router_backward_staged(const __grid_constant__ RouterBackwardParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float dynamic_smem[];  // a [E], then kBuffers times staged_bytes per warp
  __shared__ std::uint64_t barriers[kThreads / 32 * kBuffers];
  constexpr int kUnroll = kThreads == kLongThreads ? 3 : 2;
  const RouterRows& rows = p.loss.rows;
  const int E = rows.E, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, warps = static_cast<int>(blockDim.x) >> 5;
  float* const buffers = dynamic_smem + E + static_cast<std::size_t>(warp) * kBuffers * (staged_bytes<T>(E) / 4);
  std::uint64_t* const full = barriers + warp * kBuffers;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(E) * sizeof(T);
  if (lane == 0) {
#pragma unroll
    for (int b = 0; b < kBuffers; ++b) ptx::mbarrier_init(full + b, 1);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  begin_kernel();
  CallFactors c;
  constexpr bool kEarly = kThreads == kLongThreads;  // the others have no registers for it
  AuxCounts<8> aux_counts;
  if (kEarly && p.loss.valid_tokens == nullptr) c.loss = loss_factors(p.loss, false);
  await_previous();
  if constexpr (kEarly) {
    if (p.loss.valid_tokens != nullptr) c.loss = late_loss_factors(p.loss);
    aux_counts = ask_for_aux_counts<8>(p.loss, dynamic_smem);
  }
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * warps;
  const auto row_in = [](float* buffer, int E) { return sizeof(T) == 4 ? reinterpret_cast<T*>(buffer) : reinterpret_cast<T*>(buffer + E); };
  const auto fetch = [&](std::int64_t t, int b) {
    if (lane == 0 && t < rows.T) {
      if (sizeof(T) == 4) ptx::bulk_wait_read<0>();  // the row that is on its way out
      ptx::mbarrier_arrive_expect(full + b, row_bytes);
      ptx::bulk_load(row_in(buffers + b * E, E), static_cast<const T*>(rows.logits) + t * rows.row_stride, row_bytes, full + b);
    }
  };
  const std::int64_t first = static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x;
  fetch(first, 0);
  if constexpr (kEarly) {
    c.loss.aux *= loss_weight(p.loss, 0), c.loss.z *= loss_weight(p.loss, 2);
    set_call_factors<kSoftmax>(p, c);
    store_aux_factors(p.loss, c.loss.aux, aux_counts, dynamic_smem);
  } else {
    c = call_factors<kSoftmax>(p, dynamic_smem);
  }
  const bool gather = needs_logits(rows);
  std::uint32_t turn = 0;
  for (std::int64_t t = first; t < rows.T; t += num_warps, ++turn) {
    const int b = static_cast<int>(turn % kBuffers);
    float* const out = buffers + b * E;
    T* const row = row_in(out, E);
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
    ptx::mbarrier_wait(full + b, turn / kBuffers & 1u);
    // Rows that generic_row() takes: padding, no logit, NaN or +Inf, sigmoid rows of extreme logits.
    bool ordinary = rows.padding == nullptr || rows.padding[t] == 0;
    const bool renormalise = weights_are_renormalised(rows);
    float dot = 0.0f;  // d_weights times weights; without the scaling factor where they are renormalised
    float shift = kSoftmax ? -kInfinity : 0.0f;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      if (id[q] < 0) continue;
      const float x = to_float(row[id[q]]);
      if (!scalar::is_finite(x)) {
        id[q] = -1;
      } else if (kSoftmax) {
        shift = fmaxf(shift, x);
      }
      if (gather) slope[q] = log_slope(rows.score, x);
      dot = __fmaf_rn(g[q], renormalise ? unit_weight(rows, w[q]) : w[q], dot);
    }
    if (!held && p.d_weights != nullptr && c.softmax_all) {
      for (int k = lane; k < rows.K; k += 32) dot = __fmaf_rn(p.d_weights[t * rows.K + k], p.weights[t * rows.K + k], dot);
    }
    dot = warp_sum(dot);
    // Any shift that lets no exponential overflow: the best chosen logit, which is the largest one or near it; rows without a route look for theirs.
    if (kSoftmax && ordinary) {
      shift = warp_max(shift);
      if (shift == -kInfinity) shift = staged_row_max<T, kUnroll>(row, E);
      ordinary = shift > -kInfinity && shift < kInfinity;
    }
    if (sizeof(T) != 4 && lane == 0) ptx::bulk_wait_read<0>();
    __syncwarp();
    RowSums s;
    if (ordinary) {
      if (!c.has_a) {
        s = staged_row_sums<T, kSoftmax, kNoA, kUnroll>(row, factors, shift, out);
      } else if (factors.sequence_row == nullptr) {
        s = staged_row_sums<T, kSoftmax, kSharedA, kUnroll>(row, factors, shift, out);
      } else {
        s = staged_row_sums<T, kSoftmax, kSequenceA, 1>(row, factors, shift, out);
      }
      // Sigmoid: the largest logit lies in [-37, 44], so that (1 + t) (1 + t') does not overflow.
      ordinary = s.exp_sum >= 9.4e-14f && s.exp_sum <= 1.6e19f;
    }
    if (sizeof(T) != 4) fetch(t + num_warps, 0);
    if (kBuffers == 2) fetch(t + num_warps, b ^ 1);  // the other buffer's row has left by now, most likely
    if (!ordinary) {
      for (int e = lane * 4; e < E; e += 128) *reinterpret_cast<float4*>(out + e) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      __syncwarp();
      generic_row<T, kSoftmax>(p, c, factors, t, out);
      ptx::fence_async_proxy();
      __syncwarp();
      if (sizeof(T) == 4 && kBuffers == 1) fetch(t + num_warps, 0);
      continue;
    }
    const DenseFactors d = dense_factors<kSoftmax>(rows.score, s, c.has_a, c.loss.z, p.loss_scale, c.softmax_all ? dot : 0.0f);
    if (!c.has_a) {
      staged_gradients<kSoftmax, kNoA, kUnroll>(d, factors, out);
    } else if (factors.sequence_row == nullptr) {
      staged_gradients<kSoftmax, kSharedA, kUnroll>(d, factors, out);
    } else {
      staged_gradients<kSoftmax, kSequenceA, 1>(d, factors, out);
    }
    __syncwarp();
    if (held) {
      const float centre = renormalise ? dot : 0.0f;
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
    if (sizeof(T) == 4 && kBuffers == 1) fetch(t + num_warps, 0);
  }
  if (lane == 0) ptx::bulk_wait_read<0>();
#endif
}

template <class T>
inline constexpr int kMostBuffers = sizeof(T) == 4 ? 2 : 1;

template <class T, bool kSoftmax>
void launch_score(const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.loss.rows;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) {
    for (const auto kernel : {router_backward_staged<T, kSoftmax, 1, kStagedThreads>, router_backward_staged<T, kSoftmax, 1, kLongThreads>,
                              router_backward_staged<T, kSoftmax, kMostBuffers<T>, kStagedThreads>}) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
    }
    cudaFuncSetAttribute(router_backward_generic<T, kSoftmax>, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
  }
  const bool output_aligned = p.d_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.d_logits) % 16 == 0;
  if (can_stage<T>(rows, limits) && output_aligned && rows.score != kScoreSqrtSoftplus) {
    const int buffers = sizeof(T) == 4 ? router_tuning::backward_buffers(rows.E) : 1;
    const StagedShape shape =
        staged_shape(limits, static_cast<std::size_t>(rows.E) * 4, staged_bytes<T>(rows.E) * static_cast<std::size_t>(buffers), kStagedThreads / 32);
    const std::int64_t needed = (rows.T + shape.warps - 1) / shape.warps;
    const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * shape.blocks));
    const auto kernel = buffers == 2 ? router_backward_staged<T, kSoftmax, kMostBuffers<T>, kStagedThreads>
                                     : (shape.warps <= kLongThreads / 32 ? router_backward_staged<T, kSoftmax, 1, kLongThreads>
                                                                         : router_backward_staged<T, kSoftmax, 1, kStagedThreads>);
    launch_kernel(kernel, grid, static_cast<unsigned>(shape.warps) * 32, shape.smem, stream, true, p);
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
