// SPDX-License-Identifier: Apache-2.0
// Launcher of the warp kernels for one logit type; each router_forward_warp_<type>.cu instantiates it.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/router/cuda/router_forward_warp.cuh"

namespace waybill::cuda {

// Attributes and occupancy are asked for once per (kernel, device).
struct KernelLimits {
  std::atomic<int> blocks_per_sm[16] = {};
};

template <class T, int kVectors, int kMode>
void launch_unstaged(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  static KernelLimits cache;
  const auto kernel = router_forward_warp<T, kVectors, kMode>;
  const std::size_t smem = kMode == kPlain ? 0 : (static_cast<std::size_t>(p.rows.E) * sizeof(float) + 15) / 16 * 16;
  std::atomic<int>& blocks = cache.blocks_per_sm[limits.device & 15];
  if (blocks.load(std::memory_order_relaxed) == 0) {
    int count = 0;
    const std::size_t most = kMode == kPlain ? 0 : kVectors * 128 * sizeof(float);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, kUnstagedThreads, most);
    blocks.store(std::max(count, 1), std::memory_order_relaxed);
  }
  const std::int64_t needed = (p.rows.T + kUnstagedThreads / 32 - 1) / (kUnstagedThreads / 32);
  const std::int64_t resident = static_cast<std::int64_t>(limits.num_sms) * blocks.load(std::memory_order_relaxed);
  const auto grid = static_cast<unsigned>(std::max<std::int64_t>(1, std::min(needed, resident)));
  kernel<<<grid, kUnstagedThreads, smem, stream>>>(p);
}

// False where the rows cannot be staged: alignment, device, or shared memory for fewer than 3 warps.
template <class T, int kVectors, int kMode>
bool launch_staged(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const std::size_t row_bytes = static_cast<std::size_t>(p.rows.E) * sizeof(T);
  if (limits.compute_major < 9 || row_bytes % 16 != 0 || static_cast<std::size_t>(p.rows.row_stride) * sizeof(T) % 16 != 0 ||
      reinterpret_cast<std::uintptr_t>(p.rows.logits) % 16 != 0) {
    return false;
  }
  const std::size_t fixed = kMode == kPlain ? 0 : static_cast<std::size_t>(p.rows.E) * sizeof(float);
  const std::size_t available = static_cast<std::size_t>(limits.shared_per_block) - 1024 - fixed;  // 1 KiB: static shared memory
  const std::size_t per_warp = staged_warp_bytes(p.rows.E, sizeof(T));
  const int warps = std::min<int>(static_cast<int>(available / per_warp), kStagedMaxThreads<kVectors> / 32);
  if (warps < 3) return false;
  static KernelLimits cache;
  const auto kernel = router_forward_staged<T, kVectors, kMode>;
  std::atomic<int>& done = cache.blocks_per_sm[limits.device & 15];
  if (done.load(std::memory_order_relaxed) == 0) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 1024);
    done.store(1, std::memory_order_relaxed);
  }
  const std::int64_t needed = (p.rows.T + warps - 1) / warps;
  const auto grid = static_cast<unsigned>(std::max<std::int64_t>(1, std::min<std::int64_t>(needed, limits.num_sms)));
  kernel<<<grid, warps * 32, fixed + static_cast<std::size_t>(warps) * per_warp, stream>>>(p);
  return true;
}

template <class T, int kVectors>
void launch_tier(const RouterForwardParams& p, int mode, bool stage, const DeviceLimits& limits, cudaStream_t stream) {
  if constexpr (kVectors > 8) {
    if (stage && (mode == kPlain ? launch_staged<T, kVectors, kPlain>(p, limits, stream) : launch_staged<T, kVectors, kBiased>(p, limits, stream))) return;
  }
  if constexpr (kVectors <= 18) {
    if (mode == kPlain) return launch_unstaged<T, kVectors, kPlain>(p, limits, stream);
    if (mode == kBiased) return launch_unstaged<T, kVectors, kBiased>(p, limits, stream);
  }
  if constexpr (kVectors <= 8) launch_unstaged<T, kVectors, kExact>(p, limits, stream);
}

template <class T>
void launch_warp_forward(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const bool has_groups = p.num_kept < p.num_groups, has_bias = p.rows.bias != nullptr || p.rows.mask != nullptr;
  const int mode = has_groups || (has_bias && p.rows.score == kScoreSqrtSoftplus) ? kExact : (has_bias ? kBiased : kPlain);
  const bool stage = static_cast<std::size_t>(p.rows.E) * sizeof(T) >= static_cast<std::size_t>(router_tuning::kStageRowBytes);
  switch (router_tuning::vector_tier(p.rows.E)) {
    case 1: return launch_tier<T, 1>(p, mode, stage, limits, stream);
    case 2: return launch_tier<T, 2>(p, mode, stage, limits, stream);
    case 4: return launch_tier<T, 4>(p, mode, stage, limits, stream);
    case 8: return launch_tier<T, 8>(p, mode, stage, limits, stream);
    case 18: return launch_tier<T, 18>(p, mode, stage, limits, stream);
    default: return launch_tier<T, 64>(p, mode, stage, limits, stream);
  }
}

}  // namespace waybill::cuda
