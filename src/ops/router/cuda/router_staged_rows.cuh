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
// Largest entry of the row; -Inf where it has none. NaN is passed over: the sums show it.
template <class T, int kUnroll>
__device__ __forceinline__ float staged_row_max(const T* row, int E) {
  float largest[2] = {-kInfinity, -kInfinity};
#pragma unroll(kUnroll)
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < E; e += 128) {
    float x[4];
    load4<T, false>(row + e, x);
    largest[0] = fmaxf(largest[0], fmaxf(x[0], x[1])), largest[1] = fmaxf(largest[1], fmaxf(x[2], x[3]));
  }
  return warp_max(fmaxf(largest[0], largest[1]));
}

// Sums of a row and t = e^(x - shift) written to `out` [E] (may be the row itself for fp32). kA: also the sums with a.
template <class T, bool kSoftmax, bool kA, int kUnroll>
__device__ __forceinline__ RowSums staged_row_sums(const T* row, const RowFactors& factors, float shift, float* out) {
  RowSums s;
  float other = 0.0f;
#pragma unroll(kUnroll)
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < factors.E; e += 128) {
    float x[4], a[4];
    load4<T, false>(row + e, x);
    if (kA) factors.at4(e, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float t = exp_fast(kSoftmax ? x[i] - shift : x[i]);
      x[i] = t;
      ((i & 1) != 0 ? other : s.exp_sum) += t;
      if constexpr (kA && kSoftmax) s.a_dot = __fmaf_rn(a[i], t, s.a_dot);
      if constexpr (kA && !kSoftmax) {
        const float sigmoid = t * ptx::rcp_approx(1.0f + t);
        s.score_sum += sigmoid;
        s.a_dot = __fmaf_rn(a[i], sigmoid, s.a_dot);
      }
    }
    *reinterpret_cast<float4*>(out + e) = make_float4(x[0], x[1], x[2], x[3]);
  }
  s.max = shift;
  s.exp_sum = warp_sum(s.exp_sum + other);
  if constexpr (kA) {
    s.a_dot = warp_sum(s.a_dot);
    s.score_sum = kSoftmax ? s.exp_sum : warp_sum(s.score_sum);
  }
  return s;
}

// The row's t become gradients. Products with a in full before they cancel with the mean's: their rounding is that of a.
template <bool kSoftmax, bool kA, int kUnroll>
__device__ __forceinline__ void staged_gradients(const DenseFactors& d, const RowFactors& factors, float* out) {
  const float minus_mean = -d.score_factor * d.mean_a, from = kSoftmax ? d.exp_factor + minus_mean : minus_mean;
#pragma unroll(kUnroll)
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < factors.E; e += 128) {
    const float4 v = *reinterpret_cast<const float4*>(out + e);
    float t[4] = {v.x, v.y, v.z, v.w}, a[4];
    if (kA) factors.at4(e, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (!kA) {
        t[i] *= d.exp_factor;
      } else if constexpr (kSoftmax) {
        t[i] *= __fmaf_rn(d.score_factor, a[i], from);
      } else {
        const float inverse = ptx::rcp_approx(1.0f + t[i]);
        t[i] = __fmaf_rn(t[i] * inverse * inverse, __fmaf_rn(d.score_factor, a[i], from), t[i] * d.exp_factor);
      }
    }
    *reinterpret_cast<float4*>(out + e) = make_float4(t[0], t[1], t[2], t[3]);
  }
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
