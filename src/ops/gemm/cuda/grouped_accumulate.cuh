// SPDX-License-Identifier: Apache-2.0
// D += the tile (kTN, fp32 results). Each math warp has the copy engine fetch D's values into its result buffers while the products are computed,
// adds its sums to them and has them stored; the fetch of the next columns goes out as soon as a buffer has been read. Every element is added to
// once, so the result is fixed. (Adding by the copy engine's reductions is bound by the L2's adds: 1.25 TB/s of sums.)
// A warp with fewer than 16 valid rows adds by reductions of its lanes (store_tile()).
#pragma once

#include "ops/gemm/cuda/grouped_config.cuh"
#include "ops/gemm/cuda/grouped_epilogue.cuh"

namespace waybill::cuda {

inline constexpr int kSumColumns = 32;  // of D in a buffer

template <class C>
inline constexpr bool kFetchesSums = C::kFetches;

__device__ __forceinline__ bool fetches_sums(const Unit& u, int warp) { return u.m_valid - 16 * warp >= gemm_limits::kBufferRows; }

template <class C, class Shared>
__device__ __forceinline__ void fetch_sums(const GroupedParams& p, Shared& shared, const Unit& u, int warp, int group) {
  std::uint64_t* bar = &shared.sums_full[warp][group % C::kBuffers];
  ptx::mbarrier_arrive_expect(bar, gemm_limits::kBufferBytes);
  ptx::tensor_load_3d(shared.buffers[warp][group % C::kBuffers], &p.d, u.n0 + kSumColumns * group, u.m0 + 16 * warp, u.group, bar);
}

// Lane 0 of a warp that fetches, early in a unit: the first buffers.
template <class C, class Shared>
__device__ __forceinline__ void start_sums(const GroupedParams& p, Shared& shared, const Unit& u, int warp) {
  ptx::bulk_wait_read<0>();  // the last unit's results have left the buffers
  ptx::fence_async_proxy();
#pragma unroll
  for (int group = 0; group < C::kBuffers; ++group) {
    if (u.n0 + kSumColumns * group < p.n) fetch_sums<C>(p, shared, u, warp, group);
  }
}

template <class C>
__device__ __forceinline__ void add_group(const float (&acc)[C::kBlockN / 2], int group, std::uint8_t* buffer, int lane) {
  const int row = lane / 4, q = lane % 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = 4 * (4 * group + j);
    auto* low = reinterpret_cast<float2*>(buffer + piece_offset(row, 2 * j + q / 2) + 8 * (q & 1));
    auto* high = reinterpret_cast<float2*>(buffer + piece_offset(row + 8, 2 * j + q / 2) + 8 * (q & 1));
    const float2 a = *low, c = *high;
    *low = make_float2(a.x + acc[at], a.y + acc[at + 1]), *high = make_float2(c.x + acc[at + 2], c.y + acc[at + 3]);
  }
}

// Room for all of the warp's results: one memory fence for all of them, and no buffer is waited for.
template <class C, class Shared>
__device__ __forceinline__ void add_all_sums(const float (&acc)[C::kBlockN / 2], Shared& shared, const GroupedParams& p, const Unit& u, int warp) {
  const int lane = ptx::thread_index() % 32;
  volatile unsigned& phases = shared.sums_phases[warp];  // in shared memory: held, it would cost spills
#pragma unroll
  for (int g = 0; g < C::kBuffers; ++g) {
    if (u.n0 + kSumColumns * g >= p.n) break;
    const unsigned phase = phases;
    ptx::mbarrier_wait(&shared.sums_full[warp][g], phase >> g & 1u);
    __syncwarp();
    if (lane == 0) phases = phase ^ 1u << g;
    add_group<C>(acc, g, shared.buffers[warp][g], lane);
  }
  ptx::fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int g = 0; g < C::kBuffers; ++g) {
      if (u.n0 + kSumColumns * g >= p.n) break;
      ptx::tensor_store_3d(&p.d, shared.buffers[warp][g], u.n0 + kSumColumns * g, u.m0 + 16 * warp, u.group);
    }
    ptx::bulk_commit();
  }
  __syncwarp();
}

template <class C, class Shared>
__device__ __forceinline__ void add_sums(const float (&acc)[C::kBlockN / 2], Shared& shared, const GroupedParams& p, const Unit& u, int warp) {
  constexpr int kGroups = C::kBlockN / kSumColumns, kBuffers = C::kBuffers;
  static_assert(kGroups % kBuffers == 0 && kBuffers >= 2);
  if constexpr (kGroups == kBuffers) {
    add_all_sums<C>(acc, shared, p, u, warp);
    return;
  }
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (u.n0 + kSumColumns * g >= p.n) break;
    const int b = g % kBuffers;
    volatile unsigned& phases = shared.sums_phases[warp];  // in shared memory: held, it would cost spills
    const unsigned phase = phases;
    ptx::mbarrier_wait(&shared.sums_full[warp][b], phase >> b & 1u);
    __syncwarp();
    if (lane == 0) phases = phase ^ 1u << b;
    std::uint8_t* buffer = shared.buffers[warp][b];
    add_group<C>(acc, g, buffer, lane);
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      ptx::tensor_store_3d(&p.d, buffer, u.n0 + kSumColumns * g, u.m0 + 16 * warp, u.group);
      ptx::bulk_commit();
      // The buffer before this one has been read by now, or soon.
      const int next = g - 1 + kBuffers;
      if (g > 0 && next < kGroups && u.n0 + kSumColumns * next < p.n) ptx::bulk_wait_read<1>(), fetch_sums<C>(p, shared, u, warp, next);
    }
    __syncwarp();
  }
}

}  // namespace waybill::cuda
