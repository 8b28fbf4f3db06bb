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

// n rounded up to a; divisions would be most of what the last CTA has left to do.
__device__ __forceinline__ std::uint32_t rounded_up(std::uint32_t n, std::uint32_t a) {
  return (a & (a - 1)) == 0 ? (n + a - 1) & ~(a - 1) : (n + a - 1) / a * a;
}

// hist [E + 1] in shared memory; the last word counts missing routes.
__device__ __forceinline__ void clear_histogram(std::uint32_t* hist, int E) {
  for (int e = static_cast<int>(threadIdx.x); e <= E; e += static_cast<int>(blockDim.x)) hist[e] = 0;
}
__device__ __forceinline__ void count_missing(const RouterRows& rows, std::uint32_t* hist, int chosen) {
  if ((threadIdx.x & 31) == 0) atomicAdd(hist + rows.E, static_cast<std::uint32_t>(rows.K - chosen));
}
// Once every thread of the CTA has counted; flush_histogram() waits for them.
__device__ __forceinline__ void add_histogram(const RouterForwardParams& p, const std::uint32_t* hist) {
  if (p.scratch.counts == nullptr) return;
  for (int e = static_cast<int>(threadIdx.x); e <= p.rows.E; e += static_cast<int>(blockDim.x)) {
    const std::uint32_t n = hist[e];
    if (n != 0) ptx::red_add(p.scratch.counts + e, n);
  }
}
__device__ __forceinline__ void flush_histogram(const RouterForwardParams& p, const std::uint32_t* hist) {
  if (p.scratch.counts == nullptr) return;
  __syncthreads();
  add_histogram(p, hist);
}
// Counting by sum: thread 0's ticket number, asked for behind the adds. It is on its way until finish_counts() uses it.
__device__ __forceinline__ std::uint32_t draw_number(const RouterForwardParams& p) {
  return threadIdx.x == 0 && p.scratch.reached != nullptr ? ptx::atom_add_relaxed_gpu(p.scratch.reached, 1u) : 0u;
}

// Called by every thread of every CTA once its rows are done. Leaves the scratch zero for the next launch.
__device__ __noinline__ inline void finish_counts(const RouterForwardParams& p, std::uint32_t number) {
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
    // Few counts are read for the first time by every CTA, while the number comes: the one they are complete for need not ask again.
    const bool ahead = E <= 256;
    if (ahead) read();
    if (threadIdx.x == 0) reached = number;
    __syncthreads();
    if (reached != gridDim.x - 1) return;
    if (!ahead) read();
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
  for (int i = 0; i < kRun; ++i) padded_sum += rounded_up(held[i], a);
  for (int e = begin + kRun; e < end; ++e) padded_sum += rounded_up(count_of(e), a);
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
    before += n, padded_before += rounded_up(n, a);
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

// The same by sum without a barrier of the CTA, for 32 * kPer experts: the warp that is the last of its CTA to have counted its rows adds the CTA's
// histogram to the counts and asks for them, and writes its rows' weights while they are on their way. Only where one warp is enough: 512 counts
// took it 2.7 us longer than the CTA.
template <int kPer>
struct CountsInFlight {
  // kCountsHeld before the warp has handed its counts over, kCountsOfOthers after, where it was not the CTA's last; lane 0 of that one has the CTA's
  // number.
  std::uint32_t number;
  // Eight counts a lane are asked for by the thread that added to them, and so come behind its own adds; four leave no registers for that and
  // come to shared memory.
  static constexpr bool kHeld = kPer == 8;
  std::uint32_t held[kHeld ? kPer : 1], missing;
};
inline constexpr std::uint32_t kCountsHeld = 0xffffffffu, kCountsOfOthers = 0xfffffffeu;
// buffer [64 * kPer] of the warp in shared memory, 16-byte aligned: the counts come into its first half, the routes that rows could not
// fill behind them, to be read after copy_async_wait.
template <int kPer>
__device__ __forceinline__ void ask_for_counts(const RouterForwardParams& p, std::uint32_t* buffer) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (lane == 0) ptx::copy_async_16(ptx::smem_address(buffer + kPer * 32), p.scratch.counts + kPer * 32, true);
#pragma unroll
  for (int i = 0; i < kPer / 4; ++i) {
    const int e = (i * 32 + lane) * 4;
    ptx::copy_async_16(ptx::smem_address(buffer + e), p.scratch.counts + e, true);
  }
  ptx::copy_async_commit();
}
// Once a warp, when it has counted its last row and no longer needs the buffer. arrived: zero before.
template <int kPer>
__device__ __forceinline__ void hand_over_counts(const RouterForwardParams& p, std::uint32_t* hist, std::uint32_t* arrived, std::uint32_t* buffer,
                                                 CountsInFlight<kPer>& c) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  std::uint32_t before = 0;
  __syncwarp();
  if (lane == 0) {
    __threadfence_block();
    before = atomicAdd(arrived, 1u);
  }
  c.number = kCountsOfOthers;
  if (__shfl_sync(ptx::kFullWarp, before, 0) != (blockDim.x >> 5) - 1) return;
  __threadfence_block();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const std::uint32_t n = atomicOr(hist + i * 32 + lane, 0u);
    if (n != 0) ptx::red_add(p.scratch.counts + i * 32 + lane, n);
  }
  if (lane == 0) {
    const std::uint32_t n = atomicOr(hist + kPer * 32, 0u);
    if (n != 0) ptx::red_add(p.scratch.counts + kPer * 32, n);
    c.number = ptx::atom_add_relaxed_gpu(p.scratch.reached, 1u);
  }
  if constexpr (CountsInFlight<kPer>::kHeld) {
    if (lane == 0) c.missing = ptx::ld_relaxed_gpu(p.scratch.counts + kPer * 32);
#pragma unroll
    for (int i = 0; i < kPer; ++i) c.held[i] = ptx::ld_relaxed_gpu(p.scratch.counts + i * 32 + lane);
  } else {
    ask_for_counts<kPer>(p, buffer);
  }
}
// The last CTA's last warp: counts and offsets from the counts in the buffer, which are asked for again until they are complete. In line: behind a
// call, each parameter of the kernel is a load from memory that nobody has touched (1.5 us).
template <int kPer>
__device__ __forceinline__ void write_counts_by_warp(const RouterForwardParams& p, std::uint32_t* buffer) {
  constexpr int kE = kPer * 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto a = static_cast<std::uint32_t>(p.alignment), all = static_cast<std::uint32_t>(p.rows.T * p.rows.K);
  std::uint32_t run[kPer], sum = 0, padded = 0;  // of this lane
#pragma unroll 1
  for (;;) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(buffer + lane * kPer + i);
      run[i] = four.x, run[i + 1] = four.y, run[i + 2] = four.z, run[i + 3] = four.w;
    }
    sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += run[i];
    if (ptx::redux_add(sum) + buffer[kE] == all) break;
    __syncwarp();
    ask_for_counts<kPer>(p, buffer);
    ptx::copy_async_wait<0>();
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) padded += rounded_up(run[i], a);
  std::uint32_t before = sum, padded_before = padded;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const std::uint32_t below = __shfl_up_sync(ptx::kFullWarp, before, step), padded_below = __shfl_up_sync(ptx::kFullWarp, padded_before, step);
    if (lane >= step) before += below, padded_before += padded_below;
  }
  before -= sum, padded_before -= padded;
  // The counts leave in turns of 32 experts, then the offsets through the buffer.
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    p.scratch.counts[i * 32 + lane] = 0;
    if (p.counts != nullptr) p.counts[i * 32 + lane] = static_cast<std::int32_t>(buffer[i * 32 + lane]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    before += run[i], padded_before += rounded_up(run[i], a);
    buffer[lane * kPer + i] = before, buffer[kE + lane * kPer + i] = padded_before;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int e = i * 32 + lane;
    if (p.offsets != nullptr) p.offsets[e + 1] = static_cast<std::int32_t>(buffer[e]);
    if (p.aligned_offsets != nullptr) p.aligned_offsets[e + 1] = static_cast<std::int32_t>(buffer[kE + e]);
  }
  if (lane == 0) {
    p.scratch.counts[kE] = 0, *p.scratch.reached = 0;
    if (p.offsets != nullptr) p.offsets[0] = 0;
    if (p.aligned_offsets != nullptr) p.aligned_offsets[0] = 0;
  }
}
// Once a warp, when it has written its rows.
template <int kPer>
__device__ __forceinline__ void finish_counts_by_warp(const RouterForwardParams& p, const CountsInFlight<kPer>& c, std::uint32_t* buffer) {
  if constexpr (!CountsInFlight<kPer>::kHeld) ptx::copy_async_wait<0>();
  if (__shfl_sync(ptx::kFullWarp, c.number, 0) != gridDim.x - 1) return;
  if constexpr (CountsInFlight<kPer>::kHeld) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int i = 0; i < kPer; ++i) buffer[i * 32 + lane] = c.held[i];
    if (lane == 0) buffer[kPer * 32] = c.missing;
  }
  write_counts_by_warp<kPer>(p, buffer);
}
// For a warp that has nothing else to do meanwhile.
template <int kPer>
__device__ __noinline__ void hand_over_late(const RouterForwardParams& p, std::uint32_t* hist, std::uint32_t* arrived, std::uint32_t* buffer) {
  CountsInFlight<kPer> counts;
  hand_over_counts<kPer>(p, hist, arrived, buffer, counts);
  finish_counts_by_warp<kPer>(p, counts, buffer);
}
// True where a kernel with the means does so.
__device__ __forceinline__ bool counts_by_warp(const RouterForwardParams& p) {
  return p.scratch.reached != nullptr && p.scratch.counts != nullptr && p.early_counts != 0;
}

}  // namespace waybill::cuda
