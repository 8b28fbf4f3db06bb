// SPDX-License-Identifier: Apache-2.0
// Prefix sums of integers by one warp.
#pragma once

#include "core/cuda/ptx.cuh"

namespace waybill::cuda {

__device__ __forceinline__ int warp_inclusive(int value) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(ptx::kFullWarp, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// counts [num] (16-byte aligned, room for a multiple of 4) become what lies before each; returns the total.
__device__ __forceinline__ int warp_scan_in_place(int* counts, int num) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int carry = 0;
  for (int first = 0; first < num; first += 128) {
    const int i = first + lane * 4;
    int4 v{0, 0, 0, 0};
    if (i + 3 < num) {
      v = __ldcg(reinterpret_cast<const int4*>(counts + i));
    } else if (i < num) {
      v.x = __ldcg(counts + i);
      if (i + 1 < num) v.y = __ldcg(counts + i + 1);
      if (i + 2 < num) v.z = __ldcg(counts + i + 2);
    }
    const int sum = v.x + v.y + v.z + v.w, scan = warp_inclusive(sum), before = carry + scan - sum;
    if (i < num) *reinterpret_cast<int4*>(counts + i) = int4{before, before + v.x, before + v.x + v.y, before + v.x + v.y + v.z};
    carry += __shfl_sync(ptx::kFullWarp, scan, 31);
  }
  return carry;
}

}  // namespace waybill::cuda
