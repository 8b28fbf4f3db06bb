// SPDX-License-Identifier: Apache-2.0
// Warps 2 and 3 of a grouped matmul CTA where rows are read through a list (grouped_sm90.cuh): 16-byte copies into the stages, swizzled as the
// copy engine would. A thread's copies arrive on the stage's barrier by themselves, so that all stages can be under way; the math warps order
// them before the tensor cores' reads.
#pragma once

#include "ops/gemm/cuda/grouped_config.cuh"

namespace waybill::cuda {

// A thread copies piece `piece` (8 elements of 64) of rows row0 + 8 i.
struct GatherThread {
  int piece, row0, lane, warp;
  std::uint32_t place;  // of row row0 in a block of rows of 128 bytes

  __device__ GatherThread() {
    const int thread = static_cast<int>(threadIdx.x) - 64;
    piece = thread % 8, row0 = thread / 8, lane = thread % 32, warp = thread / 32;
    place = static_cast<std::uint32_t>(row0 * gemm_limits::kBlockBytes + ((piece ^ row0) << 4));
  }
};

inline constexpr std::uint32_t kNoRow = 0xffffffffu;

// The place of a row in units of 16 bytes; kNoRow: a padding row.
__device__ __forceinline__ std::uint32_t row_place(int source, int rows, std::uint32_t pieces_per_row) {
  return static_cast<unsigned>(source) < static_cast<unsigned>(rows) ? static_cast<std::uint32_t>(source) * pieces_per_row : kNoRow;
}

__device__ __forceinline__ void copy_piece(std::uint32_t to, const uint4* from, std::uint32_t row, bool is_there) {
  is_there = is_there && row != kNoRow;
  ptx::copy_async_16(to, from + (is_there ? row : 0), is_there);
}

// kNT, kNN: 128 rows of A, 64 of k at a time.
template <class C>
__device__ __forceinline__ void gather_unit_rows(const GroupedParams& p, GroupedShared<C>& shared, const Unit& u, Ring<C::kStages>& stages,
                                                 const GatherThread& t) {
  constexpr int kPasses = gemm_limits::kBlockM / 8;
  std::uint32_t rows[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int row = t.row0 + 8 * i;
    const int source = row < u.m_valid && u.n0 < p.n ? __ldg(p.a_list + u.m0 + row) : -1;
    rows[i] = row_place(source, p.a_rows, static_cast<std::uint32_t>(p.k / 8));
  }
  const int pieces = p.k / 8;
#pragma unroll 1
  for (int piece = t.piece; piece - t.piece < 8 * u.num_blocks; piece += 8) {
    ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
    const std::uint32_t to = ptx::smem_address(shared.stages[stages.slot]) + t.place;
    const uint4* from = static_cast<const uint4*>(p.a_data) + piece;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) copy_piece(to + i * 8 * gemm_limits::kBlockBytes, from, rows[i], piece < pieces);
    ptx::copy_async_arrive(&shared.full[stages.slot]);
    stages.advance();
  }
}

// kTN: 64 rows of the contraction, all columns of the tile. A warp copies 32 of the rows; lane 4 i + r knows where row 8 i + 4 warp + r is.
template <class C>
__device__ __forceinline__ void gather_unit_contraction(const GroupedParams& p, GroupedShared<C>& shared, const Unit& u, Ring<C::kStages>& stages,
                                                        const GatherThread& t) {
  const int width = p.a_list != nullptr ? p.m : p.n, column0 = (p.a_list != nullptr ? u.m0 : u.n0) + 8 * t.piece;
  const int chunks = u.m_valid <= 0 || u.n0 >= p.n ? 0 : (p.a_list != nullptr ? (u.m_valid > 64 ? 2 : 1) : C::kBlockN / 64);
  const auto fetch = [&](int block) {
    const int row = t.lane / 4 * 8 + 4 * t.warp + t.lane % 4;
    const int rows = block < u.num_blocks - 1 ? gemm_limits::kBlockK : (block == u.num_blocks - 1 ? u.k_tail : 0);
    const std::int32_t* list = (p.a_list != nullptr ? p.a_list : p.b_list) + u.k_row + block * gemm_limits::kBlockK;
    return row < rows ? __ldg(list + row) : -1;
  };
  int source = fetch(0);
#pragma unroll 1
  for (int block = 0; block < u.num_blocks; ++block) {
    const std::uint32_t mine = row_place(source, p.a_list != nullptr ? p.a_rows : p.b_rows, static_cast<std::uint32_t>(width) / 8);
    const unsigned dead = __ballot_sync(ptx::kFullWarp, mine == kNoRow);
    source = fetch(block + 1);  // under way while the copies are started
    std::uint32_t rows[gemm_limits::kBlockK / 8];
#pragma unroll
    for (int i = 0; i < gemm_limits::kBlockK / 8; ++i) rows[i] = __shfl_sync(ptx::kFullWarp, mine, 4 * i + t.row0 % 4);
    ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
    __syncwarp();
    if (t.lane == 0) shared.dead_rows[stages.slot][t.warp] = dead, ptx::mbarrier_arrive(&shared.full[stages.slot]);
    std::uint32_t to = ptx::smem_address(shared.stages[stages.slot]) + (p.a_list != nullptr ? 0 : C::kBytesA) + t.place;
#pragma unroll 2
    for (int column = column0, chunk = 0; chunk < chunks; ++chunk, column += 64, to += gemm_limits::kHalfBytes) {
      const uint4* from = static_cast<const uint4*>(p.a_list != nullptr ? p.a_data : p.b_data) + column / 8;
#pragma unroll
      for (int i = 0; i < gemm_limits::kBlockK / 8; ++i) copy_piece(to + i * 8 * gemm_limits::kBlockBytes, from, rows[i], column < width);
    }
    ptx::copy_async_arrive(&shared.full[stages.slot]);
    stages.advance();
  }
}

template <class C>
__device__ void gather_rows(const GroupedParams& p, GroupedShared<C>& shared) {
  const GatherThread t;
  Ring<kUnitSlots> units;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit& u = shared.units[units.slot];  // stays in shared memory: registers are few here
    if (u.num_blocks < 0) return;
    if constexpr (C::kForm == GemmForm::kTN) {
      gather_unit_contraction<C>(p, shared, u, stages, t);
    } else {
      gather_unit_rows<C>(p, shared, u, stages, t);
    }
    __syncwarp();
    if (t.lane == 0) ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
  }
}

}  // namespace waybill::cuda
