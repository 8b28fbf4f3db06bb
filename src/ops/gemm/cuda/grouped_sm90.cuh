// SPDX-License-Identifier: Apache-2.0
// Grouped matmul for sm_90a, bf16 operands, fp32 accumulators; the forms are in grouped_params.h.
//
// Grid: one cluster of 1 or 2 CTAs an SM (pair), persistent; 384 threads a CTA. Units of work come from a ticket in device memory, so
// clusters that drew short units take more of them; which cluster computes a unit does not change its result.
//   warp 0       one thread starts the tensor copies of a k block (64 wide) into a ring of shared-memory stages; what both CTAs need is
//                loaded half by each and multicast
//   warp 1       draws units and describes them to both roles through a ring of two
//   warps 4-11   two warpgroups, 64 rows x kBlockN of the tile each; one wgmma group stays in flight while the next stage is awaited. A
//                warpgroup without valid rows only hands its stages on.
// Bytes: every tile reads (128 + kBlockN) x k elements, mostly from the L2 (a pair shares one operand), and writes D once.
// kTN: the rows of a group's last k block that belong to the next group are zeroed in shared memory, in both operands (0 x NaN).
#pragma once

#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"
#include "ops/gemm/cuda/grouped_epilogue.cuh"
#include "ops/gemm/cuda/grouped_params.h"
#include "ops/gemm/cuda/grouped_units.cuh"

namespace waybill::cuda {

template <GemmForm kForm_, GemmOutput kOutput_, int kBlockN_, int kStages_, int kCluster_, int kBuffers_>
struct GroupedConfig {
  static constexpr GemmForm kForm = kForm_;
  static constexpr GemmOutput kOutput = kOutput_;
  static constexpr int kBlockN = kBlockN_, kStages = kStages_, kCluster = kCluster_, kBuffers = kBuffers_;
  static constexpr bool kMajorA = kForm != GemmForm::kTN, kMajorB = kForm == GemmForm::kNT;  // K-major
  static constexpr int kBytesA = gemm_limits::kBlockM * gemm_limits::kBlockBytes, kBytesB = kBlockN * gemm_limits::kBlockBytes;
  static constexpr int kThreads = 384, kMathWarps = gemm_limits::kMathWarps;
  static_assert(kBlockN % 64 == 0 && (kCluster == 1 || kCluster == 2));
};

template <class C>
struct GroupedShared {
  std::uint8_t stages[C::kStages][C::kBytesA + C::kBytesB];
  std::uint8_t buffers[C::kMathWarps][C::kBuffers][gemm_limits::kBufferBytes];
  std::uint64_t full[C::kStages], empty[C::kStages];
  std::uint64_t unit_full[2], unit_empty[2], unit_wanted, ticket_full[2], ticket_empty[2];
  Unit units[2];
  std::uint32_t ticket[2];
  int came_second[2];
};

// The value of lane 0, known to be the same in all lanes: what branches around matrix instructions must depend on.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(ptx::kFullWarp, value, 0); }

// Position in a ring of kSlots; `parity` is that of the barrier phase to wait for.
template <int kSlots>
struct Ring {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// --- warp 1: units ---
template <class C>
__device__ void draw_units(const GroupedParams& p, GroupedShared<C>& shared, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int num_clusters = static_cast<int>(gridDim.x) / C::kCluster;
  UnitWalker<C::kForm, C::kBlockN, C::kCluster> walker(p, lane, num_clusters);
  Ring<2> ring;
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
__device__ __forceinline__ void load_a(const GroupedParams& p, const Unit& u, std::uint8_t* to, std::uint64_t* bar, int k, int halves, bool shared_a, int rank) {
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

template <class C>
__device__ __forceinline__ void load_b(const GroupedParams& p, const Unit& u, std::uint8_t* to, std::uint64_t* bar, int k, bool shared_b, int rank) {
  if constexpr (C::kMajorB) {
    constexpr int kRows = C::kBlockN / 2;
    if (shared_b) {
      ptx::tensor_load_3d_multicast(to + rank * kRows * gemm_limits::kBlockBytes, &p.b, k, u.n0 + rank * kRows, u.group, bar, 3);
    } else {
      ptx::tensor_load_3d(to, &p.b, k, u.n0, u.group, bar);
      ptx::tensor_load_3d(to + kRows * gemm_limits::kBlockBytes, &p.b, k, u.n0 + kRows, u.group, bar);
    }
  } else {
    const int row = C::kForm == GemmForm::kTN ? u.k_row + k : k, group = C::kForm == GemmForm::kTN ? 0 : u.group;
#pragma unroll
    for (int chunk = 0; chunk < C::kBlockN / 64; ++chunk) {
      std::uint8_t* at = to + chunk * gemm_limits::kHalfBytes;
      if (shared_b) {
        ptx::tensor_load_3d_multicast(at + rank * (gemm_limits::kHalfBytes / 2), &p.b, u.n0 + chunk * 64, row + rank * 32, group, bar, 3);
      } else {
        ptx::tensor_load_3d(at, &p.b, u.n0 + chunk * 64, row, group, bar);
        ptx::tensor_load_3d(at + gemm_limits::kHalfBytes / 2, &p.b, u.n0 + chunk * 64, row + 32, group, bar);
      }
    }
  }
}

template <class C>
__device__ void copy_blocks(const GroupedParams& p, GroupedShared<C>& shared, int rank) {
  Ring<2> units;
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
    const std::uint32_t bytes = static_cast<std::uint32_t>((shared_a || has_columns ? halves * gemm_limits::kHalfBytes : 0) + (has_columns ? C::kBytesB : 0));
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
      if (shared_a || has_columns) load_a<C>(p, u, to, bar, k, halves, shared_a, rank);
      if (has_columns) load_b<C>(p, u, to + C::kBytesA, bar, k, shared_b, rank);
      stages.advance();
    }
  }
}

// --- warps 4 to 11: products ---
// Descriptor of a tile with rows of 128 bytes, swizzled in groups of 8 rows. K-major: the next 8 rows of M or N follow after 1024 bytes. M- or
// N-major: the next 8 rows of k follow after 1024 bytes, the next 64 columns after 8 KiB.
template <bool kIsKMajor>
__device__ __forceinline__ std::uint64_t tile_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kFixed = (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{kIsKMajor ? 1 : gemm_limits::kHalfBytes >> 4} << 16);
  return kFixed | ((address & 0x3ffffu) >> 4);
}

template <class C>
__device__ __forceinline__ void multiply_step(float (&acc)[C::kBlockN / 2], std::uint64_t a, std::uint64_t b, int step, int keep) {
  constexpr std::uint64_t kStepA = (C::kMajorA ? 32 : 16 * gemm_limits::kBlockBytes) >> 4, kStepB = (C::kMajorB ? 32 : 16 * gemm_limits::kBlockBytes) >> 4;
  ptx::WgmmaBf16<C::kBlockN>::template mma<C::kMajorA ? 0 : 1, C::kMajorB ? 0 : 1>(acc, a + step * kStepA, b + step * kStepB, keep);
}

// Rows from `tail` on become zero, in this warpgroup's part of A and in all of B (both warpgroups write the same zeros there).
template <class C>
__device__ __forceinline__ void clear_tail(std::uint8_t* a, std::uint8_t* b, int tail, int thread, int barrier) {
  const int rows = gemm_limits::kBlockK - tail;
  for (int i = thread; i < rows * (1 + C::kBlockN / 64) * 8; i += 128) {
    const int chunk = i / (rows * 8), rest = i % (rows * 8);
    std::uint8_t* at = chunk == 0 ? a : b + (chunk - 1) * gemm_limits::kHalfBytes;
    *reinterpret_cast<uint4*>(at + (tail + rest / 8) * gemm_limits::kBlockBytes + rest % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();
  ptx::named_barrier(barrier, 128);
}

// A tile cut into slices: neighbours meet in pairs, pairs of pairs after that, and so on; who comes second at a meeting adds what the first
// left in memory and goes on. The tree depends on the number of slices only, and a + b = b + a, so the sum does not depend on who came when.
// True for the warpgroup that holds the whole sum.
template <class C>
__device__ __forceinline__ bool meet_slices(float (&acc)[C::kBlockN / 2], const GroupedParams& p, const Unit& u, int rank, int warpgroup, int thread,
                                            int* came_second) {
  constexpr std::int64_t kFloats = 64 * C::kBlockN;
  const auto place = [&](int slice) { return (static_cast<std::int64_t>(u.first_slot + slice * u.slot_stride) * C::kCluster + rank) * 2 + warpgroup; };
  int slice = u.slice;  // the first one that acc holds
#pragma unroll 1
  for (int bit = 1; bit < u.num_slices; bit *= 2) {
    const int right = slice | bit;
    if (right >= u.num_slices) continue;  // nobody to meet at this level
    std::uint32_t* arrivals = p.arrivals + place(right);
    const auto arrive = [&](bool only_look) {
      if (thread == 0) {
        const bool second = only_look ? *static_cast<volatile std::uint32_t*>(arrivals) == 1 : atomicAdd(arrivals, 1u) == 1;
        if (second) atomicExch(arrivals, 0u);
        *came_second = second ? 1 : 0;
        __threadfence();
      }
      ptx::named_barrier(1 + warpgroup, 128);
      const bool second = *static_cast<volatile int*>(came_second) != 0;
      ptx::named_barrier(1 + warpgroup, 128);
      return second;
    };
    if (!arrive(true)) {
      write_partial<C::kBlockN>(acc, p.partials + place(slice) * kFloats, thread);
      __threadfence();
      ptx::named_barrier(1 + warpgroup, 128);
      if (!arrive(false)) return false;
    }
    add_partial<C::kBlockN>(acc, p.partials + place(slice ^ bit) * kFloats, thread);
    slice &= ~bit;
  }
  return true;
}

template <class C>
__device__ void multiply_blocks(const GroupedParams& p, GroupedShared<C>& shared, int rank) {
  const int thread = static_cast<int>(threadIdx.x) % 128, warpgroup = uniform(static_cast<int>(threadIdx.x) / 128) - 1, lane = thread % 32;
  const std::uint32_t stages_address = ptx::smem_address(shared.stages);
  // Lane r hands a stage on to CTA r.
  const std::uint32_t peer_empty = ptx::map_shared(shared.empty, lane < C::kCluster ? static_cast<std::uint32_t>(lane) : 0u);
  const auto hand_on = [&](int slot) {
    if (lane < C::kCluster) ptx::mbarrier_arrive_remote(peer_empty + static_cast<std::uint32_t>(slot) * 8);
  };
  const int warp_row = 64 * warpgroup + 16 * (thread / 32);
  std::uint8_t* buffers = shared.buffers[4 * warpgroup + thread / 32][0];
  Ring<2> units;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    Unit u = shared.units[units.slot];
    u.num_blocks = uniform(u.num_blocks), u.m_valid = uniform(u.m_valid), u.n0 = uniform(u.n0), u.k_tail = uniform(u.k_tail);
    u.num_slices = uniform(u.num_slices);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) break;
    const int valid = min(u.m_valid - 64 * warpgroup, 64), columns = p.n - u.n0;
    const auto first_element = [&](int row) {
      return ((C::kForm == GemmForm::kTN ? static_cast<std::int64_t>(u.group) * p.m : 0) + u.m0 + row) * static_cast<std::int64_t>(p.n) + u.n0;
    };
    const auto target = [&] {
      return WarpTarget{C::kForm == GemmForm::kTN ? u.group : 0, u.m0 + warp_row, u.n0, u.m_valid - warp_row, columns, lane, first_element(warp_row)};
    };
    if (valid <= 0 || columns <= 0) {
      for (int block = 0; block < u.num_blocks; ++block) {
        ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
        __syncwarp();
        hand_on(stages.slot);
        stages.advance();
      }
      continue;
    }
    if (C::kForm == GemmForm::kTN && u.num_blocks == 0) {
      if (C::kOutput != GemmOutput::kAddF32) store_zeros<C::kBlockN, C::kOutput>(p.d_data, first_element(64 * warpgroup), p.n, thread, valid, columns);
      continue;
    }
    const auto descriptor_a = [&] {
      return tile_descriptor<C::kMajorA>(stages_address + static_cast<std::uint32_t>(stages.slot * (C::kBytesA + C::kBytesB) + warpgroup * gemm_limits::kHalfBytes));
    };
    const auto descriptor_b = [&] {
      return tile_descriptor<C::kMajorB>(stages_address + static_cast<std::uint32_t>(stages.slot * (C::kBytesA + C::kBytesB) + C::kBytesA));
    };
    float acc[C::kBlockN / 2];
    int previous = 0;
#pragma unroll 1
    for (int block = 0; block < u.num_blocks; ++block) {
      ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
      if (C::kForm == GemmForm::kTN && block == u.num_blocks - 1 && u.k_tail < gemm_limits::kBlockK) {
        std::uint8_t* stage = shared.stages[stages.slot];
        clear_tail<C>(stage + warpgroup * gemm_limits::kHalfBytes, stage + C::kBytesA, u.k_tail, thread, 1 + warpgroup);
      }
      const std::uint64_t a = descriptor_a(), b = descriptor_b();
      ptx::wgmma_fence();
      multiply_step<C>(acc, a, b, 0, block != 0 ? 1 : 0);
#pragma unroll
      for (int step = 1; step < 4; ++step) multiply_step<C>(acc, a, b, step, 1);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (block > 0) hand_on(previous);
      previous = stages.slot;
      stages.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(acc);
    hand_on(previous);
    if (C::kForm == GemmForm::kTN && u.num_slices > 1) {
      if (meet_slices<C>(acc, p, u, rank, warpgroup, thread, &shared.came_second[warpgroup])) {
        store_tile<C::kBlockN, C::kOutput, C::kBuffers>(acc, buffers, p, target());
      }
      continue;
    }
    if (C::kForm != GemmForm::kTN && p.bias != nullptr) add_bias<C::kBlockN>(acc, p.bias + static_cast<std::int64_t>(u.group) * p.n + u.n0, columns, thread % 4);
    store_tile<C::kBlockN, C::kOutput, C::kBuffers>(acc, buffers, p, target());
  }
  if (C::kBuffers > 1 && lane == 0) ptx::bulk_wait_read<0>();  // shared memory stays until it is read
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) grouped_gemm_sm90(const __grid_constant__ GroupedParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  GroupedShared<C>& shared = *reinterpret_cast<GroupedShared<C>*>(shared_bytes);
  static_assert(sizeof(GroupedShared<C>) <= gemm_limits::shared_bytes({C::kBlockN, C::kStages, C::kCluster, C::kBuffers}));
  const int rank = C::kCluster == 2 ? static_cast<int>(ptx::cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a), ptx::prefetch_tensor_map(&p.b), ptx::prefetch_tensor_map(&p.d);
    for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(&shared.full[i], 1), ptx::mbarrier_init(&shared.empty[i], C::kCluster * C::kMathWarps);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&shared.unit_full[i], 1), ptx::mbarrier_init(&shared.unit_empty[i], 1 + C::kMathWarps);
      ptx::mbarrier_init(&shared.ticket_full[i], 1), ptx::mbarrier_init(&shared.ticket_empty[i], 1);
    }
    ptx::mbarrier_init(&shared.unit_wanted, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (C::kCluster == 2) ptx::cluster_arrive(), ptx::cluster_wait();
  // Launched before its predecessor has ended where the launch allows it; everything above touches nothing of it.
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    ptx::register_limit_lower<56>();
    if (threadIdx.x == 0) copy_blocks<C>(p, shared, rank);
    if (threadIdx.x / 32 == 1) draw_units<C>(p, shared, rank);
  } else {
    ptx::register_limit_raise<224>();
    multiply_blocks<C>(p, shared, rank);
  }
  // A CTA stays until its peer no longer writes to it.
  if constexpr (C::kCluster == 2) {
    __syncwarp();
    ptx::cluster_arrive(), ptx::cluster_wait();
  }
#endif
}

}  // namespace waybill::cuda
