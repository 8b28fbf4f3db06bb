// SPDX-License-Identifier: Apache-2.0
// Grouped matmul for sm_90a, bf16 operands, fp32 accumulators; the forms are in grouped_params.h.
//
// Grid: persistent clusters of 1 or 2 CTAs, a CTA an SM; 384 threads a CTA. Units of work come from a ticket in device memory, so
// clusters that drew short units take more of them; which cluster computes a unit does not change its result.
//   warp 0       one thread starts the tensor copies of a k block (64 wide) into a ring of shared-memory stages; what both CTAs need is
//                loaded half by each and multicast
//   warp 1       draws units and describes them to both roles through a ring
//   warps 2, 3   where rows are read through a list: gather them by 16-byte copies, swizzled as the copy engine would
//   warps 4-11   two warpgroups, 64 rows x kBlockN of the tile each; one wgmma group stays in flight while the next stage is awaited. A
//                warpgroup without valid rows only hands its stages on.
// Bytes: every tile reads (128 + kBlockN) x k elements, mostly from the L2 (a pair shares one operand), and writes D once.
// kTN: of a group's last k block only the steps of 16 rows that have some are multiplied; the rows of the last step that belong to the next group are zeroed
// in shared memory, in both operands (0 x NaN).
#pragma once

#include "core/cuda/wgmma.cuh"
#include "ops/gemm/cuda/grouped_accumulate.cuh"
#include "ops/gemm/cuda/grouped_activation.cuh"
#include "ops/gemm/cuda/grouped_epilogue.cuh"
#include "ops/gemm/cuda/grouped_gather.cuh"
#include "ops/gemm/cuda/grouped_producer.cuh"

namespace waybill::cuda {

// --- warps 4 to 11: products ---
// Descriptor of a tile with rows of 128 bytes, swizzled in groups of 8 rows. K-major: the next 8 rows of M or N follow after 1024 bytes. M- or
// N-major: the next 8 rows of k follow after 1024 bytes, the next 64 columns after 8 KiB.
template <bool kIsKMajor>
__device__ __forceinline__ std::uint64_t tile_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kFixed =
      (std::uint64_t{1} << 62) | (std::uint64_t{1024 >> 4} << 32) | (std::uint64_t{kIsKMajor ? 1 : gemm_limits::kHalfBytes >> 4} << 16);
  return kFixed | ((address & 0x3ffffu) >> 4);
}

template <class C>
__device__ __forceinline__ void multiply_step(float (&acc)[C::kBlockN / 2], std::uint64_t a, std::uint64_t b, int step, int keep) {
  constexpr std::uint64_t kStepA = (C::kMajorA ? 32 : 16 * gemm_limits::kBlockBytes) >> 4, kStepB = (C::kMajorB ? 32 : 16 * gemm_limits::kBlockBytes) >> 4;
  ptx::WgmmaBf16<C::kBlockN>::template mma<C::kMajorA ? 0 : 1, C::kMajorB ? 0 : 1>(acc, a + step * kStepA, b + step * kStepB, keep);
}

// Rows that are no part of the contraction become zero, in this warpgroup's part of A and in all of B (both warpgroups write the same zeros
// there): those from `tail` on, or where rows are read through a list those that gather_unit_contraction() calls dead.
template <class C>
__device__ __forceinline__ void clear_rows(GroupedShared<C>& shared, int slot, int tail, bool is_listed, int warpgroup) {
  // A tail: 16 rows, those of the step that it ends in; the steps behind are not multiplied.
  const int thread = ptx::thread_index() % 128, rows_log = is_listed ? 6 : 4, first = is_listed ? 0 : tail & ~15;
#pragma unroll 1
  for (int i = thread; i < (1 + C::kBlockN / 64) * 8 << rows_log; i += 128) {
    const int row = first + (i / 8 & ((1 << rows_log) - 1)), chunk = i >> (3 + rows_log);
    if (is_listed ? (shared.dead_rows[slot][row >> 2 & 1] >> (row / 8 * 4 + row % 4) & 1) == 0 : row < tail) continue;
    std::uint8_t* stage = shared.stages[slot] + (chunk == 0 ? warpgroup * gemm_limits::kHalfBytes : C::kBytesA + (chunk - 1) * gemm_limits::kHalfBytes);
    *reinterpret_cast<uint4*>(stage + row * gemm_limits::kBlockBytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();
  ptx::named_barrier(1 + warpgroup, 128);
}

// A tile cut into slices: neighbours meet in pairs, pairs of pairs after that, and so on; who comes second at a meeting adds what the first
// left in memory and goes on. The tree depends on the number of slices only, and a + b = b + a, so the sum does not depend on who came when.
// True for the warpgroup that holds the whole sum.
template <class C>
__device__ __forceinline__ bool meet_slices(float (&acc)[C::kBlockN / 2], const GroupedParams& p, const Unit& u, int warpgroup, int thread, int* came_second) {
  constexpr std::int64_t kFloats = 64 * C::kBlockN;
  const int rank = C::kCluster == 2 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const auto place = [&](int slice) {
    return (static_cast<std::int64_t>(u.first_slot + slice * u.slot_stride) * C::kCluster + rank) * (C::kMathWarps / 4) + warpgroup;
  };
#pragma unroll 1
  for (int bit = 1; bit < u.num_slices; bit *= 2) {
    const int slice = u.slice & -bit;  // the first one that acc holds
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
  }
  return true;
}

// What a math thread knows for good; the rest it finds again, or there would be spills.
struct MathThread {
  int warpgroup;
  std::uint32_t stages_address;
  std::uint32_t peer_empty;  // the first `empty` barrier of the CTA to which this lane hands stages on; 0: to none
};

// One unit. `u` stays in shared memory: held in registers its fields would cost spills.
template <class C>
__device__ __forceinline__ void multiply_unit(const GroupedParams& p, GroupedShared<C>& shared, const Unit& u, Ring<C::kStages>& stages, const MathThread& t) {
  const int num_blocks = uniform(u.num_blocks), k_tail = uniform(u.k_tail);
  const auto columns = [&] { return p.n - u.n0; };
  const auto hand_on = [&](int slot) {
    if constexpr (C::kForm == GemmForm::kTN || C::kEpilogue != GemmEpilogue::kPlain) {  // found again: held, it would be spilled
      const auto lane = static_cast<std::uint32_t>(ptx::thread_index() % 32);
      if (lane < C::kCluster) ptx::mbarrier_arrive_remote(ptx::map_shared(&shared.empty[slot], lane));
    } else {
      if (t.peer_empty != 0) ptx::mbarrier_arrive_remote(t.peer_empty + static_cast<std::uint32_t>(slot) * 8);
    }
  };
  const auto first_element = [&](int row) { return (C::kForm == GemmForm::kTN ? u.group * p.d_plane : 0) + (u.m0 + row) * p.d_stride + u.n0; };
  if (uniform(u.m_valid) <= 64 * t.warpgroup || uniform(columns()) <= 0) {
    for (int block = 0; block < num_blocks; ++block) {
      ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
      __syncwarp();
      hand_on(stages.slot);
      stages.advance();
    }
    return;
  }
  if (C::kForm == GemmForm::kTN && num_blocks == 0) {
    if (C::kOutput != GemmOutput::kAddF32) {
      store_zeros<C::kBlockN, C::kOutput>(p.d_data, first_element(64 * t.warpgroup), p.d_stride, ptx::thread_index() % 128,
                                          min(u.m_valid - 64 * t.warpgroup, 64), columns());
    }
    return;
  }
  float acc[C::kBlockN / 2];
  int previous = 0;
#pragma unroll 1
  for (int block = 0; block < num_blocks; ++block) {
    ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    const bool is_listed = p.a_list != nullptr || (C::kForm == GemmForm::kTN && p.b_list != nullptr);
    if (is_listed) ptx::fence_async_proxy();  // the tensor cores read what ordinary copies wrote
    int steps = 4;
    if constexpr (C::kForm == GemmForm::kTN) {
      // Of a group's last block only the steps of 16 rows that have some. A block without padding rows may have a tail, which the gathering warps call dead.
      if (!is_listed && block == num_blocks - 1) steps = (k_tail + 15) / 16;
      if (is_listed ? uniform(static_cast<int>(shared.dead_rows[stages.slot][0] | shared.dead_rows[stages.slot][1])) != 0
                    : block == num_blocks - 1 && k_tail % 16 != 0) {
        clear_rows<C>(shared, stages.slot, k_tail, is_listed, t.warpgroup);
      }
    }
    const std::uint32_t stage = t.stages_address + static_cast<std::uint32_t>(stages.slot * (C::kBytesA + C::kBytesB));
    const std::uint64_t a = tile_descriptor<C::kMajorA>(stage + static_cast<std::uint32_t>(t.warpgroup * gemm_limits::kHalfBytes));
    const std::uint64_t b = tile_descriptor<C::kMajorB>(stage + C::kBytesA);
    if (C::kForm == GemmForm::kTN && steps < 4) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        ptx::wgmma_fence();
        multiply_step<C>(acc, a, b, step, block + step != 0 ? 1 : 0);
        ptx::wgmma_commit();
      }
    } else {
      ptx::wgmma_fence();
      multiply_step<C>(acc, a, b, 0, block != 0 ? 1 : 0);
#pragma unroll
      for (int step = 1; step < 4; ++step) multiply_step<C>(acc, a, b, step, 1);
      ptx::wgmma_commit();
    }
    if constexpr (C::kEpilogue == GemmEpilogue::kActivationGradient) {
      const int warp = 4 * t.warpgroup + ptx::thread_index() % 128 / 32;
      if (block == 0 && ptx::thread_index() % 32 == 0 && 16 * warp < u.m_valid) start_h<C>(p, shared, u, warp);
    }
    if constexpr (kFetchesSums<C>) {
      const int warp = 4 * t.warpgroup + ptx::thread_index() % 128 / 32;
      if (block == 0 && u.num_slices == 1 && ptx::thread_index() % 32 == 0 && fetches_sums(u, warp)) start_sums<C>(p, shared, u, warp);
    }
    ptx::wgmma_wait<1>();
    if (block > 0) hand_on(previous);
    previous = stages.slot;
    stages.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(acc);
  hand_on(previous);
  if (C::kForm == GemmForm::kTN && u.num_slices > 1 && !meet_slices<C>(acc, p, u, t.warpgroup, ptx::thread_index() % 128, &shared.came_second[t.warpgroup])) {
    return;
  }
  const int thread = ptx::thread_index() % 128, warp = 4 * t.warpgroup + uniform(thread / 32), warp_row = 16 * warp, lane = thread % 32;
  if constexpr (C::kEpilogue == GemmEpilogue::kPlain) {
    if (C::kForm != GemmForm::kTN && p.bias != nullptr) {
      const auto takes_bias = [&](int row) {
        return p.a_list == nullptr || (row < u.m_valid && static_cast<unsigned>(__ldg(p.a_list + u.m0 + row)) < static_cast<unsigned>(p.a_rows));
      };
      const int row = warp_row + lane / 4;
      add_bias<C::kBlockN>(acc, p.bias + static_cast<std::int64_t>(u.group) * p.n + u.n0, columns(), lane % 4, takes_bias(row), takes_bias(row + 8));
    }
    if (kFetchesSums<C> && fetches_sums(u, warp)) {
      if (u.num_slices > 1 && lane == 0) start_sums<C>(p, shared, u, warp);
      add_sums<C>(acc, shared, p, u, warp);
      return;
    }
    const WarpTarget target{C::kForm == GemmForm::kTN ? u.group : 0, u.m0 + warp_row, u.n0, u.m_valid - warp_row, columns(), lane, first_element(warp_row)};
    store_tile<C::kBlockN, C::kOutput, C::kBuffers>(acc, shared.buffers[warp][0], p, target);
  } else if (warp_row < u.m_valid) {
    if constexpr (C::kEpilogue == GemmEpilogue::kActivation) {
      store_activation<C>(acc, shared.buffers[warp][0], p, u, warp_row, lane);
    } else {
      store_gradient<C>(acc, shared, p, u, warp);
    }
  }
}

template <class C>
__device__ void multiply_blocks(const GroupedParams& p, GroupedShared<C>& shared) {
  MathThread t;
  t.warpgroup = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
  t.stages_address = ptx::smem_address(shared.stages);
  const std::uint32_t lane = threadIdx.x % 32;
  t.peer_empty = lane < C::kCluster ? ptx::map_shared(shared.empty, lane) : 0;
  unsigned num_units = 0;  // a ring in one register
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[num_units % kUnitSlots], num_units / kUnitSlots & 1);
    const Unit& u = shared.units[num_units % kUnitSlots];
    if (uniform(u.num_blocks) < 0) break;
    multiply_unit<C>(p, shared, u, stages, t);
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(&shared.unit_empty[num_units % kUnitSlots]);
    ++num_units;
  }
  if (ptx::thread_index() % 32 == 0) ptx::bulk_wait_read<0>();  // shared memory stays until it is read
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
    const bool gathers = p.a_list != nullptr || p.b_list != nullptr;
    const std::uint32_t warps = gathers ? 2 : 0, arrivals = gathers ? kGatherThreads + (C::kForm == GemmForm::kTN ? 2 : 0) : 0;
    for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(&shared.full[i], 1 + arrivals), ptx::mbarrier_init(&shared.empty[i], C::kCluster * C::kMathWarps);
    for (int i = 0; i < kUnitSlots; ++i) ptx::mbarrier_init(&shared.unit_full[i], 1), ptx::mbarrier_init(&shared.unit_empty[i], 1 + warps + C::kMathWarps);
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&shared.ticket_full[i], 1), ptx::mbarrier_init(&shared.ticket_empty[i], 1);
    ptx::mbarrier_init(&shared.unit_wanted, 1);
    for (int i = 0; i < C::kMathWarps; ++i) shared.h_phases[i] = 0, shared.sums_phases[i] = 0;
    for (int i = 0; i < C::kMathWarps * C::kSumBuffers; ++i) ptx::mbarrier_init(&shared.sums_full[0][0] + i, 1);
    for (int i = 0; i < C::kMathWarps * C::kPairs; ++i) ptx::mbarrier_init(&shared.h_full[0][0] + i, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (C::kCluster == 2) ptx::cluster_arrive(), ptx::cluster_wait();
  // Launched before its predecessor has ended where the launch allows it; everything above touches nothing of it.
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    ptx::register_limit_lower<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_blocks<C>(p, shared, rank);
    if (threadIdx.x / 32 == 1) draw_units<C>(p, shared, rank);
    if (threadIdx.x >= 64 && (p.a_list != nullptr || p.b_list != nullptr)) gather_rows<C>(p, shared);
  } else {
    ptx::register_limit_raise<C::kMathRegisters>();
    multiply_blocks<C>(p, shared);
  }
  // A CTA stays until its peer no longer writes to it.
  if constexpr (C::kCluster == 2) {
    __syncwarp();
    ptx::cluster_arrive(), ptx::cluster_wait();
  }
#endif
}

}  // namespace waybill::cuda
