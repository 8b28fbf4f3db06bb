// SPDX-License-Identifier: Apache-2.0
// Tables and zeroed counts of a product that widens its operands itself. CTA 0's first warp scans the groups, 32 at a time; the other CTAs clear.
#include "core/cuda/ptx.cuh"
#include "ops/gemm/cuda/widened_params.h"

namespace waybill::cuda {
namespace {

__device__ __forceinline__ int scan_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(ptx::kFullWarp, value, step);
    if (lane >= step) value += below;
  }
  return value;
}
__device__ __forceinline__ int scan_max(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(ptx::kFullWarp, value, step);
    if (lane >= step) value = max(value, below);
  }
  return value;
}

__global__ void __launch_bounds__(256) widened_setup(const WidenedSetup p) {
  const int lane = static_cast<int>(threadIdx.x);
  if (blockIdx.x > 0) {
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x - 1) * 256 + lane; i < p.num_counts; i += static_cast<std::int64_t>(gridDim.x - 1) * 256) {
      p.counts[i] = 0;
    }
    return;
  }
  if (lane >= 32) return;
  int begin = 0, blocks = 0, turns = 0;  // of the groups before these
  bool is_broken = false;
  for (int base = 0; base < p.groups; base += 32) {
    const int g = base + lane;
    const int low = __ldg(p.from + min(g, p.groups)), high = __ldg(p.from + min(g + 1, p.groups));
    is_broken |= low < 0 || high < low || high > p.rows || (g == 0 && low != 0);
    const int end = max(scan_max(min(max(high, 0), p.rows), lane), begin);
    int first = __shfl_up_sync(ptx::kFullWarp, end, 1);
    if (lane == 0) first = begin;
    const int own = g < p.groups ? (end - first + kWidenedRows - 1) / kWidenedRows : 0, own_turns = own > 0 ? own + p.weight_blocks : 0;
    const int blocks_end = blocks + scan_sum(own, lane), turns_end = turns + scan_sum(own_turns, lane);
    if (g < p.groups) {
      p.offsets[g] = first, p.first_block[g] = blocks_end - own, p.first_turn[g] = turns_end - own_turns;
      if (g == p.groups - 1) p.offsets[g + 1] = end, p.first_block[g + 1] = blocks_end, p.first_turn[g + 1] = turns_end;
    }
    begin = __shfl_sync(ptx::kFullWarp, end, 31), blocks = __shfl_sync(ptx::kFullWarp, blocks_end, 31), turns = __shfl_sync(ptx::kFullWarp, turns_end, 31);
  }
  if (is_broken && p.status != nullptr) atomicOr(&p.status->flags, static_cast<unsigned>(kStatusBadOffsets));
}

}  // namespace

void launch_widened_setup(const WidenedSetup& p, cudaStream_t stream) {
  const std::int64_t clearing = (p.num_counts + 1023) / 1024;
  widened_setup<<<static_cast<unsigned>(1 + (clearing < 128 ? clearing : 128)), 256, 0, stream>>>(p);
}

}  // namespace waybill::cuda
