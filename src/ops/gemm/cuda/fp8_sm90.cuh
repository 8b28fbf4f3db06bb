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

#include "core/cuda/wgmma.cuh"
#include "ops/gemm/cuda/fp8_producer.cuh"
#include "ops/gemm/cuda/grouped_sm90.cuh"

namespace waybill::cuda {

// A k block's scales that a thread loads before it waits for the products: those of its two rows; kNT: of B's tiles, kTN: of its first columns.
template <class C>
struct BlockScales {
  static constexpr int kColumnsAhead = C::kForm == GemmForm::kTN ? 4 : 1;
  float low, high, tiles[C::kParts];
  float2 columns[kColumnsAhead];
};

template <class C>
__device__ __forceinline__ float2 column_scales(const float* columns, int part, int step, int lane) {
  return *reinterpret_cast<const float2*>(columns + C::kPartN * part + 8 * step + 2 * (lane % 4));
}

template <class C>
__device__ __forceinline__ BlockScales<C> load_scales(const Fp8Shared<C>& shared, int slot, int row, int lane) {
  BlockScales<C> s;
  const float *a = shared.scales[slot], *b = a + C::kFirstScaleB;
  s.low = a[row], s.high = a[row + 8];
  if constexpr (C::kForm == GemmForm::kNT) {
#pragma unroll
    for (int i = 0; i < C::kParts; ++i) s.tiles[i] = b[i];
  } else {
#pragma unroll
    for (int i = 0; i < s.kColumnsAhead; ++i) s.columns[i] = column_scales<C>(b, 0, i, lane);
  }
  return s;
}

// acc += part under scales. columns: of B, one a column (kTN).
template <class C>
__device__ __forceinline__ void promote(float (&acc)[C::kBlockN / 2], const float (&part)[C::kPartN / 2], int index, const BlockScales<C>& s,
                                        const float* columns, int lane) {
  constexpr int kSteps = C::kPartN / 8;
  if constexpr (C::kForm == GemmForm::kNT) {
    const float low = s.low * s.tiles[index], high = s.high * s.tiles[index];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float* from = part + 4 * step;
      float* to = acc + C::kPartN / 2 * index + 4 * step;
      to[0] = fmaf(from[0], low, to[0]), to[1] = fmaf(from[1], low, to[1]);
      to[2] = fmaf(from[2], high, to[2]), to[3] = fmaf(from[3], high, to[3]);
    }
  } else {
    // A step's sums free registers for the scales of two more steps: loads stay ahead of their use, or each would be waited for.
    float2 column[kSteps];
#pragma unroll
    for (int step = 0; step < s.kColumnsAhead; ++step) column[step] = index == 0 ? s.columns[step] : column_scales<C>(columns, index, step, lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int next = s.kColumnsAhead + 2 * step; next < s.kColumnsAhead + 2 * step + 2; ++next) {
        if (next < kSteps) column[next] = column_scales<C>(columns, index, next, lane);
      }
      asm volatile("" ::: "memory");  // or all are loaded at once: spills
      const float* from = part + 4 * step;
      float* to = acc + C::kPartN / 2 * index + 4 * step;
      to[0] = fmaf(from[0] * column[step].x, s.low, to[0]), to[1] = fmaf(from[1] * column[step].y, s.low, to[1]);
      to[2] = fmaf(from[2] * column[step].x, s.high, to[2]), to[3] = fmaf(from[3] * column[step].y, s.high, to[3]);
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

// All blocks of a unit. hand_on(slot) gives a stage back; fetch() asks for D's values, once the last results have left their room. skipped: scales in a stage
// before those of the tile's first row. Between a part's products and the next part's only the sums remain: what needs a way to shared memory, scales and the
// next stage's barrier, goes while the tensor cores work.
template <class C, class HandOn, class Fetch>
__device__ __forceinline__ void multiply_blocks(float (&acc)[C::kBlockN / 2], Fp8Shared<C>& shared, int num_blocks, Ring<C::kStages>& stages, int skipped,
                                                bool is_narrow, const MathThread& t, const HandOn& hand_on, const Fetch& fetch) {
  const int fetch_at = num_blocks > 4 ? num_blocks - 2 : num_blocks;
  const int thread = ptx::thread_index() % 128, lane = thread % 32, row = 64 * t.warpgroup + 16 * (thread / 32) + lane / 4;
  bool is_full = ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
#pragma unroll 1
  for (; num_blocks > 0; --num_blocks) {
    if (!is_full) ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    const int slot = stages.slot;
    BlockScales<C> scales;
#pragma unroll
    for (int index = 0; index < C::kParts; ++index) {
      float part[C::kPartN / 2];
      start_part<C>(part, slot, index, t);
      if (index == 0) scales = load_scales<C>(shared, slot, row + skipped, lane);
      const bool is_last = index == C::kParts - 1 || (C::kCutsLastRound && is_narrow);
      if (is_last) stages.advance();
      if constexpr (kFetchesSums<C>) {
        if (is_last && num_blocks == fetch_at) fetch();
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(part);
      if (is_last) {
        if (C::kForm == GemmForm::kNT) hand_on(slot);
        is_full = num_blocks > 1 && ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
      }
      promote<C>(acc, part, index, scales, shared.scales[slot] + C::kFirstScaleB, lane);
      if (is_last) break;
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
  const auto fetch = [&] {
    const int warp = 4 * t.warpgroup + ptx::thread_index() % 128 / 32;
    if (u.num_slices == 1 && ptx::thread_index() % 32 == 0 && fetches_sums(u, warp)) start_sums<C>(p, shared, u, warp);
  };
  const bool is_narrow = C::kCutsLastRound && uniform(u.slice) != 0;
  multiply_blocks<C>(acc, shared, num_blocks, stages, C::kForm == GemmForm::kNT ? uniform(u.m0) & 3 : 0, is_narrow, t, hand_on, fetch);
  if (C::kForm == GemmForm::kTN && u.num_slices > 1 && !meet_slices<C>(acc, p, u, t.warpgroup, ptx::thread_index() % 128, &shared.came_second[t.warpgroup])) {
    return;
  }
  // Found again, as `u` is: over the loop above every register counts.
  const int thread = ptx::thread_index() % 128, warp = 4 * t.warpgroup + uniform(thread / 32), warp_row = 16 * warp, lane = thread % 32;
  const int columns = is_narrow ? min(p.n - uniform(u.n0), C::kBlockN / 2) : p.n - uniform(u.n0);
  if (C::kForm == GemmForm::kNT && p.bias != nullptr) {
    add_bias<C::kBlockN>(acc, p.bias + static_cast<std::int64_t>(u.group) * p.n + u.n0, columns, lane % 4, true, true);
  }
  if (kFetchesSums<C> && fetches_sums(u, warp)) {
    if (u.num_slices > 1 && lane == 0) start_sums<C>(p, shared, u, warp);
    add_sums<C>(acc, shared, p, u, warp);
    return;
  }
  const WarpTarget target{C::kForm == GemmForm::kTN ? u.group : 0, u.m0 + warp_row, u.n0, u.m_valid - warp_row, columns, lane, first_element(warp_row)};
  store_tile<C::kBlockN, C::kOutput, C::kBuffers>(acc, shared.buffers[warp][0], p, target, is_narrow);
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
    const auto warps = static_cast<std::uint32_t>(scale_warps<C>(p)), arrivals = static_cast<std::uint32_t>(scale_arrivals<C>(p));
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
    if constexpr (C::kForm == GemmForm::kNT) {
      if (threadIdx.x >= 64 && static_cast<int>(threadIdx.x) < 64 + 32 * scale_warps<C>(p)) copy_scales<C>(p, shared);
    }
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
