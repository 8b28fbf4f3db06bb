// SPDX-License-Identifier: Apache-2.0
// Grouped matmul for sm_90a, E4M3 and E5M2 operands under a scale each 128 k; the forms are in fp8_params.h.
//
// Grid, units, clusters and the result's way to memory are those of grouped_sm90.cuh. What differs:
//   k blocks of 128 codes, the same 128 bytes of a row; both operands lie k-adjacent, which is all that 8-bit matrix instructions take
//   warps 2, 3   copy scales beside each k block into its stage; their 64 threads count on the stage's barrier as the copy engine does
//   warps 4-11   a k block's products are summed by the tensor cores alone (which keep about 14 bits), 128 columns at a time, and then added
//                in fp32 under their scales. While one warpgroup adds, the tensor cores work for the other.
// Bytes: every tile reads (128 + kBlockN) x k codes, mostly from the L2, and writes D once.
#pragma once

#include "core/cuda/wgmma.cuh"
#include "ops/gemm/cuda/fp8_producer.cuh"
#include "ops/gemm/cuda/grouped_sm90.cuh"

namespace waybill::cuda {

// What a thread keeps of a k block's scales: those of its two rows, times that of a part's columns (kNT).
struct RowScales {
  float low, high;
};

// acc += part under scales. columns: of B, one a column (kTN).
template <class C>
__device__ __forceinline__ void promote(float (&acc)[C::kBlockN / 2], const float (&part)[C::kPartN / 2], int index, const RowScales& s, const float* columns,
                                        int lane) {
  if constexpr (C::kForm == GemmForm::kNT) {
#pragma unroll
    for (int j = 0; j < C::kPartN / 2; j += 4) {
      float* to = acc + C::kPartN / 2 * index + j;
      to[0] = fmaf(part[j], s.low, to[0]), to[1] = fmaf(part[j + 1], s.low, to[1]);
      to[2] = fmaf(part[j + 2], s.high, to[2]), to[3] = fmaf(part[j + 3], s.high, to[3]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < C::kPartN / 2; j += 4) {
      float* to = acc + C::kPartN / 2 * index + j;
      const float2 column = *reinterpret_cast<const float2*>(columns + C::kPartN * index + 2 * j + 2 * (lane % 4));
      to[0] = fmaf(part[j] * column.x, s.low, to[0]), to[1] = fmaf(part[j + 1] * column.y, s.low, to[1]);
      to[2] = fmaf(part[j + 2] * column.x, s.high, to[2]), to[3] = fmaf(part[j + 3] * column.y, s.high, to[3]);
      if (j % 16 == 12) asm volatile("" ::: "memory");  // or all columns' scales are loaded at once: spills
    }
  }
}

// Starts the products of part `index` of a stage.
template <class C>
__device__ __forceinline__ void start_part(float (&part)[C::kPartN / 2], int slot, int index, const MathThread& t) {
  const std::uint32_t stage = t.stages_address + static_cast<std::uint32_t>(slot * (C::kBytesA + C::kBytesB));
  const std::uint64_t a = tile_descriptor<true>(stage + static_cast<std::uint32_t>(t.warpgroup * gemm_limits::kHalfBytes));
  const std::uint64_t b = tile_descriptor<true>(stage + C::kBytesA + static_cast<std::uint32_t>(index * C::kPartN * fp8_limits::kBlockK));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {  // of 32 codes
    ptx::WgmmaFp8<C::kPartN, static_cast<int>(C::kTypes)>::mma(part, a + step * 2, b + step * 2, step != 0 ? 1 : 0);
  }
  ptx::wgmma_commit();
}

// All blocks of a unit. hand_on(slot) gives a stage back. Between a part's products and the next part's only the sums remain: what needs a way to shared
// memory, scales and the next stage's barrier, goes while the tensor cores work.
template <class C, class HandOn>
__device__ __forceinline__ void multiply_blocks(float (&acc)[C::kBlockN / 2], Fp8Shared<C>& shared, int num_blocks, Ring<C::kStages>& stages,
                                                const MathThread& t, const HandOn& hand_on) {
  const int thread = ptx::thread_index() % 128, lane = thread % 32, row = 64 * t.warpgroup + 16 * (thread / 32) + lane / 4;
  bool is_full = ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
#pragma unroll 1
  for (; num_blocks > 0; --num_blocks) {
    if (!is_full) ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    const int slot = stages.slot;
    const float* scales = shared.scales[slot];
#pragma unroll
    for (int index = 0; index < C::kParts; ++index) {
      float part[C::kPartN / 2];
      start_part<C>(part, slot, index, t);
      RowScales s{scales[row], scales[row + 8]};
      if constexpr (C::kForm == GemmForm::kNT) {
        const float of_part = scales[fp8_limits::kScalesA + index];
        s.low *= of_part, s.high *= of_part;
      }
      if (index == C::kParts - 1) stages.advance();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(part);
      if (index == C::kParts - 1) {
        if (C::kForm == GemmForm::kNT) hand_on(slot);
        is_full = num_blocks > 1 && ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
      }
      promote<C>(acc, part, index, s, scales + fp8_limits::kScalesA, lane);
    }
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
  if constexpr (kFetchesSums<C>) {
    const int warp = 4 * t.warpgroup + ptx::thread_index() % 128 / 32;
    if (u.num_slices == 1 && ptx::thread_index() % 32 == 0 && fetches_sums(u, warp)) start_sums<C>(p, shared, u, warp);
    __syncwarp();
  }
  multiply_blocks<C>(acc, shared, num_blocks, stages, t, hand_on);
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
  static_assert(sizeof(Fp8Shared<C>) <= 227 * 1024 &&
                sizeof(Fp8Shared<C>) <= fp8_limits::shared_bytes(C::kForm, {C::kBlockN, C::kStages, C::kCluster, C::kBuffers}));
  const int rank = C::kCluster == 2 ? static_cast<int>(ptx::cluster_rank()) : 0;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a), ptx::prefetch_tensor_map(&p.b), ptx::prefetch_tensor_map(&p.d);
    for (int i = 0; i < C::kStages; ++i)
      ptx::mbarrier_init(&shared.full[i], 1 + 32 * C::kScaleWarps), ptx::mbarrier_init(&shared.empty[i], C::kCluster * C::kMathWarps);
    for (int i = 0; i < kUnitSlots; ++i)
      ptx::mbarrier_init(&shared.unit_full[i], 1), ptx::mbarrier_init(&shared.unit_empty[i], 1 + C::kScaleWarps + C::kMathWarps);
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
    if (threadIdx.x >= 64) copy_scales<C>(p, shared);
  } else {
    ptx::register_limit_raise<C::kMathRegisters>();
    multiply_fp8<C>(p, shared);
  }
  // A CTA stays until its peer no longer writes to it.
  if constexpr (C::kCluster == 2) {
    __syncwarp();
    ptx::cluster_arrive(), ptx::cluster_wait();
  }
#endif
}

}  // namespace waybill::cuda
