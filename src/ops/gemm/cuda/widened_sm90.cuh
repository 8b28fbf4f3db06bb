// SPDX-License-Identifier: Apache-2.0
// Grouped matmul for sm_90a of coded operands, D = A B^T with both operands k-adjacent (kNT), bf16 result: the kernel of grouped_sm90.cuh, whose warps 2 and
// 3 turn codes into bf16 in memory, ahead of the units that read them. To the bit the product of dequantised operands.
//
// All warps make the first pieces together; then a unit starts when its rows and its columns of weights are ready. Nobody waits for a CTA that is not
// running: pieces and units are drawn in the order in which they need each other.
// Bytes: codes once, their bf16 copies once written and read from the L2 or memory as grouped_sm90.cuh reads its operands.
#pragma once

#include "ops/gemm/cuda/grouped_sm90.cuh"
#include "ops/gemm/cuda/widen_ahead.cuh"

namespace waybill::cuda {

// Number `drawn` (from 1 on) of the units that the cluster draws; all lanes of warp 1.
template <class C>
__device__ __forceinline__ std::uint32_t draw_ticket(std::uint32_t* next_unit, GroupedShared<C>& shared, int rank, int drawn, int lane) {
  std::uint32_t ticket = 0;
  const int slot = drawn & 1;
  if (rank == 0) {
    if (lane == 0) ticket = atomicAdd(next_unit, 1u);
    ticket = __shfl_sync(ptx::kFullWarp, ticket, 0);
    if (drawn > 2) ptx::mbarrier_wait(&shared.ticket_empty[slot], static_cast<std::uint32_t>((drawn - 3) / 2) & 1u);  // the peer has read the one before last
    if (lane == 0) ptx::store_remote(ptx::map_shared(&shared.ticket[slot], 1), ticket, ptx::map_shared(&shared.ticket_full[slot], 1));
  } else {
    if (lane == 0) ptx::mbarrier_arrive_expect(&shared.ticket_full[slot], 4);
    __syncwarp();
    ptx::mbarrier_wait(&shared.ticket_full[slot], static_cast<std::uint32_t>((drawn - 1) / 2) & 1u);
    ticket = *static_cast<volatile std::uint32_t*>(&shared.ticket[slot]);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(&shared.ticket_empty[slot], 0));
  }
  return ticket;
}

// Warp 1: as draw_units(), but for the first unit, which is drawn, too.
template <class C>
__device__ void draw_widened_units(const WidenedParams& p, GroupedShared<C>& shared, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  UnitWalker<C::kForm, C::kBlockN, C::kCluster> walker(p.product, lane, static_cast<int>(gridDim.x) / C::kCluster);
  Ring<kUnitSlots> ring;
  for (int drawn = 1;; ++drawn) {
    ptx::mbarrier_wait(&shared.unit_empty[ring.slot], ring.parity ^ 1);
    if (drawn > 1) ptx::mbarrier_wait(&shared.unit_wanted, static_cast<std::uint32_t>(drawn) & 1u);
    const std::uint32_t ticket = draw_ticket(p.next_unit, shared, rank, drawn, lane);
    Unit found{};
    const bool exists = walker.find(static_cast<int>(ticket), rank, found);
    if (lane == 0) {
      if (!exists) found.num_blocks = -1;
      shared.units[ring.slot] = found;
      ptx::mbarrier_arrive(&shared.unit_full[ring.slot]);
    }
    __syncwarp();
    ring.advance();
    if (!exists) return;
  }
}

template <class C>
__device__ __forceinline__ void init_widened_barriers(GroupedShared<C>& shared) {
  for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(&shared.full[i], 1), ptx::mbarrier_init(&shared.empty[i], C::kCluster * C::kMathWarps);
  for (int i = 0; i < kUnitSlots; ++i) ptx::mbarrier_init(&shared.unit_full[i], 1), ptx::mbarrier_init(&shared.unit_empty[i], 1 + C::kMathWarps);
  for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&shared.ticket_full[i], 1), ptx::mbarrier_init(&shared.ticket_empty[i], 1);
  ptx::mbarrier_init(&shared.unit_wanted, 1);
  ptx::mbarrier_init_fence();
}

// What the last units have read and nobody has been told yet: it has left the stages when each of them has been awaited once more.
template <class C>
struct Untold {
  std::uint32_t *first = nullptr, *second = nullptr;  // counts of what was read; second may be null
  std::uint32_t count = 0;
  int since = 0;  // stages that have been awaited since
  __device__ void tell() {
    if (count > 0) {
      add_count(first, count);
      if (second != nullptr) add_count(second, count);
    }
    first = nullptr, count = 0;
  }
  // Waits for the other stages, which the copies come to next, without using them.
  __device__ void drain(GroupedShared<C>& shared, Ring<C::kStages> stages) {
    if (first == nullptr) return;
    for (int i = since; i < C::kStages; ++i) {
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      stages.advance();
    }
    tell();
  }
  __device__ void awaited_a_stage() {
    if (first != nullptr && ++since == C::kStages) tell();
  }
  // Waits for the count. Who has to make it may wait for what has not been told.
  __device__ void await(const std::uint32_t* at, std::uint32_t wanted, GroupedShared<C>& shared, const Ring<C::kStages>& stages) {
    if (ptx::ld_acquire_gpu(at) >= wanted) return;
    drain(shared, stages);
    await_count(at, wanted);
  }
  // A unit has been copied; told by one CTA of the cluster, whose stages both give back.
  __device__ void add(std::uint32_t* to, std::uint32_t* to_second, std::uint32_t by, GroupedShared<C>& shared, const Ring<C::kStages>& stages) {
    if (first != to) drain(shared, stages);  // a short unit
    first = to, second = to_second, count += by, since = 0;
  }
};

// Warp 0's thread: as copy_blocks(), from the rings.
template <class C>
__device__ void copy_widened_blocks(const WidenedParams& w, GroupedShared<C>& shared, int rank) {
  const GroupedParams& p = w.product;
  const std::uint32_t pieces = 1u << w.piece_shift;
  const int q_tiles = (p.n + C::kBlockN - 1) / C::kBlockN;
  Ring<kUnitSlots> units;
  Ring<C::kStages> stages;
  Untold<C> untold;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[units.slot], units.parity);
    Unit u = shared.units[units.slot];
    ptx::mbarrier_arrive(&shared.unit_empty[units.slot]);
    units.advance();
    if (u.num_blocks < 0) break;
    const bool shared_a = u.pair == kPairN, shared_b = u.pair == kPairM, has_columns = u.n0 < p.n;
    const int halves = u.m_valid > 64 ? 2 : 1;
    const std::uint32_t bytes = static_cast<std::uint32_t>(halves * gemm_limits::kHalfBytes + (has_columns ? C::kBytesB : 0));
    const int in_group = u.m0 - __ldg(p.offsets + u.group), group = u.group, block = __ldg(w.first_block + group) + in_group / kWidenedRows;
    untold.await(w.rows_ready + block, pieces, shared, stages);
    if (has_columns) untold.await(w.weights_ready + static_cast<std::int64_t>(group) * w.weight_blocks + u.n0 / kWidenedRows, pieces, shared, stages);
    ptx::fence_async_proxy_all();
    u.m0 = block % w.ring_blocks * kWidenedRows + in_group % kWidenedRows, u.group = group % w.ring_groups;
    constexpr int kLead = 8;
    for (int k_block = 0; k_block < u.num_blocks; ++k_block) {
      if (k_block == max(u.num_blocks - kLead, 0)) ptx::mbarrier_arrive(&shared.unit_wanted);
      ptx::mbarrier_wait(&shared.empty[stages.slot], stages.parity ^ 1);
      untold.awaited_a_stage();
      std::uint64_t* bar = &shared.full[stages.slot];
      std::uint8_t* to = shared.stages[stages.slot];
      ptx::mbarrier_arrive_expect(bar, bytes);
      const int k = k_block * gemm_limits::kBlockK;
      load_a<C>(p, u, to, bar, k, halves, shared_a, rank);
      if (has_columns) load_b<C>(p, u, to + C::kBytesA, bar, k, shared_b, rank);
      stages.advance();
    }
    const std::uint32_t columns = shared_a ? static_cast<std::uint32_t>(min(q_tiles - u.n0 / C::kBlockN, 2)) : 1u;  // of tiles
    if (rank == 0) untold.add(w.rows_read + block, w.weights_read + group, columns, shared, stages);
  }
  untold.drain(shared, stages);
}

template <class C, ElementFormat kFormat>
__global__ void __launch_bounds__(C::kThreads, 1) widened_gemm_sm90(const __grid_constant__ WidenedParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(C::kForm == GemmForm::kNT && C::kCluster == 2 && C::kBlockN == kWidenedRows);
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  GroupedShared<C>& shared = *reinterpret_cast<GroupedShared<C>*>(shared_bytes);
  const int rank = static_cast<int>(ptx::cluster_rank());
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.product.a), ptx::prefetch_tensor_map(&p.product.b), ptx::prefetch_tensor_map(&p.product.d);
    init_widened_barriers(shared);
  }
  __syncthreads();
  ptx::cluster_arrive(), ptx::cluster_wait();
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  widen_pieces<kFormat, kFormat == ElementFormat::kE2M1 ? 7 : 8>(p, true);
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    ptx::register_limit_lower<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_widened_blocks<C>(p, shared, rank);
    if (threadIdx.x / 32 == 1) draw_widened_units<C>(p, shared, rank);
    if (threadIdx.x >= 64) widen_pieces<kFormat, kFormat == ElementFormat::kE2M1 ? 7 : 8>(p, false);
  } else {
    ptx::register_limit_raise<C::kMathRegisters>();
    multiply_blocks<C>(p.product, shared);
  }
  // A CTA stays until its peer no longer writes to it.
  __syncwarp();
  ptx::cluster_arrive(), ptx::cluster_wait();
#endif
}

struct WidenedConfig : GroupedConfig<GemmForm::kNT, GemmOutput::kBf16, kWidenedTile.block_n, kWidenedTile.stages, kWidenedTile.cluster, kWidenedTile.buffers> {
  static constexpr int kProducerRegisters = 72, kMathRegisters = 216;
};

}  // namespace waybill::cuda
