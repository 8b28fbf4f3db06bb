// SPDX-License-Identifier: Apache-2.0
// Warps 0, 2 and 3 of an 8-bit grouped matmul CTA (fp8_sm90.cuh): tensor copies of codes and of scales that a map
// describes, 4-byte copies of others. Warp 1 draws units as the bf16 kernels' does.
#pragma once

#include "ops/gemm/cuda/fp8_config.cuh"
#include "ops/gemm/cuda/grouped_producer.cuh"

namespace waybill::ptx {
// Lines of global memory into the L2; 16-byte aligned, a multiple of 16 bytes.
__device__ __forceinline__ void bulk_prefetch(const void* gmem, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(gmem), "r"(bytes) : "memory");
}
}  // namespace waybill::ptx

namespace waybill::cuda {

// --- warp 0 ---
template <class C>
__device__ __forceinline__ void load_codes(const Fp8Params& p, const Unit& u, std::uint8_t* to, std::uint64_t* bar, int block, int halves, bool loads_a,
                                           int rank) {
  const bool shared_a = C::kCluster == 2 && u.pair == kPairN, shared_b = C::kCluster == 2 && u.pair == kPairM;
  const bool in_blocks = C::kForm == GemmForm::kTN;
  if (loads_a) {
    const int x = in_blocks ? 0 : block * fp8_limits::kBlockK, z = in_blocks ? u.k_row + block : 0;
    if (shared_a) {
      for (int h = rank; h < halves; h += 2) ptx::tensor_load_3d_multicast(to + h * gemm_limits::kHalfBytes, &p.a, x, u.m0 + h * 64, z, bar, 3);
    } else {
      for (int h = 0; h < halves; ++h) ptx::tensor_load_3d(to + h * gemm_limits::kHalfBytes, &p.a, x, u.m0 + h * 64, z, bar);
    }
  }
  if (u.n0 >= p.n) return;
  constexpr int kRows = C::kBlockN / 2;
  if (C::kCutsLastRound && u.is_narrow()) {  // one of the two boxes
    const int plane = p.b_blocks > 0 ? u.group * p.b_blocks + block : u.group, first = p.b_blocks > 0 ? 0 : block * fp8_limits::kBlockK;
    if (!shared_b) {
      ptx::tensor_load_3d(to + C::kBytesA, &p.b, first, u.n0, plane, bar);
    } else if (rank == 0) {
      ptx::tensor_load_3d_multicast(to + C::kBytesA, &p.b, first, u.n0, plane, bar, 3);
    }
    return;
  }
  const bool b_in_blocks = in_blocks || p.b_blocks > 0;
  const int x = b_in_blocks ? 0 : block * fp8_limits::kBlockK;
  const int z = in_blocks ? u.k_row + block : (p.b_blocks > 0 ? u.group * p.b_blocks + block : u.group);
  std::uint8_t* b = to + C::kBytesA;
  if (shared_b) {
    ptx::tensor_load_3d_multicast(b + rank * kRows * fp8_limits::kBlockK, &p.b, x, u.n0 + rank * kRows, z, bar, 3);
  } else {
    ptx::tensor_load_3d(b, &p.b, x, u.n0, z, bar);
    ptx::tensor_load_3d(b + kRows * fp8_limits::kBlockK, &p.b, x, u.n0 + kRows, z, bar);
  }
}

template <class C>
__device__ void copy_codes(const Fp8Params& p, Fp8Shared<C>& shared, int rank) {
  Ring<kUnitSlots> units;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit u = shared.units[units.slot];
    ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) return;
    const bool has_columns = u.n0 < p.n, loads_a = has_columns || (C::kCluster == 2 && u.pair == kPairN);
    const int halves = min((u.m_valid + 63) / 64, C::kMathGroups);  // of 64 rows
    const bool has_scales = has_columns && (C::kForm == GemmForm::kTN || p.has_scale_map);
    const int bytes_b = C::kCutsLastRound && u.is_narrow() ? C::kBytesB / 2 : C::kBytesB;
    constexpr int kScaleBytes = 4 * (C::kForm == GemmForm::kTN ? C::kScaleFloats : fp8_limits::scale_box(C::kBlockM));
    const std::uint32_t bytes =
        static_cast<std::uint32_t>((loads_a ? halves * gemm_limits::kHalfBytes : 0) + (has_columns ? bytes_b : 0) + (has_scales ? kScaleBytes : 0));
    constexpr int kLead = 4;  // see copy_blocks()
    if (u.num_blocks == 0) ptx::mbarrier_arrive(&shared.unit_wanted);
    for (int block = 0; block < u.num_blocks; ++block) {
      if (block == max(u.num_blocks - kLead, 0)) ptx::mbarrier_arrive(&shared.unit_wanted);
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      std::uint64_t* bar = &shared.full[stages.slot];
      ptx::mbarrier_arrive_expect(bar, bytes);
      if (has_scales) {
        const int row = C::kForm == GemmForm::kTN ? u.k_row + block : block;
        float* scales = shared.scales[stages.slot];
        ptx::tensor_load_2d(scales, &p.a_scale_map, C::kForm == GemmForm::kTN ? u.m0 : u.m0 & ~3, row, bar);
        if constexpr (C::kForm == GemmForm::kTN) ptx::tensor_load_2d(scales + C::kFirstScaleB, &p.b_scale_map, u.n0, row, bar);
      }
      load_codes<C>(p, u, shared.stages[stages.slot], bar, block, halves, loads_a, rank);
      stages.advance();
    }
  }
}

// --- warp 2 of kTN where the copy engine adds to D ---
// Lines of D into the L2 while the tile's products are computed. Adds to lines that the L2 has to fetch first run at 1.25 TB/s
// of sums, others at 2.1.
template <class C>
__device__ void prefetch_sums(const Fp8Params& p, Fp8Shared<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Ring<kUnitSlots> units;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit u = shared.units[units.slot];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) return;
    if (!p.prefetches_sums || u.num_blocks == 0 || u.n0 >= p.n || u.slice != u.num_slices - 1) continue;
    const auto bytes = static_cast<std::uint32_t>(min(p.n - u.n0, C::kBlockN) * 4);
    const float* first = static_cast<const float*>(p.d_data) + u.group * p.d_plane + u.m0 * p.d_stride + u.n0;
    for (int row = lane; row < u.m_valid; row += 32) ptx::bulk_prefetch(first + row * p.d_stride, bytes);
  }
}

// --- warps 2 and 3: scales of kNT, which have strides ---
// Warps that copy scales: both where no map describes A's, or one for those of B's tiles alone.
template <class C>
__device__ __forceinline__ int scale_warps(const Fp8Params& p) {
  return C::kForm == GemmForm::kTN ? 0 : (p.has_scale_map ? 1 : 2);
}
// Their arrivals at a stage's barrier.
template <class C>
__device__ __forceinline__ int scale_arrivals(const Fp8Params& p) {
  return C::kForm == GemmForm::kTN ? 0 : (p.has_scale_map ? C::kParts : 64);
}

// What lies outside the tensors becomes 0. thread: 0 to 63, with a map 0 to 31.
template <class C>
__device__ void copy_scales(const Fp8Params& p, Fp8Shared<C>& shared) {
  const int thread = static_cast<int>(threadIdx.x) - 64;
  Ring<kUnitSlots> units;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit u = shared.units[units.slot];
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) return;
    const bool has_tile = thread < C::kParts && u.n0 + 128 * thread < p.n;
    const float* tile = p.b_scales + (has_tile ? u.group * p.b_scale_group + (u.n0 / 128 + thread) * p.b_scale_column : 0);
    const std::int64_t step = has_tile ? p.b_scale_k : 0;
    for (int block = 0; block < u.num_blocks; ++block, tile += step) {
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      if (thread < C::kParts) ptx::copy_async_4(ptx::smem_address(&shared.scales[stages.slot][C::kFirstScaleB + thread]), tile, has_tile);
      if (!p.has_scale_map) {
#pragma unroll
        for (int h = 0; h < C::kMathGroups; ++h) {
          const int row = thread + 64 * h;
          const bool is_there = row < u.m_valid;
          const std::int64_t at = is_there ? (u.m0 + row) * p.a_scale_stride + block * p.a_scale_k : 0;
          ptx::copy_async_4(ptx::smem_address(&shared.scales[stages.slot][row + (u.m0 & 3)]), p.a_scales + at, is_there);
        }
      }
      if (!p.has_scale_map || thread < C::kParts) ptx::copy_async_arrive(&shared.full[stages.slot]);
      stages.advance();
    }
  }
}

}  // namespace waybill::cuda
