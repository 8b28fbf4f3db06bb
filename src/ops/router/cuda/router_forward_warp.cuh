// SPDX-License-Identifier: Apache-2.0
// Router forward, one warp per token, rows of up to 1,024 experts in registers (sm_80 and up). Method: router_select.cuh, router_rank.cuh.
//
//   logits [T, E] fp32/bf16/fp16 -> ids [T, K] int16/int32, weights [T, K] fp32, counts [E], offsets [E+1]; nothing [T, E].
//   Grid: persistent, every warp strides over rows. Warps do not wait for each other until the end, where the last CTA turns counts
//   into offsets. Bytes: T * E * sizeof(logit) read once, T * K * (id + 4) written.
#pragma once

#include "ops/router/cuda/router_rank.cuh"

namespace waybill::cuda {

// Scans. Each returns with the group maxima of the lane; NaN in the result tells that the row holds a NaN or Inf.
// kFull: E is kVectors * 128, so that no vector needs a bound.

// Registers: f [kVectors][4] filter values, -Inf where excluded. x is kept for the softmax denominator only.
template <class T, int kVectors, int kMode, bool kFull>
struct HeldRow {
  float f[kVectors][4];
  float sum_max, sum;

  // One read of the row. Returns NaN where a logit is not finite.
  __device__ __forceinline__ float load(const RouterRows& rows, const T* row, const float* bias_smem, bool need_sum) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int e = v * 128 + lane * 4;
      f[v][0] = f[v][1] = f[v][2] = f[v][3] = -kInfinity;
      if (kFull || e < rows.E) load4<T, true>(row + e, f[v]);
    }
    float poison = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!kFull && v * 128 + lane * 4 >= rows.E) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) poison = __fmaf_rn(f[v][i], 0.0f, poison);
    }
    if (kMode == kPlain && __any_sync(ptx::kFullWarp, poison != poison)) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[v][i] = scalar::is_finite(f[v][i]) ? f[v][i] : -kInfinity;
      }
    }
    if constexpr (kMode != kPlain) {
      if (need_sum) softmax_sum(rows, bias_smem, 0.0f);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int e = v * 128 + lane * 4;
        float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (kFull || e < rows.E) b = *reinterpret_cast<const float4*>(bias_smem + e);
        filter_values<kMode>(rows.score, f[v], b);
      }
    }
    return poison;
  }

  // Denominator over the finite, unmasked logits, which f still holds. kPlain: the lane's largest logit is known.
  __device__ __forceinline__ void softmax_sum(const RouterRows& rows, const float* bias_smem, float lane_max) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const auto value = [&](int v, int i) {
      const int e = v * 128 + lane * 4 + i;
      if (kMode == kPlain) return f[v][i];
      return e < rows.E && scalar::is_finite(f[v][i]) && !is_masked(bias_smem[e]) ? f[v][i] : -kInfinity;
    };
    sum_max = kMode == kPlain ? lane_max : -kInfinity;
#pragma unroll
    for (int v = 0; kMode != kPlain && v < kVectors; ++v) {
      sum_max = fmaxf(sum_max, fmaxf(fmaxf(value(v, 0), value(v, 1)), fmaxf(value(v, 2), value(v, 3))));
    }
    sum_max = warp_max(sum_max);
    sum = 0.0f;
    if (sum_max == -kInfinity) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sum += (exp2_of(value(v, 0)) + exp2_of(value(v, 1))) + (exp2_of(value(v, 2)) + exp2_of(value(v, 3)));
    }
    sum = warp_sum(sum);
  }
  __device__ __forceinline__ float exp2_of(float x) const { return ptx::ex2_approx((x - sum_max) * 1.44269504f); }

  __device__ __forceinline__ void group_maxima(float (&group_max)[WarpPolicy<kVectors>::kGroups]) const {
    using Policy = WarpPolicy<kVectors>;
#pragma unroll
    for (int g = 0; g < Policy::kGroups; ++g) {
      group_max[g] = -kInfinity;
#pragma unroll
      for (int v = g * Policy::kVectorsPerGroup; v < (g + 1) * Policy::kVectorsPerGroup; ++v) {
        group_max[g] = fmaxf(group_max[g], fmaxf(fmaxf(f[v][0], f[v][1]), fmaxf(f[v][2], f[v][3])));
      }
    }
  }
};

// Group-limited rows: drops the experts of groups that are not kept and returns a bit per vector of those kept. Each group is a
// power of two of lanes within one vector (checked by the host). groups [G] u64 in shared memory.
template <class T, int kVectors, int kMode, bool kFull>
__device__ __forceinline__ std::uint32_t keep_groups(const RouterForwardParams& p, HeldRow<T, kVectors, kMode, kFull>& s, std::uint64_t* groups) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int group_size = p.rows.E / p.num_groups, segment = group_size / 4;
  std::uint64_t composite[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float best = fmaxf(s.f[v][0], s.f[v][1]), second = fminf(s.f[v][0], s.f[v][1]);
#pragma unroll
    for (int i = 2; i < 4; ++i) {
      second = fmaxf(second, fminf(best, s.f[v][i]));
      best = fmaxf(best, s.f[v][i]);
    }
    for (int step = 1; step < segment; step <<= 1) {
      const float other_best = __shfl_xor_sync(ptx::kFullWarp, best, step), other_second = __shfl_xor_sync(ptx::kFullWarp, second, step);
      second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
      best = fmaxf(best, other_best);
    }
    const int e = v * 128 + lane * 4, group = e / group_size;
    const bool two = p.group_best == 2 && second > -kInfinity;
    const std::uint64_t count = best > -kInfinity ? (two ? 2u : 1u) : 0u;
    const float score = two ? scalar::add(best, second) : best;
    composite[v] = count == 0 ? 0u : (count << 48) | (static_cast<std::uint64_t>(scalar::order_key(score)) << 16) | static_cast<std::uint64_t>(0xffff - group);
    if (e < p.rows.E && e % group_size == 0) groups[group] = composite[v];
  }
  __syncwarp();
  int rank[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) rank[v] = 0;
  for (int g = 0; g < p.num_groups; ++g) {
    const std::uint64_t other = groups[g];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) rank[v] += other > composite[v];
  }
  std::uint32_t kept = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const bool keep = rank[v] < p.num_kept;
    kept |= static_cast<std::uint32_t>(keep) << v;
#pragma unroll
    for (int i = 0; i < 4; ++i) s.f[v][i] = keep ? s.f[v][i] : -kInfinity;
  }
  __syncwarp();
  return kept;
}

// False: the row must go through route_exactly().
template <class T, int kVectors, int kMode, bool kFull>
__device__ __forceinline__ bool route_held_row(const RouterForwardParams& p, const float* bias_smem, int t, WarpScratch<128>& scratch, std::uint32_t* hist) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  HeldRow<T, kVectors, kMode, kFull> s;
  const float poison = s.load(rows, row_of<T>(rows, t), bias_smem, need_sum);
  if (__any_sync(ptx::kFullWarp, poison != poison)) count_nonfinite_rows(p.status, 1);
  if (kMode != kPlain && need_sum) store_sum(scratch, s.sum_max, s.sum);
  std::uint32_t kept = 0xffffffffu;
  const bool is_grouped = kMode == kExact && p.num_kept < p.num_groups;
  if constexpr (kMode == kExact) {
    if (is_grouped) kept = keep_groups(p, s, reinterpret_cast<std::uint64_t*>(scratch.key));
  }
  float group_max[WarpPolicy<kVectors>::kGroups];
  s.group_maxima(group_max);
  if (kMode == kPlain && need_sum) {
    float lane_max = group_max[0];
#pragma unroll
    for (int g = 1; g < WarpPolicy<kVectors>::kGroups; ++g) lane_max = fmaxf(lane_max, group_max[g]);
    s.softmax_sum(rows, bias_smem, lane_max);
    store_sum(scratch, s.sum_max, s.sum);
  }
  const float threshold = fmaxf(lowered_threshold(kMode, rows.score, group_threshold(group_max, rows.K)), -3.402823466e38f);
  int mine = 0, count = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) mine += s.f[v][i] >= threshold;
  }
  int slot = lane_prefix(mine, count);
  const float* bias = kMode == kPlain ? nullptr : bias_smem;
  if (count > 128) {
    if (kMode != kExact) return false;
    count = exact_candidates(rows, row_of<T>(rows, t), bias, is_grouped, kept, scratch);
  } else if (mine != 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (s.f[v][i] >= threshold) {
          scratch.x[slot] = s.f[v][i], scratch.id[slot] = static_cast<std::uint16_t>(v * 128 + lane * 4 + i);
          ++slot;
        }
      }
    }
  }
  __syncwarp();
  if constexpr (kMode != kPlain) {  // the list holds filter values: fetch the logits
    const T* row = row_of<T>(rows, t);
    for (int i = lane; i < count; i += 32) scratch.x[i] = to_float(row[scratch.id[i]]);
    __syncwarp();
  }
  return finish_row<T, kMode == kExact>(p, bias, count, scratch, t, hist);
}

// Shared memory of a CTA: histogram [E + 1], then the bias [E] where the mode has one. Waits for the previous kernel; ends with a
// barrier.
template <int kMode>
__device__ __forceinline__ void prepare_cta(const RouterRows& rows, std::uint32_t* hist, float* bias_smem) {
  clear_histogram(hist, rows.E);
  await_previous();
  if constexpr (kMode != kPlain) {
#pragma unroll 4
    for (int e = static_cast<int>(threadIdx.x); e < rows.E; e += static_cast<int>(blockDim.x)) bias_smem[e] = effective_bias(rows, e);
  }
  __syncthreads();
}
// Elements rounded up so that the next part of shared memory is 16-byte aligned.
__host__ __device__ constexpr int padded_experts(int E) { return (E + 3) / 4 * 4; }
// Histogram [E + 1] and bias [E].
__host__ __device__ inline std::size_t cta_bytes(int E, int mode) { return static_cast<std::size_t>(padded_experts(E)) * (mode == kPlain ? 4 : 8) + 16; }

// Threads of a CTA and CTAs an SM must hold: as many as the registers allow without spills.
template <int kVectors, int kMode>
inline constexpr int kUnstagedThreads = kMode == kExact || kVectors == 8 ? 256 : (kMode == kBiased ? 384 : 512);
template <int kVectors, int kMode>
inline constexpr int kUnstagedBlocks = 2;

template <class T, int kVectors, int kMode, bool kFull>
__global__ void __launch_bounds__(kUnstagedThreads<kVectors, kMode>, kUnstagedBlocks<kVectors, kMode>)
    router_forward_warp(const __grid_constant__ RouterForwardParams p) {
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  constexpr int kThreads = kUnstagedThreads<kVectors, kMode>;
  __shared__ WarpScratch<128> scratch[kThreads / 32];
  std::uint32_t* hist = reinterpret_cast<std::uint32_t*>(dynamic_smem);
  float* bias_smem = reinterpret_cast<float*>(hist + padded_experts(p.rows.E) + 4);
  begin_kernel();
  prepare_cta<kMode>(p.rows, hist, bias_smem);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  // Warp w of all CTAs before warp w + 1: rows spread evenly over the SMs whatever T is.
  for (int t = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); t < static_cast<int>(p.rows.T);
       t += static_cast<int>(gridDim.x) * (kThreads / 32)) {
    if (p.rows.padding != nullptr && p.rows.padding[t] != 0) {
      write_empty_row(p, t, hist);
      continue;
    }
    WarpScratch<128>& own = scratch[ptx::thread_again() >> 5];
    const bool done = route_held_row<T, kVectors, kMode, kFull>(p, bias_smem, t, own, hist);
    if constexpr (kMode != kExact) {
      if (!done) route_exactly<T>(p, kMode == kPlain ? nullptr : bias_smem, t, own, hist);
    }
  }
  flush_histogram(p, hist);
  finish_counts(p, draw_number(p));
}

}  // namespace waybill::cuda
