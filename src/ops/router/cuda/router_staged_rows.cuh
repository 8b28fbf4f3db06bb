// SPDX-License-Identifier: Apache-2.0
// Rows staged in shared memory for the loss and dense backward kernels (sm_90): one warp owns one row, bulk copies bring it in. The
// loops have no template width, so that the code stays small. Rows need E % 4 == 0 and 16-byte alignment.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/router/cuda/router_backward.cuh"

namespace waybill::cuda {

template <class T>
inline bool can_stage(const RouterRows& rows, const DeviceLimits& limits) {
  return limits.compute_major >= 9 && rows.mask == nullptr && rows.E % 4 == 0 && static_cast<std::size_t>(rows.E) * sizeof(T) % 16 == 0 &&
         static_cast<std::size_t>(rows.row_stride) * sizeof(T) % 16 == 0 && reinterpret_cast<std::uintptr_t>(rows.logits) % 16 == 0;
}

// Warps a CTA and CTAs an SM for `per_warp` bytes a warp and `fixed` a CTA.
struct StagedShape {
  int warps, blocks;
  std::size_t smem;
};
inline StagedShape staged_shape(const DeviceLimits& limits, std::size_t fixed, std::size_t per_warp, int max_warps) {
  const std::size_t half = static_cast<std::size_t>(limits.shared_per_sm) / 2 - 2048, whole = static_cast<std::size_t>(limits.shared_per_block) - 2048;
  StagedShape s{};
  s.blocks = fixed + 4 * per_warp <= half ? 2 : 1;
  const std::size_t room = (s.blocks == 2 ? half : whole) - fixed;
  s.warps = static_cast<int>(std::clamp<std::size_t>(room / per_warp, 1, static_cast<std::size_t>(max_warps)));
  s.smem = fixed + per_warp * static_cast<std::size_t>(s.warps);
  return s;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Masked and non-finite entries become -Inf, in place.
template <class T>
__device__ __noinline__ void exclude_entries(const RouterRows& rows, T* row) {
  for (int e = static_cast<int>(threadIdx.x) & 31; e < rows.E; e += 32) {
    if (!scalar::is_finite(to_float(row[e])) || (rows.mask != nullptr && rows.mask[e] != 0)) row[e] = static_cast<T>(-kInfinity);
  }
  ptx::fence_async_proxy();
  __syncwarp();
}

// Largest entry of the row that exists; leaves the others -Inf.
template <class T>
__device__ __forceinline__ float staged_row_max(const RouterRows& rows, T* row) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (rows.mask != nullptr) exclude_entries(rows, row);
  float largest = -kInfinity, poison = 0.0f;
#pragma unroll 3
  for (int e = lane * 4; e < rows.E; e += 128) {
    float x[4];
    load4<T, false>(row + e, x);
    largest = fmaxf(largest, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
#pragma unroll
    for (int i = 0; i < 4; ++i) poison = __fmaf_rn(x[i], 0.0f, poison);
  }
  if (__any_sync(ptx::kFullWarp, poison != poison) && rows.mask == nullptr) {
    exclude_entries(rows, row);
    largest = -kInfinity;
#pragma unroll 1
    for (int e = lane; e < rows.E; e += 32) largest = fmaxf(largest, to_float(row[e]));
  }
  return warp_max(largest);
}

// Sums of a fast row; t is written to `out` [E] when given (may be the row itself for fp32).
template <class T, bool kSoftmax, bool kStore>
__device__ __forceinline__ RowSums staged_row_sums(const RouterRows& rows, const T* row, const RowFactors& factors, float row_max, float* out) {
  RowSums s;
  s.max = row_max;
  const float shift = kSoftmax ? row_max : 0.0f;
#pragma unroll 2
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < rows.E; e += 128) {
    float x[4], a[4];
    load4<T, false>(row + e, x);
    factors.at4(e, a);
    add_fast<kSoftmax>(s, x, a, shift);
    if (kStore) *reinterpret_cast<float4*>(out + e) = make_float4(x[0], x[1], x[2], x[3]);
  }
  reduce_sums<kSoftmax>(s);
  return s;
}

// Sums of this lane's entries without a shift (t = e^x), in one pass. False where the row is not ordinary: an entry that is not
// finite, or a largest entry outside [-16, 16], where e^x would lose accuracy. The sums are not reduced over the lanes.
template <class T, bool kSoftmax>
__device__ __forceinline__ bool unshifted_row_sums(const RouterRows& rows, const T* row, const RowFactors& factors, RowSums& s) {
  float largest = -kInfinity, poison = 0.0f;
#pragma unroll 3
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < rows.E; e += 128) {
    float x[4], a[4];
    load4<T, false>(row + e, x);
    factors.at4(e, a);
    largest = fmaxf(largest, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
#pragma unroll
    for (int i = 0; i < 4; ++i) poison = __fmaf_rn(x[i], 0.0f, poison);
    add_fast<kSoftmax>(s, x, a, 0.0f);
  }
  const float row_max = warp_max(largest);
  s.max = 0.0f;  // the shift of exp_sum
  return !__any_sync(ptx::kFullWarp, poison != poison) && fabsf(row_max) <= 16.0f;
}
#endif

}  // namespace waybill::cuda
