// SPDX-License-Identifier: Apache-2.0
// Launcher of the warp kernels for one logit type; each router_forward_warp_<type>.cu instantiates it.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/router/cuda/router_forward_pair.cuh"
#include "ops/router/cuda/router_forward_staged.cuh"

namespace waybill::cuda {

// Attributes and occupancy are asked for once per (kernel, device).
struct KernelLimits {
  std::atomic<int> blocks_per_sm[16] = {};
};

template <class T, int kVectors, int kMode, bool kFull>
void launch_unstaged(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  static KernelLimits cache;
  constexpr int kThreads = kUnstagedThreads<kVectors, kMode>;
  const auto kernel = router_forward_warp<T, kVectors, kMode, kFull>;
  const std::size_t smem = cta_bytes(p.rows.E, kMode);
  std::atomic<int>& blocks = cache.blocks_per_sm[limits.device & 15];
  if (blocks.load(std::memory_order_relaxed) == 0) {
    int count = 0;
    const std::size_t most = cta_bytes(kVectors * 128, kMode);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kThreads, most);
    blocks.store(std::max(count, 1), std::memory_order_relaxed);
  }
  const std::int64_t needed = (p.rows.T + kThreads / 32 - 1) / (kThreads / 32);
  const std::int64_t resident = static_cast<std::int64_t>(limits.num_sms) * blocks.load(std::memory_order_relaxed);
  const auto grid = static_cast<unsigned>(std::max<std::int64_t>(1, std::min(needed, resident)));
  launch_kernel(kernel, grid, kThreads, smem, stream, limits.compute_major >= 9, p);
}

template <class T, int kVectors, int kMode>
void launch_staged(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr std::size_t kFixed = staged_cta_bytes<kVectors>(kMode), kPerWarp = staged_warp_bytes<T, kVectors>();
  const std::size_t available = static_cast<std::size_t>(limits.shared_per_block) - 1024 - kFixed;  // 1 KiB: static shared memory
  const int warps = std::min<int>(static_cast<int>(available / kPerWarp), kStagedMaxThreads<kVectors, kMode> / 32);
  static KernelLimits cache;
  const auto kernel = router_forward_staged<T, kVectors, kMode>;
  std::atomic<int>& done = cache.blocks_per_sm[limits.device & 15];
  if (done.load(std::memory_order_relaxed) == 0) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
    done.store(1, std::memory_order_relaxed);
  }
  const std::int64_t needed = (p.rows.T + warps - 1) / warps;
  const auto grid = static_cast<unsigned>(std::max<std::int64_t>(1, std::min<std::int64_t>(needed, limits.num_sms)));
  launch_kernel(kernel, grid, static_cast<unsigned>(warps) * 32, kFixed + static_cast<std::size_t>(warps) * kPerWarp, stream, true, p);
}

template <class T, int kVectors>
void launch_tier(const RouterForwardParams& p, int mode, const DeviceLimits& limits, cudaStream_t stream) {
  if constexpr (kVectors > 8) {
    if (mode == kPlain) return launch_staged<T, kVectors, kPlain>(p, limits, stream);
    return launch_staged<T, kVectors, kBiased>(p, limits, stream);
  } else if (p.rows.E == kVectors * 128) {
    if (mode == kPlain) return launch_unstaged<T, kVectors, kPlain, true>(p, limits, stream);
    if (mode == kBiased) return launch_unstaged<T, kVectors, kBiased, true>(p, limits, stream);
    return launch_unstaged<T, kVectors, kExact, true>(p, limits, stream);
  } else {
    if (mode == kPlain) return launch_unstaged<T, kVectors, kPlain, false>(p, limits, stream);
    return launch_unstaged<T, kVectors, kExact, false>(p, limits, stream);
  }
}

// Which of WarpMode the problem needs.
inline int warp_mode(const RouterForwardParams& p) {
  const bool has_groups = p.num_kept < p.num_groups, has_bias = p.rows.bias != nullptr || p.rows.mask != nullptr;
  return has_groups || (has_bias && p.rows.score == kScoreSqrtSoftplus) ? kExact : (has_bias ? kBiased : kPlain);
}

// Rows of up to 512 experts and longer ones live in two translation units a type: each compiles in seconds.
template <class T>
void launch_warp_short(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (takes_pairs(p, warp_mode(p))) return launch_pairs<T>(p, limits, stream);
  switch (router_tuning::vector_tier(p.rows.E)) {
    case 1:
      return launch_tier<T, 1>(p, warp_mode(p), limits, stream);
    case 2:
      return launch_tier<T, 2>(p, warp_mode(p), limits, stream);
    default:
      return launch_tier<T, 4>(p, warp_mode(p), limits, stream);
  }
}

template <class T>
void launch_warp_long(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  switch (router_tuning::vector_tier(p.rows.E)) {
    case 8:
      return launch_tier<T, 8>(p, warp_mode(p), limits, stream);
    case 18:
      return launch_tier<T, 18>(p, warp_mode(p), limits, stream);
    default:
      return launch_tier<T, 64>(p, warp_mode(p), limits, stream);
  }
}

}  // namespace waybill::cuda
