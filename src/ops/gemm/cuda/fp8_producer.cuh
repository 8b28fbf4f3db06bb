// SPDX-License-Identifier: Apache-2.0
// Warps 0, 2 and 3 of an 8-bit grouped matmul CTA (fp8_sm90.cuh): tensor copies of codes, 4- and 16-byte copies of scales. Warp 1 draws units
// as the bf16 kernels' does.
#pragma once

#include "ops/gemm/cuda/fp8_config.cuh"
#include "ops/gemm/cuda/grouped_producer.cuh"

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
      if (rank < halves) ptx::tensor_load_3d_multicast(to + rank * gemm_limits::kHalfBytes, &p.a, x, u.m0 + rank * 64, z, bar, 3);
    } else {
      for (int h = 0; h < halves; ++h) ptx::tensor_load_3d(to + h * gemm_limits::kHalfBytes, &p.a, x, u.m0 + h * 64, z, bar);
    }
  }
  if (u.n0 >= p.n) return;
  constexpr int kRows = C::kBlockN / 2;
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
    const int halves = u.m_valid > 64 ? 2 : 1;
    const std::uint32_t bytes = static_cast<std::uint32_t>((loads_a ? halves * gemm_limits::kHalfBytes : 0) + (has_columns ? C::kBytesB : 0));
    constexpr int kLead = 4;  // see copy_blocks()
    if (u.num_blocks == 0) ptx::mbarrier_arrive(&shared.unit_wanted);
    for (int block = 0; block < u.num_blocks; ++block) {
      if (block == max(u.num_blocks - kLead, 0)) ptx::mbarrier_arrive(&shared.unit_wanted);
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      std::uint64_t* bar = &shared.full[stages.slot];
      ptx::mbarrier_arrive_expect(bar, bytes);
      load_codes<C>(p, u, shared.stages[stages.slot], bar, block, halves, loads_a, rank);
      stages.advance();
    }
  }
}

// --- warps 2 and 3 ---
// Scales of one k block; what lies outside the tensors becomes 0. thread: 0 to 63.
template <class C>
__device__ __forceinline__ void load_scales(const Fp8Params& p, const Unit& u, float* to, int block, int thread) {
  if constexpr (C::kForm == GemmForm::kNT) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = thread + 64 * h;
      const bool is_there = row < u.m_valid;
      const std::int64_t at = is_there ? (u.m0 + row) * p.a_scale_stride + block * p.a_scale_k : 0;
      ptx::copy_async_4(ptx::smem_address(to + row), p.a_scales + at, is_there);
    }
    if (thread < C::kParts) {
      const bool is_there = u.n0 + 128 * thread < p.n;
      const std::int64_t at = is_there ? u.group * p.b_scale_group + (u.n0 / 128 + thread) * p.b_scale_column + block * p.b_scale_k : 0;
      ptx::copy_async_4(ptx::smem_address(to + fp8_limits::kScalesA + thread), p.b_scales + at, is_there);
    }
  } else {
    const std::int64_t row = u.k_row + block;
    if (4 * thread < C::kBlockN) {
      const bool is_there = row < p.max_blocks && u.n0 + 4 * thread < p.n;
      ptx::copy_async_16(ptx::smem_address(to + fp8_limits::kScalesA + 4 * thread), p.b_scales + (is_there ? row * p.b_scale_stride + u.n0 + 4 * thread : 0),
                         is_there);
    }
    if (thread < 32) {
      const bool is_there = row < p.max_blocks && u.m0 + 4 * thread < p.m;
      ptx::copy_async_16(ptx::smem_address(to + 4 * thread), p.a_scales + (is_there ? row * p.a_scale_stride + u.m0 + 4 * thread : 0), is_there);
    }
  }
}

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
    for (int block = 0; block < u.num_blocks; ++block) {
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      load_scales<C>(p, u, shared.scales[stages.slot], block, thread);
      ptx::copy_async_arrive(&shared.full[stages.slot]);
      stages.advance();
    }
  }
}

}  // namespace waybill::cuda
