// SPDX-License-Identifier: Apache-2.0
// Router forward for long fp32 rows (sm_90) that also sums, over the rows, the probability of each expert and the squared logsumexp: what the
// values of the aux and z losses need of the logits. Otherwise as router_forward_staged.cuh, which a call without losses takes.
//
//   kGroup warps (rows) form a group. Once a warp has listed its row's candidates, the logits become scores in place and their sum the row's
//   scale. Then the group's threads share out the columns: each adds its columns of the group's rows to its own registers, rows in
//   order. While the next rows are on their way, each warp ranks its candidates. Two barriers of a group a round; groups do not wait for
//   each other until the end, where their sums are added in order and written to sum_partials [CTA, E]. No atomics: the result depends on
//   the grid only.
#pragma once

#include "ops/router/cuda/router_backward.cuh"
#include "ops/router/cuda/router_forward_staged.cuh"

namespace waybill::cuda {

// Warps a CTA, as shared memory holds rows (of 2,304 or 8,192 logits), and warps a group.
template <int kVectors, int kMode>
inline constexpr int kSumsWarps = kVectors == 18 ? (kMode == kPlain ? 21 : 20) : (kMode == kPlain ? 5 : 4);
template <int kVectors, int kMode>
inline constexpr int kSumsGroup = kVectors == 18 ? (kMode == kPlain ? 7 : 10) : kSumsWarps<kVectors, kMode>;
// A column's registers take as many rows of a CTA's share; longer batches take router_score_sums.cu.
inline constexpr int kSumsMaxRounds = 64;

// Rows without a logit and sigmoid rows of extreme logits, from global memory.
struct RowScale {
  float scale;             // P_te = scale * score; 0 for a row without a logit
  float lse;               // of the logits
  float row_max, exp_sum;  // sum of e^(x - row_max)
};
template <bool kSoftmax>
__device__ __noinline__ RowScale score_row_slowly(const RouterRows& rows, const float* source, float* row) {
  const float row_max = generic_row_max(rows, source);
  RowSums s;
  s.max = row_max;
  const bool fast = is_fast_row<kSoftmax>(rows.score, row_max), deep = row_max < -30.0f, none = row_max == -kInfinity;
  for (int e = (static_cast<int>(threadIdx.x) & 31) * 4; e < rows.E; e += 128) {
    float x[4], y[4];
    read_entries(rows, source, e, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = none ? 0.0f : exp_fast(x[i] - (fast && !kSoftmax ? 0.0f : row_max));
      s.exp_sum += y[i];
      if (!kSoftmax) y[i] = none ? 0.0f : (fast ? y[i] * ptx::rcp_approx(1.0f + y[i]) : score_and_slope(rows.score, x[i], row_max, deep).s);
      s.score_sum += y[i];
    }
    *reinterpret_cast<float4*>(row + e) = make_float4(y[0], y[1], y[2], y[3]);
  }
  s.exp_sum = warp_sum(s.exp_sum), s.score_sum = warp_sum(s.score_sum);
  if (none) return {0.0f, 0.0f, row_max, 0.0f};
  return {scalar::div(1.0f, s.score_sum), row_lse<kSoftmax>(rows.score, s), row_max, s.exp_sum};
}

// Turns the row into scores. shift: near the largest logit for softmax (it need not be it), 0 otherwise.
template <bool kSoftmax>
__device__ __forceinline__ RowScale score_row(const RouterRows& rows, int t, float* row, float shift) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float sum[4] = {}, score[4] = {};
#pragma unroll(kSoftmax ? 3 : 2)
  for (int e = lane * 4; e < rows.E; e += 128) {
    float x[4];
    load4<float, false>(row + e, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = exp_fast(kSoftmax ? x[i] - shift : x[i]);
      sum[i] += x[i];
    }
    if constexpr (!kSoftmax) {
      // One reciprocal for four sigmoids: the warps of an SM are at their scores at about the same time, and that unit is the narrowest.
      // Numerators x0 (1 + x1) and so on, denominators of pairs.
      const float n0 = __fmaf_rn(x[0], x[1], x[0]), n1 = __fmaf_rn(x[0], x[1], x[1]), n2 = __fmaf_rn(x[2], x[3], x[2]), n3 = __fmaf_rn(x[2], x[3], x[3]);
      const float ab = (1.0f + x[0]) + n1, cd = (1.0f + x[2]) + n3, inverse = ptx::rcp_approx(ab * cd), of_ab = inverse * cd, of_cd = inverse * ab;
      x[0] = n0 * of_ab, x[1] = n1 * of_ab, x[2] = n2 * of_cd, x[3] = n3 * of_cd;
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] += x[i];
    }
    *reinterpret_cast<float4*>(row + e) = make_float4(x[0], x[1], x[2], x[3]);
  }
  const float exp_sum = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  // Sigmoid: the largest logit lies in [-37, 20], so that the product of four stays finite. Softmax: the row has a logit.
  if (!(exp_sum >= 9.4e-14f && exp_sum <= 4.8e8f)) {
    __syncwarp();
    return score_row_slowly<kSoftmax>(rows, row_of<float>(rows, t), row);
  }
  return {ptx::rcp_approx(kSoftmax ? exp_sum : warp_sum((score[0] + score[1]) + (score[2] + score[3]))), shift + scalar::log(exp_sum), shift, exp_sum};
}

// Adds the group's rows to this thread's columns: groups of four columns j, j + 32 kGroup, ...
template <int kVectors, int kGroup, int kColumns>
__device__ __forceinline__ void add_columns(const float* first_row, const float* scales, int E, float (&sums)[kColumns][4]) {
  constexpr int kThreads = 32 * kGroup;
  const int j = (static_cast<int>(threadIdx.x) % kThreads) * 4;
#pragma unroll 1
  for (int r = 0; r < kGroup; ++r) {
    const float scale = scales[r];
    if (scale == 0.0f) continue;  // no row, padding, or a row without a logit
    const float* row = first_row + r * kVectors * 128 + j;
#pragma unroll
    for (int a = 0; a < kColumns; ++a) {
      if (j + a * 4 * kThreads >= E) break;
      const float4 v = *reinterpret_cast<const float4*>(row + a * 4 * kThreads);
      sums[a][0] = __fmaf_rn(v.x, scale, sums[a][0]), sums[a][1] = __fmaf_rn(v.y, scale, sums[a][1]);
      sums[a][2] = __fmaf_rn(v.z, scale, sums[a][2]), sums[a][3] = __fmaf_rn(v.w, scale, sums[a][3]);
    }
  }
}

template <int kVectors, int kMode, bool kSoftmax>
__global__ void __launch_bounds__(kSumsWarps<kVectors, kMode> * 32, 1) router_forward_sums(const __grid_constant__ RouterForwardParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  using Scratch = WarpScratch<WarpPolicy<kVectors>::kCandidates>;
  constexpr int kWidth = kVectors * 128, kWarps = kSumsWarps<kVectors, kMode>, kGroup = kSumsGroup<kVectors, kMode>, kGroups = kWarps / kGroup;
  constexpr int kColumns = (kVectors + kGroup - 1) / kGroup;
  __shared__ float scales[kWarps];
  __shared__ double squares[kWarps];
  const RouterRows& rows = p.rows;
  const int E = rows.E, warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31, group = warp / kGroup;
  std::uint32_t* hist = reinterpret_cast<std::uint32_t*>(dynamic_smem);
  float* bias_smem = reinterpret_cast<float*>(hist + kWidth + 4);
  float* all_rows = reinterpret_cast<float*>(dynamic_smem + staged_cta_bytes<kVectors>(kMode));
  float* row = all_rows + static_cast<std::size_t>(warp) * kWidth;
  unsigned char* next = reinterpret_cast<unsigned char*>(all_rows + static_cast<std::size_t>(kWarps) * kWidth);
  Scratch& scratch = reinterpret_cast<Scratch*>(next)[warp];
  next += static_cast<std::size_t>(kWarps) * sizeof(Scratch);
  std::uint64_t* full = reinterpret_cast<std::uint64_t*>(next) + warp * 2;

  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
    squares[warp] = 0.0;
  }
  for (int e = E + lane; e < kWidth; e += 32) row[e] = lowest_logit<float>();
  __syncwarp();
  begin_kernel();
  await_previous();
  const int T_rows = static_cast<int>(rows.T), grid = static_cast<int>(gridDim.x), num_warps = grid * kWarps;
  const auto fetch = [&](int t) {
    if (lane == 0 && t < T_rows) {
      ptx::mbarrier_arrive_expect(full, static_cast<std::uint32_t>(E) * 4u);
      ptx::bulk_load(row, row_of<float>(rows, t), static_cast<std::uint32_t>(E) * 4u, full);
    }
  };
  int t = warp * grid + static_cast<int>(blockIdx.x);
  fetch(t);
  for (int e = E + static_cast<int>(threadIdx.x); kMode != kPlain && e < kWidth; e += static_cast<int>(blockDim.x)) bias_smem[e] = -kInfinity;
  prepare_cta<kMode>(rows, hist, bias_smem);
  const float* bias = kMode == kPlain ? nullptr : bias_smem;
  const bool need_sum = rows.score == kScoreSoftmax && rows.renormalise == 0;
  float sums[kColumns][4] = {};
  // All groups go on while the CTA's first warp has a row: racecheck counts barriers a warp, and takes groups that have passed fewer of their own for
  // ones that have not waited for the others in the end.
  for (std::uint32_t parity = 0; t - warp * grid < T_rows; t += num_warps, parity ^= 1u) {
    int count = -1;  // no row
    float scale = 0.0f;
    if (t < T_rows) {
      ptx::mbarrier_wait(full, parity);
      if (rows.padding != nullptr && rows.padding[t] != 0) {
        write_empty_row(p, t, hist);
      } else {
        StagedScan<kVectors, kMode> s;
        scan_row<float, kVectors, kMode>(rows, row, bias_smem, s);
        if (__any_sync(ptx::kFullWarp, s.poison != s.poison)) {
          count_nonfinite_rows(p.status, 1);
          sanitise_row(row, E);
          if constexpr (kMode == kPlain) {
#pragma unroll 1
            for (int again = 0; again < 1; ++again) scan_row<float, kVectors, kMode>(rows, row, bias_smem, s);
          }
        }
        const float threshold = fmaxf(lowered_threshold(kMode, rows.score, group_threshold(s.group_max, rows.K)), -3.402823466e38f);
        count = collect_staged<float, kVectors, kMode>(rows, row, bias_smem, s, threshold, scratch);
        float shift = 0.0f;
        if (kSoftmax) {
#pragma unroll
          for (int g = 0; g < WarpPolicy<kVectors>::kGroups; ++g) shift = g == 0 ? s.group_max[0] : fmaxf(shift, s.group_max[g]);
          shift = kMode == kPlain ? warp_max(shift) : generic_row_max(rows, row);
          shift = fmaxf(shift, -1e30f);
        }
        const RowScale of_row = score_row<kSoftmax>(rows, t, row, shift);
        scale = of_row.scale;
        if (lane == 0) squares[warp] += static_cast<double>(of_row.lse) * static_cast<double>(of_row.lse);
        if (need_sum) store_sum(scratch, of_row.row_max, of_row.exp_sum);
      }
      ptx::fence_async_proxy();  // before the copy engine writes the row again
    }
    if (lane == 0) scales[warp] = scale;
    ptx::named_barrier(1 + group, kGroup * 32);
    add_columns<kVectors, kGroup>(all_rows + static_cast<std::size_t>(group) * kGroup * kWidth, scales + group * kGroup, E, sums);
    ptx::named_barrier(1 + group, kGroup * 32);
    fetch(t + num_warps);
    if (count >= 0) {
      const bool fits = count <= WarpPolicy<kVectors>::kCandidates;
      if (!fits || !finish_row<float, false>(p, bias, count, scratch, t, hist)) {
        __syncwarp();
        route_exactly<float>(p, bias, t, scratch, hist);
      }
    }
    __syncwarp();
  }
  // The columns of a group go to its first row, which has been added; then those of all groups are added in order. The counts are on their way
  // meanwhile. The thread's number is read again, so that no register keeps it.
  const int thread = static_cast<int>(ptx::thread_again());
#pragma unroll
  for (int a = 0; a < kColumns; ++a) {
    const int e = (thread % (32 * kGroup) + a * 32 * kGroup) * 4;
    if (e >= E) break;
    *reinterpret_cast<float4*>(all_rows + thread / (32 * kGroup) * kGroup * kWidth + e) = make_float4(sums[a][0], sums[a][1], sums[a][2], sums[a][3]);
  }
  __syncthreads();
  add_histogram(p, hist);
  const std::uint32_t number = draw_number(p);
  for (int e = thread * 4; e < E; e += kWarps * 128) {
    float4 v = *reinterpret_cast<const float4*>(all_rows + e);
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      const float4 more = *reinterpret_cast<const float4*>(all_rows + g * kGroup * kWidth + e);
      v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
    }
    *reinterpret_cast<float4*>(p.sum_partials + static_cast<std::size_t>(blockIdx.x) * E + e) = v;
  }
  if (thread == kWarps * 32 - 1) {
    double sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += squares[w];
    p.square_partials[blockIdx.x] = sum;
  }
  if (p.sums_ready != nullptr) {  // not by the thread that waits for the counts
    __syncthreads();
    if (thread == 32) ptx::fence_acq_rel_gpu(), ptx::red_add(p.sums_ready, 1u);
  }
  finish_counts(p, number);
#endif
}

// The number of partial sums the launch leaves; 0: not a problem of this kernel, nothing was launched.
template <int kVectors, int kMode, bool kSoftmax>
int launch_sums(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr int kWarps = kSumsWarps<kVectors, kMode>;
  constexpr std::size_t kBytes = staged_cta_bytes<kVectors>(kMode) + kWarps * staged_warp_bytes<float, kVectors>();
  const std::int64_t needed = (p.rows.T + kWarps - 1) / kWarps;
  if (kBytes + 2048 > static_cast<std::size_t>(limits.shared_per_block) || needed > static_cast<std::int64_t>(limits.num_sms) * kSumsMaxRounds) return 0;
  const auto kernel = router_forward_sums<kVectors, kMode, kSoftmax>;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  const int grid = static_cast<int>(needed < 1 ? 1 : (needed < limits.num_sms ? needed : limits.num_sms));
  launch_kernel(kernel, static_cast<unsigned>(grid), kWarps * 32, kBytes, stream, true, p);
  return grid;
}

}  // namespace waybill::cuda
