// SPDX-License-Identifier: Apache-2.0
// Router forward for long rows (sm_90): one warp per token, the row in shared memory. Method: router_select.cuh.
//
//   Each warp owns one row buffer that a bulk copy fills (completion on an mbarrier). The buffer is read twice: for the group maxima,
//   and at the vectors that hold candidates; then the next row of the warp is on its way while the candidates are ranked and written.
//   The columns from E to the tier's width hold the lowest finite number, so that the loops need no bounds.
#pragma once

#include "ops/router/cuda/router_forward_warp.cuh"

namespace waybill::cuda {

template <class T>
__device__ __forceinline__ T lowest_logit();
template <>
__device__ __forceinline__ float lowest_logit<float>() {
  return -3.402823466e38f;
}
template <>
__device__ __forceinline__ __nv_bfloat16 lowest_logit<__nv_bfloat16>() {
  return __ushort_as_bfloat16(0xff7f);
}
template <>
__device__ __forceinline__ __half lowest_logit<__half>() {
  return __ushort_as_half(0xfbff);
}

// Vectors that share a kept maximum: 21 warps an SM have registers for 9 of them; with a bias a second look at an entry costs more than
// the 21st warp brings.
template <int kMode>
inline constexpr int kSpan = kMode == kPlain ? 2 : 1;

// What a scan leaves in a lane's registers.
template <int kVectors, int kMode>
struct StagedScan {
  float span_max[WarpPolicy<kVectors>::kKeepMaxima ? kVectors / kSpan<kMode> : 1];
  float group_max[WarpPolicy<kVectors>::kGroups];
  float poison;
};

template <class T, int kVectors, int kMode>
__device__ __forceinline__ float vector_maximum(const RouterRows& rows, const T* row, const float* bias_smem, int v, float& poison) {
  const int e = v * 128 + (static_cast<int>(threadIdx.x) & 31) * 4;
  float x[4];
  load4<T, false>(row + e, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) poison = __fmaf_rn(x[i], 0.0f, poison);
  if constexpr (kMode != kPlain) {
    const float4 b = *reinterpret_cast<const float4*>(bias_smem + e);  // padded to the tier's width
    filter_values<kMode>(rows.score, x, b);
  }
  return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
}

template <class T, int kVectors, int kMode>
__device__ __forceinline__ void scan_row(const RouterRows& rows, const T* row, const float* bias_smem, StagedScan<kVectors, kMode>& s) {
  using Policy = WarpPolicy<kVectors>;
  s.poison = 0.0f;
  if constexpr (Policy::kKeepMaxima) {
#pragma unroll
    for (int g = 0; g < Policy::kGroups; ++g) {
      s.group_max[g] = -kInfinity;
#pragma unroll
      for (int v = g * Policy::kVectorsPerGroup; v < (g + 1) * Policy::kVectorsPerGroup; ++v) {
        if (v % 3 == 0) __syncwarp();  // bounds the loads in flight, and with them the registers
        const float largest = vector_maximum<T, kVectors, kMode>(rows, row, bias_smem, v, s.poison);
        s.span_max[v / kSpan<kMode>] = v % kSpan<kMode> == 0 ? largest : fmaxf(s.span_max[v / kSpan<kMode>], largest);
        if (v % kSpan<kMode> == kSpan<kMode> - 1) s.group_max[g] = fmaxf(s.group_max[g], s.span_max[v / kSpan<kMode>]);
      }
    }
  } else {
#pragma unroll
    for (int g = 0; g < Policy::kGroups; ++g) {
      s.group_max[g] = -kInfinity;
#pragma unroll 2
      for (int v = g * Policy::kVectorsPerGroup; v < (g + 1) * Policy::kVectorsPerGroup; ++v) {
        s.group_max[g] = fmaxf(s.group_max[g], vector_maximum<T, kVectors, kMode>(rows, row, bias_smem, v, s.poison));
      }
    }
  }
}

// Excludes what is not finite, in place.
template <class T>
__device__ __noinline__ void sanitise_row(T* row, int E) {
  for (int e = static_cast<int>(threadIdx.x) & 31; e < E; e += 32) {
    if (!scalar::is_finite(to_float(row[e]))) row[e] = static_cast<T>(-kInfinity);
  }
  ptx::fence_async_proxy();  // before the copy engine writes the row again
  __syncwarp();
}

// Softmax denominator over the finite, unmasked logits. kPlain: the lane's largest logit is known.
template <class T, int kMode>
__device__ __forceinline__ void staged_softmax_sum(const RouterRows& rows, const T* row, const float* bias_smem, float lane_max, float& row_max,
                                                   float& row_sum) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto value = [&](int e, float x) {
    if (kMode == kPlain) return x;
    return scalar::is_finite(x) && !is_masked(bias_smem[e]) ? x : -kInfinity;
  };
  float largest = lane_max;
  if constexpr (kMode != kPlain) {
    largest = -kInfinity;
    for (int e = lane * 4; e < rows.E; e += 128) {
      float x[4];
      load4<T, false>(row + e, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, value(e + i, x[i]));
    }
  }
  row_max = warp_max(largest);
  row_sum = 0.0f;
  if (row_max == -kInfinity) return;
#pragma unroll 2
  for (int e = lane * 4; e < rows.E; e += 128) {
    float x[4];
    load4<T, false>(row + e, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) row_sum += ptx::ex2_approx((value(e + i, x[i]) - row_max) * 1.44269504f);
  }
  row_sum = warp_sum(row_sum);
}

// Candidates of the row into the list; returns how many there are (more than the list holds: they were not all stored).
template <class T, int kVectors, int kMode, int kCandidates>
__device__ __forceinline__ int collect_staged(const RouterRows& rows, const T* row, const float* bias_smem, const StagedScan<kVectors, kMode>& s,
                                              float threshold, WarpScratch<kCandidates>& scratch) {
  using Policy = WarpPolicy<kVectors>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto read = [&](int v, float(&x)[4], bool(&take)[4]) {
    const int e = v * 128 + lane * 4;
    load4<T, false>(row + e, x);
    float f[4] = {x[0], x[1], x[2], x[3]};
    filter_values<kMode>(rows.score, f, kMode == kPlain ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *reinterpret_cast<const float4*>(bias_smem + e));
#pragma unroll
    for (int i = 0; i < 4; ++i) take[i] = f[i] >= threshold;
  };
  int mine = 0, count = 0;
  float x[4];
  bool take[4];
  if constexpr (Policy::kKeepMaxima) {
    std::uint32_t mask = 0;
#pragma unroll
    for (int q = 0; q < kVectors / kSpan<kMode>; ++q) mask |= s.span_max[q] >= threshold ? 1u << q : 0u;
#pragma unroll 1
    for (std::uint32_t left = mask; left != 0; left &= left - 1) {
#pragma unroll
      for (int i = 0; i < kSpan<kMode>; ++i) {
        read((__ffs(static_cast<int>(left)) - 1) * kSpan<kMode> + i, x, take);
        mine += take[0] + take[1] + take[2] + take[3];
      }
    }
    __syncwarp();
    int slot = lane_prefix(mine, count);
#pragma unroll 1
    for (std::uint32_t left = mask; left != 0; left &= left - 1) {
#pragma unroll
      for (int j = 0; j < kSpan<kMode>; ++j) {
        const int v = (__ffs(static_cast<int>(left)) - 1) * kSpan<kMode> + j;
        read(v, x, take);
#pragma unroll
        for (int i = 0; i < 4; ++i) put_candidate(scratch, slot, take[i], v * 128 + lane * 4 + i, x[i]);
      }
    }
  } else {
#pragma unroll 1
    for (int v = 0; v * 128 < rows.E; ++v) {
      read(v, x, take);
      mine += take[0] + take[1] + take[2] + take[3];
    }
    int slot = lane_prefix(mine, count);
#pragma unroll 1
    for (int v = 0; v * 128 < rows.E; ++v) {
      read(v, x, take);
#pragma unroll
      for (int i = 0; i < 4; ++i) put_candidate(scratch, slot, take[i], v * 128 + lane * 4 + i, x[i]);
    }
  }
  __syncwarp();
  return count;
}

// Three rounds of rows instead of four at T = 8,192 are worth the registers that 21 warps leave.
template <int kVectors, int kMode>
inline constexpr int kStagedMaxThreads = kVectors > 18 ? 256 : (kMode == kPlain ? 672 : 640);

// Dynamic shared memory: histogram (tier width and one) and bias (tier width), then per warp: the row, WarpScratch; barriers last.
template <int kVectors>
__host__ __device__ constexpr std::size_t staged_cta_bytes(int mode) {
  return static_cast<std::size_t>(kVectors) * 128 * (mode == kPlain ? 4 : 8) + 16;
}
template <class T, int kVectors>
__host__ __device__ constexpr std::size_t staged_warp_bytes() {
  return static_cast<std::size_t>(kVectors) * 128 * sizeof(T) + sizeof(WarpScratch<WarpPolicy<kVectors>::kCandidates>) + 16;
}

template <class T, int kVectors, int kMode>
__global__ void __launch_bounds__(kStagedMaxThreads<kVectors, kMode>, 1) router_forward_staged(const __grid_constant__ RouterForwardParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  using Scratch = WarpScratch<WarpPolicy<kVectors>::kCandidates>;
  constexpr int kWidth = kVectors * 128;
  const RouterRows& rows = p.rows;
  const int E = rows.E, warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, warps = static_cast<int>(blockDim.x) >> 5;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(E) * sizeof(T);
  std::uint32_t* hist = reinterpret_cast<std::uint32_t*>(dynamic_smem);
  float* bias_smem = reinterpret_cast<float*>(hist + kWidth + 4);
  unsigned char* next = dynamic_smem + staged_cta_bytes<kVectors>(kMode);
  T* row = reinterpret_cast<T*>(next) + static_cast<std::size_t>(warp) * kWidth;
  next += static_cast<std::size_t>(warps) * kWidth * sizeof(T);
  Scratch& scratch = reinterpret_cast<Scratch*>(next)[warp];
  next += static_cast<std::size_t>(warps) * sizeof(Scratch);
  std::uint64_t* full = reinterpret_cast<std::uint64_t*>(next) + warp * 2;

  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
  }
  for (int e = E + lane; e < kWidth; e += 32) row[e] = lowest_logit<T>();
  __syncwarp();
  begin_kernel();
  await_previous();
  const int first = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x), T_rows = static_cast<int>(rows.T);
  const int num_warps = static_cast<int>(gridDim.x) * warps;
  const auto fetch = [&](int t) {
    if (lane == 0 && t < T_rows) {
      ptx::mbarrier_arrive_expect(full, row_bytes);
      ptx::bulk_load(row, row_of<T>(rows, t), row_bytes, full);
    }
  };
  fetch(first);
  for (int e = E + static_cast<int>(threadIdx.x); kMode != kPlain && e < kWidth; e += static_cast<int>(blockDim.x)) bias_smem[e] = -kInfinity;
  prepare_cta<kMode>(rows, hist, bias_smem);
  const float* bias = kMode == kPlain ? nullptr : bias_smem;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  std::uint32_t parity = 0;
  for (int t = first; t < T_rows; t += num_warps, parity ^= 1u) {
    ptx::mbarrier_wait(full, parity);
    if (rows.padding != nullptr && rows.padding[t] != 0) {
      write_empty_row(p, t, hist);
      __syncwarp();
      fetch(t + num_warps);
      continue;
    }
    StagedScan<kVectors, kMode> s;
    scan_row<T, kVectors, kMode>(rows, row, bias_smem, s);
    if (__any_sync(ptx::kFullWarp, s.poison != s.poison)) {
      count_nonfinite_rows(p.status, 1);
      sanitise_row(row, E);
      if constexpr (kMode == kPlain) {  // +Inf and NaN have entered the maxima: again, without them
#pragma unroll 1
        for (int again = 0; again < 1; ++again) scan_row<T, kVectors, kMode>(rows, row, bias_smem, s);
      }
    }
    if (need_sum) {
      float row_max = 0.0f, row_sum = 1.0f;
      float lane_max = s.group_max[0];
#pragma unroll
      for (int g = 1; g < WarpPolicy<kVectors>::kGroups; ++g) lane_max = fmaxf(lane_max, s.group_max[g]);
      staged_softmax_sum<T, kMode>(rows, row, bias_smem, lane_max, row_max, row_sum);
      store_sum(scratch, row_max, row_sum);
    }
    const float threshold = fmaxf(lowered_threshold(kMode, rows.score, group_threshold(s.group_max, rows.K)), -3.402823466e38f);
    const int count = collect_staged<T, kVectors, kMode>(rows, row, bias_smem, s, threshold, scratch);
    fetch(t + num_warps);
    const bool fits = count <= WarpPolicy<kVectors>::kCandidates;
    if (!fits || !finish_row<T, false>(p, bias, count, scratch, t, hist)) {
      __syncwarp();
      route_exactly<T>(p, bias, t, scratch, hist);
    }
  }
  flush_histogram(p, hist);
  finish_counts(p, draw_number(p));
#endif
}

}  // namespace waybill::cuda
