// SPDX-License-Identifier: Apache-2.0
// The roles of warps 0 and 1 of a grouped matmul CTA (grouped_sm90.cuh): draw units of work, start the tensor copies.
#pragma once

#include "ops/gemm/cuda/grouped_config.cuh"

namespace waybill::cuda {

// --- warp 1: units ---
template <class C, class Walker = UnitWalker<C::kForm, C::kBlockN, C::kCluster>, class Shared>
__device__ void draw_units(const GroupedParams& p, Shared& shared, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_clusters = static_cast<int>(gridDim.x) / C::kCluster;
  Walker walker(p, lane, num_clusters);
  Ring<kUnitSlots> ring;
  int unit = static_cast<int>(blockIdx.x) / C::kCluster;
  for (int drawn = 0;; ++drawn) {
    ptx::mbarrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
    if (drawn > 0) {
      // As late as possible: a unit drawn early waits behind this cluster's current one while others run dry.
      ptx::mbarrier_wait(&shared.unit_wanted, static_cast<std::uint32_t>(drawn - 1) & 1u);
      std::uint32_t ticket = 0;
      if (rank == 0) {
        if (lane == 0) ticket = atomicAdd(p.ticket, 1u) + static_cast<std::uint32_t>(num_clusters);
        ticket = __shfl_sync(ptx::kFullWarp, ticket, 0);
        if constexpr (C::kCluster == 2) {
          // The peer has read the ticket before last.
          const int slot = drawn & 1;
          if (drawn > 2) ptx::mbarrier_wait(&shared.ticket_empty[slot], static_cast<std::uint32_t>((drawn - 3) / 2) & 1u);
          if (lane == 0) ptx::store_remote(ptx::map_shared(&shared.ticket[slot], 1), ticket, ptx::map_shared(&shared.ticket_full[slot], 1));
        }
      } else {
        const int slot = drawn & 1;
        if (lane == 0) ptx::mbarrier_arrive_expect(&shared.ticket_full[slot], 4);
        __syncwarp();
        ptx::mbarrier_wait(&shared.ticket_full[slot], static_cast<std::uint32_t>((drawn - 1) / 2) & 1u);
        ticket = *static_cast<volatile std::uint32_t*>(&shared.ticket[slot]);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(&shared.ticket_empty[slot], 0));
      }
      unit = static_cast<int>(ticket);
    }
    Unit found{};
    const bool exists = walker.find(unit, rank, found);
    if (lane == 0) {
      if (!exists) found.num_blocks = -1;
      shared.units[ring.slot] = found;
      ptx::mbarrier_arrive(&shared.unit_full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
    if constexpr (C::kCutsLastRound) {
      if (drawn == 0 && p.cuts_last_round) walker.cut_last_round(num_clusters);
    }
    if (exists) continue;
    // Every cluster draws exactly one ticket too many (where the first unit did not exist, it is drawn here); the last one resets the count.
    if (rank == 0 && lane == 0) {
      const int beyond = max(walker.total() - num_clusters, 0) + num_clusters - 1;
      const int mine = drawn > 0 ? unit - num_clusters : static_cast<int>(atomicAdd(p.ticket, 1u));
      if (mine == beyond) atomicExch(p.ticket, 0u);
    }
    return;
  }
}

// --- warp 0: copies ---
template <class C>
__device__ __forceinline__ void load_a(const GroupedParams& p, const Unit& u, std::uint8_t* to, std::uint64_t* bar, int k, int halves, bool shared_a,
                                       int rank) {
  if constexpr (C::kMajorA) {
    if (shared_a) {
      if (rank < halves) ptx::tensor_load_2d_multicast(to + rank * gemm_limits::kHalfBytes, &p.a, k, u.m0 + rank * 64, bar, 3);
    } else {
      for (int h = 0; h < halves; ++h) ptx::tensor_load_2d(to + h * gemm_limits::kHalfBytes, &p.a, k, u.m0 + h * 64, bar);
    }
  } else {  // boxes of 64 columns and 32 rows
    for (int h = 0; h < halves; ++h) {
      std::uint8_t* at = to + h * gemm_limits::kHalfBytes;
      if (shared_a) {
        ptx::tensor_load_2d_multicast(at + rank * (gemm_limits::kHalfBytes / 2), &p.a, u.m0 + h * 64, u.k_row + k + rank * 32, bar, 3);
      } else {
        ptx::tensor_load_2d(at, &p.a, u.m0 + h * 64, u.k_row + k, bar);
        ptx::tensor_load_2d(at + gemm_limits::kHalfBytes / 2, &p.a, u.m0 + h * 64, u.k_row + k + 32, bar);
      }
    }
  }
}

// The first column of B for 64-column chunk `chunk` of a tile. With a gated activation the first half of a tile is gate columns, the second the up
// columns of the same numbers, n / 2 further on.
template <class C>
__device__ __forceinline__ int chunk_column(const GroupedParams& p, const Unit& u, int chunk) {
  if constexpr (C::kEpilogue == GemmEpilogue::kActivation) {
    constexpr int kHalf = C::kBlockN / 128;
    if (is_gated(p.act_kind)) return u.n0 / 2 + (chunk < kHalf ? chunk * 64 : p.n / 2 + (chunk - kHalf) * 64);
  }
  return u.n0 + chunk * 64;
}

template <class C>
__device__ __forceinline__ void load_b(const GroupedParams& p, const Unit& u, std::uint8_t* to, std::uint64_t* bar, int k, bool shared_b, int rank) {
  if constexpr (C::kMajorB) {
    constexpr int kRows = C::kBlockN / 2;
    const int first = chunk_column<C>(p, u, 0), second = C::kEpilogue == GemmEpilogue::kActivation ? chunk_column<C>(p, u, kRows / 64) : first + kRows;
    if (shared_b) {
      ptx::tensor_load_3d_multicast(to + rank * kRows * gemm_limits::kBlockBytes, &p.b, k, rank == 0 ? first : second, u.group, bar, 3);
    } else {
      ptx::tensor_load_3d(to, &p.b, k, first, u.group, bar);
      ptx::tensor_load_3d(to + kRows * gemm_limits::kBlockBytes, &p.b, k, second, u.group, bar);
    }
  } else {
    const int row = C::kForm == GemmForm::kTN ? u.k_row + k : k, group = C::kForm == GemmForm::kTN ? 0 : u.group;
#pragma unroll
    for (int chunk = 0; chunk < C::kBlockN / 64; ++chunk) {
      std::uint8_t* at = to + chunk * gemm_limits::kHalfBytes;
      const int column = chunk_column<C>(p, u, chunk);
      if (shared_b) {
        ptx::tensor_load_3d_multicast(at + rank * (gemm_limits::kHalfBytes / 2), &p.b, column, row + rank * 32, group, bar, 3);
      } else {
        ptx::tensor_load_3d(at, &p.b, column, row, group, bar);
        ptx::tensor_load_3d(at + gemm_limits::kHalfBytes / 2, &p.b, column, row + 32, group, bar);
      }
    }
  }
}

template <class C>
__device__ void copy_blocks(const GroupedParams& p, GroupedShared<C>& shared, int rank) {
  Ring<kUnitSlots> units;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    const Unit u = shared.units[units.slot];
    ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) return;
    const bool is_pair = C::kCluster == 2;
    const bool shared_a = is_pair && u.pair == kPairN, shared_b = is_pair && u.pair == kPairM, has_columns = u.n0 < p.n;
    const int halves = u.m_valid > 64 ? 2 : 1;
    // The rest is gathered through a list, by each CTA for itself.
    const bool loads_a = p.a_list == nullptr && (shared_a || has_columns), loads_b = p.b_list == nullptr && has_columns;
    const std::uint32_t bytes = static_cast<std::uint32_t>((loads_a ? halves * gemm_limits::kHalfBytes : 0) + (loads_b ? C::kBytesB : 0));
    // The next unit is asked for when the drawing is sure to end before this unit's copies do.
    constexpr int kLead = 8;
    if (u.num_blocks == 0) ptx::mbarrier_arrive(&shared.unit_wanted);
    for (int block = 0; block < u.num_blocks; ++block) {
      if (block == max(u.num_blocks - kLead, 0)) ptx::mbarrier_arrive(&shared.unit_wanted);
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      std::uint64_t* bar = &shared.full[stages.slot];
      std::uint8_t* to = shared.stages[stages.slot];
      ptx::mbarrier_arrive_expect(bar, bytes);
      const int k = block * gemm_limits::kBlockK;
      if (loads_a) load_a<C>(p, u, to, bar, k, halves, shared_a, rank);
      if (loads_b) load_b<C>(p, u, to + C::kBytesA, bar, k, shared_b, rank);
      stages.advance();
    }
  }
}

}  // namespace waybill::cuda
