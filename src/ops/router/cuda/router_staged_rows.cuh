// SPDX-License-Identifier: Apache-2.0
// Rows staged in shared memory for the loss and dense backward kernels (sm_90): one warp owns one row, bulk copies bring it in. The
// loops have no template width, so that the code stays small. Rows need E % 4 == 0 and 16-byte alignment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

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

// What of a the loops add: nothing, the call's factors in shared memory, or these and the factors of the row's sequence.
enum RowA : int { kNoA = 0, kSharedA = 1, kSequenceA = 2 };
template <int kA>
__device__ __forceinline__ void load_a(const RowFactors& factors, int e, float (&a)[4]) {
  if constexpr (kA == kSharedA) {
    const float4 v = *reinterpret_cast<const float4*>(factors.a_smem + e);
    a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
  } else if constexpr (kA == kSequenceA) {
    factors.at4(e, a);
  }
}
// body(e, vectors) for this lane's entries e, e + 1 to 3, e + 128 ...; `vectors`, a constant, groups of four at a time, whose loads then come before
// the stores.
template <int kUnroll, class Body>
__device__ __forceinline__ void for_entries(int E, const Body& body) {
  int e = (static_cast<int>(threadIdx.x) & 31) * 4;
#pragma unroll 1
  for (; e + (kUnroll - 1) * 128 < E; e += kUnroll * 128) body(e, std::integral_constant<int, kUnroll>());
#pragma unroll 1
  for (; e < E; e += 128) body(e, std::integral_constant<int, 1>());
}

// Four neighbouring entries: sums of a row's t = e^(x - shift), which replace x. Sigmoids of a pair share a reciprocal: no entry of an ordinary row
// overflows their product.
template <bool kSoftmax, bool kHasA>
__device__ __forceinline__ void add_staged(RowSums& s, float& other, float (&x)[4], const float (&a)[4], float scaled_shift) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = ptx::ex2_approx(kSoftmax ? __fmaf_rn(x[i], kLog2E, -scaled_shift) : scalar::mul(x[i], kLog2E));
    ((i & 1) != 0 ? other : s.exp_sum) += x[i];
    if (kHasA && kSoftmax) s.a_dot = __fmaf_rn(a[i], x[i], s.a_dot);
  }
  if constexpr (kHasA && !kSoftmax) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float d0 = 1.0f + x[i], d1 = 1.0f + x[i + 1], inverse = ptx::rcp_approx(d0 * d1), n0 = x[i] * d1, n1 = x[i + 1] * d0;
      s.score_sum = __fmaf_rn(inverse, n0 + n1, s.score_sum);
      s.a_dot = __fmaf_rn(inverse, __fmaf_rn(a[i], n0, a[i + 1] * n1), s.a_dot);
    }
  }
}
// Sums of a row and t = e^(x - shift) written to `out` [E] (may be the row itself for fp32).
template <class T, bool kSoftmax, int kA, int kUnroll>
__device__ __forceinline__ RowSums staged_row_sums(const T* row, const RowFactors& factors, float shift, float* out) {
  RowSums s;
  float other = 0.0f;
  const float scaled_shift = scalar::mul(shift, kLog2E);
  for_entries<kUnroll>(factors.E, [&](int e, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    float x[kVectors][4], a[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load4<T, false>(row + e + v * 128, x[v]), load_a<kA>(factors, e + v * 128, a[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) add_staged<kSoftmax, kA != kNoA>(s, other, x[v], a[v], scaled_shift);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<float4*>(out + e + v * 128) = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
  });
  s.max = shift;
  s.exp_sum = warp_sum(s.exp_sum + other);
  if constexpr (kA != kNoA) {
    s.a_dot = warp_sum(s.a_dot);
    s.score_sum = kSoftmax ? s.exp_sum : warp_sum(s.score_sum);
  }
  return s;
}

// Four neighbouring t become gradients. Products with a in full before they cancel with the mean's: their rounding is that of a.
template <bool kSoftmax, bool kHasA>
__device__ __forceinline__ void give_gradients(const DenseFactors& d, float from, float (&t)[4], const float (&a)[4]) {
  if constexpr (!kHasA || kSoftmax) {
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] *= kHasA ? __fmaf_rn(d.score_factor, a[i], from) : d.exp_factor;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float d0 = 1.0f + t[i], d1 = 1.0f + t[i + 1], inverse = ptx::rcp_approx(d0 * d1), rest0 = inverse * d1, rest1 = inverse * d0;
      t[i] *= __fmaf_rn(rest0 * rest0, __fmaf_rn(d.score_factor, a[i], from), d.exp_factor);
      t[i + 1] *= __fmaf_rn(rest1 * rest1, __fmaf_rn(d.score_factor, a[i + 1], from), d.exp_factor);
    }
  }
}
template <bool kSoftmax, int kA, int kUnroll>
__device__ __forceinline__ void staged_gradients(const DenseFactors& d, const RowFactors& factors, float* out) {
  const float minus_mean = -d.score_factor * d.mean_a, from = kSoftmax ? d.exp_factor + minus_mean : minus_mean;
  for_entries<kUnroll>(factors.E, [&](int e, auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    float t[kVectors][4], a[kVectors][4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load4<float, false>(out + e + v * 128, t[v]), load_a<kA>(factors, e + v * 128, a[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) give_gradients<kSoftmax, kA != kNoA>(d, from, t[v], a[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<float4*>(out + e + v * 128) = make_float4(t[v][0], t[v][1], t[v][2], t[v][3]);
  });
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
