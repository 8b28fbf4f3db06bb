// SPDX-License-Identifier: Apache-2.0
// Router forward, one CTA per token: the portable path (sm_80 and up) and the home of every shape that the warp kernel refuses:
// any E <= 8192, any K <= E, any alignment, any groups. No speed claim.
//
//   Keys of the whole row go to shared memory as (key, id) words, are sorted by a bitonic network, and the first K are taken.
//   Grid: persistent, one row a CTA at a time. Shared memory: 8 bytes an expert (rounded up to a power of two) plus the groups.
// ptxas: may spill router_forced: replay and forced balance are not hot
#include <algorithm>
#include <atomic>

#include "core/balanced_order.h"
#include "ops/router/cuda/router_counts.cuh"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float block_sum(float v, float* scratch) {  // fixed order: butterfly, then warps ascending
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) total += scratch[w];
  return total;
}

__device__ float block_max(float v, float* scratch) {
  v = warp_max(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
  __syncthreads();
  float largest = scratch[0];
  for (int w = 1; w < kThreads / 32; ++w) largest = fmaxf(largest, scratch[w]);
  return largest;
}

// Composite of one group: candidates that enter its score, score, id (lower id first). 0 without a candidate. One thread.
__device__ std::uint64_t group_composite(const RouterForwardParams& p, const std::uint64_t* keys, int group) {
  const int size = p.rows.E / p.num_groups, begin = group * size;
  std::uint64_t last = ~std::uint64_t{0};  // best so far are those above; take the next below it
  std::uint32_t count = 0;
  float score = 0.0f;
  for (int n = 0; n < p.group_best; ++n) {
    std::uint64_t best = 0;
    for (int e = begin; e < begin + size; ++e) {
      const std::uint64_t c = keys[e];
      if (c < last && c > best && (c >> 32) != 0) best = c;
    }
    if (best == 0) break;
    const float key = value_of(static_cast<std::uint32_t>(best >> 32));
    score = count == 0 ? key : scalar::add(score, key);
    last = best;
    ++count;
  }
  return count == 0 ? 0 : (static_cast<std::uint64_t>(count) << 46) | (static_cast<std::uint64_t>(scalar::order_key(score)) << 14) | (0x3fffu - group);
}

// Sorts n (a power of two) words descending.
__device__ void bitonic_sort(std::uint64_t* keys, int n) {
  for (int size = 2; size <= n; size <<= 1) {
    for (int step = size >> 1; step > 0; step >>= 1) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < n / 2; i += kThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const std::uint64_t a = keys[low], b = keys[high];
        const bool descending = (low & size) == 0;
        if ((a < b) == descending) keys[low] = b, keys[high] = a;
      }
    }
  }
  __syncthreads();
}

template <class T>
__global__ void __launch_bounds__(kThreads) router_forward_block(const __grid_constant__ RouterForwardParams p, int padded) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  __shared__ float scratch[kThreads / 32];
  __shared__ int flags[2];                                               // nonfinite, candidates
  std::uint64_t* keys = reinterpret_cast<std::uint64_t*>(dynamic_smem);  // [padded]
  std::uint64_t* groups = keys + padded;                                 // [G] when grouped; else x [K] of the chosen
  float* chosen_x = reinterpret_cast<float*>(keys + padded);
  const RouterRows& rows = p.rows;
  const bool is_grouped = p.num_kept < p.num_groups;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  const int tid = static_cast<int>(threadIdx.x);
  for (std::int64_t t = blockIdx.x; t < rows.T; t += gridDim.x) {
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    const bool is_padding = rows.padding != nullptr && rows.padding[t] != 0;
    __syncthreads();
    if (tid < 2) flags[tid] = 0;
    __syncthreads();
    float row_max = -kInfinity;
    int nonfinite = 0, candidates = 0;
    for (int e = tid; e < padded; e += kThreads) {
      std::uint32_t key = 0;
      if (e < rows.E && !is_padding) {
        const float x = to_float(row[e]);
        const float bias = effective_bias(rows, e);
        nonfinite |= !scalar::is_finite(x);
        key = exact_key(rows.score, x, bias);
        if (scalar::is_finite(x) && !is_masked(bias)) row_max = fmaxf(row_max, x);
      }
      keys[e] = key == 0 ? 0 : composite_of(key, static_cast<std::uint32_t>(e));
    }
    if (nonfinite != 0) flags[0] = 1;
    __syncthreads();
    float row_sum = 1.0f;
    if (need_sum) {
      row_max = block_max(row_max, scratch);
      float sum = 0.0f;
      for (int e = tid; e < rows.E && !is_padding; e += kThreads) {
        const float x = to_float(row[e]);
        if (scalar::is_finite(x) && !is_masked(effective_bias(rows, e))) sum += scalar::exp(scalar::sub(x, row_max));
      }
      row_sum = block_sum(sum, scratch);
    }
    if (is_grouped) {
      for (int g = tid; g < p.num_groups; g += kThreads) groups[g] = group_composite(p, keys, g);
      __syncthreads();
      for (int e = tid; e < rows.E; e += kThreads) {
        const std::uint64_t mine = groups[e / (rows.E / p.num_groups)];
        int rank = 0;
        for (int g = 0; g < p.num_groups; ++g) rank += groups[g] > mine;
        if (rank >= p.num_kept) keys[e] = 0;
      }
      __syncthreads();
    }
    bitonic_sort(keys, padded);
    for (int k = tid; k < rows.K; k += kThreads) {
      const std::uint64_t composite = keys[k];
      const int id = composite == 0 ? -1 : static_cast<int>(id_of(composite));
      candidates += id >= 0;
      chosen_x[k] = id < 0 ? __uint_as_float(0x7fc00000u) : to_float(row[id]);
      if (p.ids != nullptr) store_id(p.ids, p.id_bytes, t * rows.K + k, id);
      if (p.scratch.counts != nullptr && id >= 0) ptx::red_add(p.scratch.counts + id, 1u);
    }
    if (candidates != 0) atomicAdd(&flags[1], candidates);
    __syncthreads();
    if (tid < 32 && p.ids != nullptr) row_weights(rows, chosen_x, row_max, row_sum, p.weights + t * rows.K);
    if (tid < 32 && !is_padding) {
      count_nonfinite_rows(p.status, flags[0]);
      count_short_rows(p.status, flags[1] < rows.K);
    }
  }
  finish_counts(p, draw_number(p));
}

// Forced balance and replay: ids are given, only weights are computed. One warp per token.
template <class T>
__global__ void __launch_bounds__(kThreads) router_forced(const __grid_constant__ RouterForwardParams p, const __grid_constant__ BalancedOrder order) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  const RouterRows& rows = p.rows;
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
  float* x = reinterpret_cast<float*>(dynamic_smem) + static_cast<std::size_t>(warp) * rows.K;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + warp; t < rows.T; t += num_warps) {
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    const bool is_padding = rows.padding != nullptr && rows.padding[t] != 0;
    float row_max = -kInfinity, row_sum = 0.0f;
    bool nonfinite = false;
    for (int e = lane; e < rows.E && !is_padding; e += 32) {
      const float v = to_float(row[e]);
      nonfinite |= !scalar::is_finite(v);
      if (scalar::is_finite(v) && !(rows.mask != nullptr && rows.mask[e] != 0)) row_max = fmaxf(row_max, v);
    }
    row_max = warp_max(row_max);
    if (rows.score == kScoreSoftmax && rows.renormalise == 0) {
      for (int e = lane; e < rows.E && !is_padding; e += 32) {
        const float v = to_float(row[e]);
        if (scalar::is_finite(v) && !(rows.mask != nullptr && rows.mask[e] != 0)) row_sum += scalar::exp(scalar::sub(v, row_max));
      }
      row_sum = warp_sum(row_sum);
    }
    bool is_short = false;
    std::uint32_t bad = 0;
    for (int k = lane; k < rows.K; k += 32) {
      const std::int64_t i = t * rows.K + k;
      std::int32_t id = -1;
      if (!is_padding) {
        id = p.replay_ids != nullptr ? load_id(p.replay_ids, p.replay_bytes, i) : order.expert((p.token_offset + t) * rows.K + k);
        const bool is_bad = id < -1 || id >= rows.E;
        bad += is_bad;
        if (is_bad || id < 0 || (rows.mask != nullptr && rows.mask[id] != 0) || !scalar::is_finite(to_float(row[id]))) id = -1;
        is_short |= id < 0;
      }
      x[k] = id < 0 ? __uint_as_float(0x7fc00000u) : to_float(row[id]);
      store_id(p.ids, p.id_bytes, i, id);
      if (p.scratch.counts != nullptr && id >= 0) ptx::red_add(p.scratch.counts + id, 1u);
    }
    __syncwarp();
    row_weights(rows, x, row_max, row_sum, p.weights + t * rows.K);
    count_nonfinite_rows(p.status, __any_sync(ptx::kFullWarp, nonfinite));
    count_short_rows(p.status, __any_sync(ptx::kFullWarp, is_short));
    count_bad_ids(p.status, static_cast<int>(ptx::redux_add(bad)));
    __syncwarp();
  }
  finish_counts(p, draw_number(p));
}

template <class T>
void launch_block(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  int padded = 2;
  while (padded < p.rows.E) padded <<= 1;
  const std::size_t smem = static_cast<std::size_t>(padded) * 8 + static_cast<std::size_t>(std::max(p.num_groups * 8, p.rows.K * 4));
  const auto kernel = router_forward_block<T>;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
  const int resident = std::clamp(static_cast<int>(static_cast<std::size_t>(limits.shared_per_sm) / (smem + 2048)), 1, 8);
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(p.rows.T, 1, static_cast<std::int64_t>(limits.num_sms) * resident));
  kernel<<<grid, kThreads, smem, stream>>>(p, padded);
}

template <class T>
void launch_forced(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  int warps = kThreads / 32;
  while (warps > 1 && static_cast<std::size_t>(warps) * static_cast<std::size_t>(p.rows.K) * 4 > 48 * 1024) warps >>= 1;
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>((p.rows.T + warps - 1) / warps, 1, static_cast<std::int64_t>(limits.num_sms) * 4));
  router_forced<T><<<grid, warps * 32, static_cast<std::size_t>(warps) * static_cast<std::size_t>(p.rows.K) * 4, stream>>>(p, BalancedOrder(p.rows.E));
}

}  // namespace

void launch_router_forward_block(LogitType type, const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch_block<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch_block<__nv_bfloat16>(p, limits, stream);
  launch_block<__half>(p, limits, stream);
}

void launch_router_forced(LogitType type, const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch_forced<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch_forced<__nv_bfloat16>(p, limits, stream);
  launch_forced<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
