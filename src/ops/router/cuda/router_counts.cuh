// SPDX-License-Identifier: Apache-2.0
// Counts and offsets of the chosen experts, from the launch that chooses them. Integers only: no order of CTAs shows in the result.
//
// Every CTA counts in shared memory and adds its histogram to the counts in global memory. Who turns them into offsets?
// by sum:    the CTA that comes last to the end of its rows. It reads the counts until they add up to T * K less the routes that rows could
//            not fill (one more counter): every count only grows, so at that sum each has its last value. No fence between the CTAs' adds and
//            the number they draw, so the number, the adds and the first reading are on their way together.
// by ticket: the CTA that ends last, told by an acquire-release ticket (kernels that count other things).
#pragma once

#include "ops/router/cuda/router_device.cuh"

namespace waybill::cuda {

// hist [E + 1] in shared memory; the last word counts missing routes.
__device__ __forceinline__ void clear_histogram(std::uint32_t* hist, int E) {
  for (int e = static_cast<int>(threadIdx.x); e <= E; e += static_cast<int>(blockDim.x)) hist[e] = 0;
}
__device__ __forceinline__ void count_missing(const RouterRows& rows, std::uint32_t* hist, int chosen) {
  if ((threadIdx.x & 31) == 0) atomicAdd(hist + rows.E, static_cast<std::uint32_t>(rows.K - chosen));
}
__device__ __forceinline__ void flush_histogram(const RouterForwardParams& p, const std::uint32_t* hist) {
  if (p.scratch.counts == nullptr) return;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e <= p.rows.E; e += static_cast<int>(blockDim.x)) {
    const std::uint32_t n = hist[e];
    if (n != 0) ptx::red_add(p.scratch.counts + e, n);
  }
}

// Called by every thread of every CTA once its rows are done. Leaves the scratch zero for the next launch.
__device__ __noinline__ inline void finish_counts(const RouterForwardParams& p) {
  if (p.scratch.counts == nullptr) return;
  const bool by_sum = p.scratch.reached != nullptr;
  __shared__ std::uint32_t warp_totals[2][32], missing, reached;
  const int E = p.rows.E, lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5, warps = static_cast<int>(blockDim.x) >> 5;
  const auto a = static_cast<std::uint32_t>(p.alignment), all = static_cast<std::uint32_t>(p.rows.T * p.rows.K);
  // Each thread owns a run of experts, the first kRun counts in registers.
  constexpr int kRun = 4;
  const int run = (E + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  const int begin = static_cast<int>(threadIdx.x) * run, end = min(begin + run, E);
  const auto count_of = [&](int e) { return ptx::ld_relaxed_gpu(p.scratch.counts + e); };
  std::uint32_t held[kRun], sum = 0, missing_now = 0;
  const auto read = [&] {  // this thread's counts; one trip
    if (threadIdx.x == 0) missing_now = count_of(E);
#pragma unroll
    for (int i = 0; i < kRun; ++i) held[i] = begin + i < end ? count_of(begin + i) : 0u;
    sum = 0;
    for (int e = begin + kRun; e < end; ++e) sum += count_of(e);
#pragma unroll
    for (int i = 0; i < kRun; ++i) sum += held[i];
  };
  if (by_sum) {
    // The number comes back while the counts are read for the first time, by every CTA: the one they are complete for need not ask again.
    std::uint32_t number = 0;
    if (threadIdx.x == 0) number = ptx::atom_add_relaxed_gpu(p.scratch.reached, 1u);
    read();
    if (threadIdx.x == 0) reached = number;
    __syncthreads();
    if (reached != gridDim.x - 1) return;
  } else {
    if (!is_last_cta(p.scratch.ticket)) return;
    read();
  }
#pragma unroll 1
  for (;; read()) {
    if (threadIdx.x == 0) missing = missing_now;
    const std::uint32_t of_warp = ptx::redux_add(sum);
    if (lane == 0) warp_totals[0][warp] = of_warp;
    __syncthreads();
    const std::uint32_t total = ptx::redux_add(lane < warps ? warp_totals[0][lane] : 0u);
    if (!by_sum || total + missing == all) break;
    __syncthreads();  // before the totals are written again
  }
  std::uint32_t padded_sum = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) padded_sum += (held[i] + a - 1) / a * a;
  for (int e = begin + kRun; e < end; ++e) padded_sum += (count_of(e) + a - 1) / a * a;
  const std::uint32_t own = sum, padded_own = padded_sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const std::uint32_t below = __shfl_up_sync(ptx::kFullWarp, sum, step), padded_below = __shfl_up_sync(ptx::kFullWarp, padded_sum, step);
    if (lane >= step) sum += below, padded_sum += padded_below;
  }
  if (lane == 31) warp_totals[1][warp] = padded_sum;
  __syncthreads();
  std::uint32_t before = sum - own + ptx::redux_add(lane < warp ? warp_totals[0][lane] : 0u);
  std::uint32_t padded_before = padded_sum - padded_own + ptx::redux_add(lane < warp ? warp_totals[1][lane] : 0u);
  const auto put = [&](int e, std::uint32_t n) {
    p.scratch.counts[e] = 0;
    before += n, padded_before += (n + a - 1) / a * a;
    if (p.counts != nullptr) p.counts[e] = static_cast<std::int32_t>(n);
    if (p.offsets != nullptr) p.offsets[e + 1] = static_cast<std::int32_t>(before);
    if (p.aligned_offsets != nullptr) p.aligned_offsets[e + 1] = static_cast<std::int32_t>(padded_before);
  };
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (begin + i < end) put(begin + i, held[i]);
  }
  for (int e = begin + kRun; e < end; ++e) put(e, count_of(e));
  if (threadIdx.x == 0) {
    p.scratch.counts[E] = 0;
    if (by_sum) *p.scratch.reached = 0;
    if (p.offsets != nullptr) p.offsets[0] = 0;
    if (p.aligned_offsets != nullptr) p.aligned_offsets[0] = 0;
  }
}

}  // namespace waybill::cuda
