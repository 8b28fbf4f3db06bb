// SPDX-License-Identifier: Apache-2.0
// Grouped matmul for sm_90a, E4M3 and E5M2 operands under a scale each 128 k; the forms are in fp8_params.h.
//
// Grid, units, clusters and the result's way to memory are those of grouped_sm90.cuh. What differs:
//   k blocks of 128 codes, the same 128 bytes of a row; both operands lie k-adjacent, which is all that 8-bit matrix instructions take
//   warps 2, 3   kNT: copy scales that no map describes beside each k block into its stage; they count on its barrier as the copy engine does
//   warps 4-11   (4-15 where a tile has 192 rows) a k block's products are summed by the tensor cores alone (which keep about 14 bits), 128 columns at a time,
//   and then added
//                in fp32 under their scales. While one warpgroup adds, the tensor cores work for the other.
// Bytes: every tile reads (128 + kBlockN) x k codes, mostly from the L2, and writes D once.
#pragma once

#include "ops/gemm/cuda/fp8_producer.cuh"
#include "ops/gemm/cuda/fp8_two_parts.cuh"

namespace waybill::cuda {

// All blocks of a unit. hand_on(slot) gives a stage back; fetch() asks for D's values, once the last results have left their room. skipped: scales in a stage
// before those of the tile's first row. Between a block's products and the next one's only the sums remain: what needs a way to shared memory, scales and the
// next stage's barrier, goes while the tensor cores work.
template <class C, class HandOn, class Fetch>
__device__ __forceinline__ void multiply_blocks(float (&acc)[C::kBlockN / 2], Fp8Shared<C>& shared, int num_blocks, Ring<C::kStages>& stages, int skipped,
                                                const MathThread& t, const HandOn& hand_on, const Fetch& fetch) {
  const int fetch_at = num_blocks > 4 ? num_blocks - 2 : num_blocks;
  const int thread = ptx::thread_index() % 128, lane = thread % 32, row = 64 * t.warpgroup + 16 * (thread / 32) + lane / 4;
  bool is_full = ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
#pragma unroll 1
  for (; num_blocks > 0; --num_blocks) {
    if (!is_full) ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    const int slot = stages.slot;
    float part[C::kPartN / 2];
    start_part<C>(part, slot, 0, t);
    const BlockScales<C> scales = load_scales<C>(shared, slot, row + skipped, lane);
    stages.advance();
    if constexpr (kFetchesSums<C>) {
      if (num_blocks == fetch_at) fetch();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(part);
    if (C::kForm == GemmForm::kNT) hand_on(slot);
    is_full = num_blocks > 1 && ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
    promote<C>(acc, part, 0, scales, shared.scales[slot] + C::kFirstScaleB, lane);
    if (C::kForm == GemmForm::kTN) __syncwarp(), hand_on(slot);
  }
}

template <class C>
__device__ __forceinline__ void multiply_unit_fp8(const Fp8Params& p, Fp8Shared<C>& shared, const Unit& u, Ring<C::kStages>& stages, const MathThread& t) {
  int num_blocks = uniform(u.num_blocks);
  const auto hand_on = [&](int slot) {
    if (t.peer_empty != 0) ptx::mbarrier_arrive_remote(t.peer_empty + static_cast<std::uint32_t>(slot) * 8);
  };
  const auto first_element = [&](int row) { return (C::kForm == GemmForm::kTN ? u.group * p.d_plane : 0) + (u.m0 + row) * p.d_stride + u.n0; };
  if (const int valid = min(uniform(u.m_valid) - 64 * t.warpgroup, 64), columns = p.n - uniform(u.n0); valid <= 0 || columns <= 0) {
    for (; num_blocks > 0; --num_blocks) {
      ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
      __syncwarp();
      hand_on(stages.slot);
      stages.advance();
    }
    return;
  }
  if (C::kForm == GemmForm::kTN && num_blocks == 0) {
    if (C::kOutput != GemmOutput::kAddF32) {
      const int valid = min(uniform(u.m_valid) - 64 * t.warpgroup, 64), columns = p.n - uniform(u.n0);
      store_zeros<C::kBlockN, C::kOutput>(p.d_data, first_element(64 * t.warpgroup), p.d_stride, ptx::thread_index() % 128, valid, columns);
    }
    return;
  }
  float acc[C::kBlockN / 2];
#pragma unroll
  for (float& value : acc) value = 0.0f;
  const auto fetch = [&] {
    const int warp = 4 * t.warpgroup + ptx::thread_index() % 128 / 32;
    if (u.num_slices == 1 && ptx::thread_index() % 32 == 0 && fetches_sums(u, warp)) start_sums<C>(p, shared, u, warp);
  };
  multiply_blocks<C>(acc, shared, num_blocks, stages, C::kForm == GemmForm::kNT ? uniform(u.m0) & 3 : 0, t, hand_on, fetch);
  if (C::kForm == GemmForm::kTN && u.num_slices > 1 && !meet_slices<C>(acc, p, u, t.warpgroup, ptx::thread_index() % 128, &shared.came_second[t.warpgroup])) {
    return;
  }
  // Found again, as `u` is: over the loop above every register counts.
  const int thread = ptx::thread_index() % 128, warp = 4 * t.warpgroup + uniform(thread / 32), warp_row = 16 * warp, lane = thread % 32;
  const int columns = p.n - uniform(u.n0);
  if (C::kForm == GemmForm::kNT && p.bias != nullptr) {
    add_bias<C::kBlockN>(acc, p.bias + static_cast<std::int64_t>(u.group) * p.n + u.n0, columns, lane % 4, true, true);
  }
  if (kFetchesSums<C> && fetches_sums(u, warp)) {
    if (u.num_slices > 1 && lane == 0) start_sums<C>(p, shared, u, warp);
    add_sums<C>(acc, shared, p, u, warp);
    return;
  }
  const WarpTarget target{C::kForm == GemmForm::kTN ? u.group : 0, u.m0 + warp_row, u.n0, u.m_valid - warp_row, columns, lane, first_element(warp_row)};
  store_tile<C::kBlockN, C::kOutput, C::kBuffers>(acc, shared.buffers[warp][0], p, target);
}

template <class C>
__device__ void multiply_fp8(const Fp8Params& p, Fp8Shared<C>& shared) {
  MathThread t;
  t.warpgroup = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
  t.stages_address = ptx::smem_address(shared.stages);
  const std::uint32_t lane = threadIdx.x % 32;
  t.peer_empty = lane < C::kCluster ? ptx::map_shared(shared.empty, lane) : 0;
  unsigned num_units = 0;
  Ring<C::kStages> stages;
  for (;;) {
    ptx::mbarrier_wait(&shared.unit_full[num_units % kUnitSlots], num_units / kUnitSlots & 1);
    const Unit& u = shared.units[num_units % kUnitSlots];
    if (uniform(u.num_blocks) < 0) break;
    multiply_unit_fp8<C>(p, shared, u, stages, t);
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(&shared.unit_empty[num_units % kUnitSlots]);
    ++num_units;
  }
  if (C::kBuffers > 1 && ptx::thread_index() % 32 == 0) ptx::bulk_wait_read<0>();  // shared memory stays until it is read
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) grouped_fp8_sm90(const __grid_constant__ Fp8Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  Fp8Shared<C>& shared = *reinterpret_cast<Fp8Shared<C>*>(shared_bytes);
  constexpr int kAsked = fp8_limits::shared_bytes(C::kForm, {C::kBlockN, C::kStages, C::kCluster, C::kBuffers});
  static_assert(sizeof(Fp8Shared<C>) <= kAsked && kAsked <= 227 * 1024);
  const int rank = C::kCluster == 2 ? static_cast<int>(ptx::cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a), ptx::prefetch_tensor_map(&p.b), ptx::prefetch_tensor_map(&p.d);
    if (C::kForm == GemmForm::kTN || p.has_scale_map) ptx::prefetch_tensor_map(&p.a_scale_map);
    if (C::kForm == GemmForm::kTN) ptx::prefetch_tensor_map(&p.b_scale_map);
    const auto warps = static_cast<std::uint32_t>(C::kPrefetchesSums ? 1 : scale_warps<C>(p)), arrivals = static_cast<std::uint32_t>(scale_arrivals<C>(p));
    for (int i = 0; i < C::kStages; ++i) ptx::mbarrier_init(&shared.full[i], 1 + arrivals), ptx::mbarrier_init(&shared.empty[i], C::kCluster * C::kMathWarps);
    for (int i = 0; i < kUnitSlots; ++i) ptx::mbarrier_init(&shared.unit_full[i], 1), ptx::mbarrier_init(&shared.unit_empty[i], 1 + warps + C::kMathWarps);
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&shared.ticket_full[i], 1), ptx::mbarrier_init(&shared.ticket_empty[i], 1);
    ptx::mbarrier_init(&shared.unit_wanted, 1);
    for (int i = 0; i < C::kMathWarps; ++i) shared.sums_phases[i] = 0;
    for (int i = 0; i < C::kMathWarps * C::kSumBuffers; ++i) ptx::mbarrier_init(&shared.sums_full[0][0] + i, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if constexpr (C::kCluster == 2) ptx::cluster_arrive(), ptx::cluster_wait();
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
  if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
    ptx::register_limit_lower<C::kProducerRegisters>();
    if (threadIdx.x == 0) copy_codes<C>(p, shared, rank);
    if (threadIdx.x / 32 == 1) draw_units<C, typename C::Walker>(p, shared, rank);
    if constexpr (C::kPrefetchesSums) {
      if (threadIdx.x / 32 == 2) prefetch_sums<C>(p, shared);
    }
    if constexpr (C::kForm == GemmForm::kNT) {
      if (threadIdx.x >= 64 && static_cast<int>(threadIdx.x) < 64 + 32 * scale_warps<C>(p)) copy_scales<C>(p, shared);
    }
  } else {
    ptx::register_limit_raise<C::kMathRegisters>();
    if constexpr (C::kParts == 2) {
      multiply_two_parts<C>(p, shared);
    } else {
      multiply_fp8<C>(p, shared);
    }
  }
  // A CTA stays until its peer no longer writes to it.
  if constexpr (C::kCluster == 2) {
    __syncwarp();
    ptx::cluster_arrive(), ptx::cluster_wait();
  }
#endif
}

}  // namespace waybill::cuda
