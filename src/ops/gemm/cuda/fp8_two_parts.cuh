// SPDX-License-Identifier: Apache-2.0
// Math warps of row-ragged 8-bit tiles of 256 columns: two parts of 128 columns a k block (fp8_sm90.cuh).
//
// The tensor cores have work while a tile's results go to memory: the first part's columns are stored while the last block's second part is multiplied, the
// second part's while the next unit's first products are, which start as soon as the sums have left their registers.
#pragma once

#include "ops/gemm/cuda/fp8_math.cuh"

namespace waybill::cuda {

// The blocks of a unit whose first part is under way. hand_on(slot) gives a stage back; while the last part is multiplied, store_first() stores part 0's
// columns and peek() looks at the next unit. True: that has products, and its first stage is full. skipped: scales in a stage before those of the tile's first
// row. is_narrow: part 0 only. Between a part's products and the next part's only the sums remain: what needs a way to shared memory, scales and the next
// stage's barrier, goes while the tensor cores work.
template <class C, class HandOn, class StoreFirst, class Peek>
__device__ __forceinline__ bool multiply_blocks_ahead(float (&acc)[C::kBlockN / 2], float (&part)[C::kPartN / 2], Fp8Shared<C>& shared, int num_blocks,
                                                      Ring<C::kStages>& stages, int skipped, bool is_narrow, const MathThread& t, const HandOn& hand_on,
                                                      const StoreFirst& store_first, const Peek& peek) {
  const int thread = ptx::thread_index() % 128, lane = thread % 32, row = 64 * t.warpgroup + 16 * (thread / 32) + lane / 4;
  bool goes_on = false;
#pragma unroll 1
  for (;;) {
    const int slot = stages.slot;
    const BlockScales<C> scales = load_scales<C>(shared, slot, row + skipped, lane);
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(part);
    promote<C>(acc, part, 0, scales, nullptr, lane);
    if (!C::kCutsLastRound || !is_narrow) start_part<C>(part, slot, 1, t);
    stages.advance();
    if (num_blocks == 1) store_first(), goes_on = peek();
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(part);
    hand_on(slot);
    const bool is_full = (num_blocks > 1 || goes_on) && ptx::mbarrier_try(&shared.full[stages.slot], stages.parity);
    promote<C>(acc, part, 1, scales, nullptr, lane);  // narrow: into columns that are not stored
    if ((--num_blocks > 0 || goes_on) && !is_full) ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    if (num_blocks == 0) return goes_on;
    start_part<C>(part, stages.slot, 0, t);
  }
}

// Columns kFirst .. kLast - 1 of a unit's results.
template <class C, int kFirst, int kLast>
__device__ __forceinline__ void store_columns(float (&acc)[C::kBlockN / 2], const Fp8Params& p, Fp8Shared<C>& shared, const Unit& u, bool is_narrow,
                                              const MathThread& t) {
  // Found again, as `u` is: over the loop every register counts.
  const int thread = ptx::thread_index() % 128, warp = 4 * t.warpgroup + uniform(thread / 32), row = 16 * warp, lane = thread % 32;
  const int columns = is_narrow ? min(p.n - u.n0, C::kBlockN / 2) : p.n - u.n0;
  if (p.bias != nullptr) {
    add_bias<C::kBlockN, kFirst, kLast>(acc, p.bias + static_cast<std::int64_t>(u.group) * p.n + u.n0, columns, lane % 4, true, true);
  }
  const WarpTarget target{0, u.m0 + row, u.n0, u.m_valid - row, columns, lane, (u.m0 + row) * p.d_stride + u.n0};
  store_tile<C::kBlockN, C::kOutput, C::kBuffers, kFirst, kLast>(acc, shared.buffers[warp][0], p, target);
}

template <class C>
__device__ void multiply_two_parts(const Fp8Params& p, Fp8Shared<C>& shared) {
  static_assert(C::kForm == GemmForm::kNT && C::kParts == 2);
  MathThread t;
  t.warpgroup = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
  t.stages_address = ptx::smem_address(shared.stages);
  const std::uint32_t lane = threadIdx.x % 32;
  t.peer_empty = lane < C::kCluster ? ptx::map_shared(shared.empty, lane) : 0;
  const auto hand_on = [&](int slot) {
    if (t.peer_empty != 0) ptx::mbarrier_arrive_remote(t.peer_empty + static_cast<std::uint32_t>(slot) * 8);
  };
  const auto give_back = [&](unsigned unit) {
    __syncwarp();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(&shared.unit_empty[unit % kUnitSlots]);
  };
  const auto await_unit = [&](unsigned unit) -> const Unit& {
    ptx::mbarrier_wait(&shared.unit_full[unit % kUnitSlots], unit / kUnitSlots & 1);
    return shared.units[unit % kUnitSlots];
  };
  const auto has_products = [&](const Unit& u) { return uniform(u.num_blocks) > 0 && uniform(u.m_valid) > 64 * t.warpgroup && uniform(u.n0) < p.n; };
  unsigned num_units = 0;
  Ring<C::kStages> stages;
  for (;; ++num_units) {
    const Unit& first = await_unit(num_units);
    int num_blocks = uniform(first.num_blocks);
    if (num_blocks < 0) break;
    if (!has_products(first)) {
      for (; num_blocks > 0; --num_blocks) {
        ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
        __syncwarp();
        hand_on(stages.slot);
        stages.advance();
      }
      give_back(num_units);
      continue;
    }
    float acc[C::kBlockN / 2], part[C::kPartN / 2];
    ptx::mbarrier_wait(&shared.full[stages.slot], stages.parity);
    start_part<C>(part, stages.slot, 0, t);
    for (bool goes_on = true; goes_on;) {
      const Unit& u = shared.units[num_units % kUnitSlots];
#pragma unroll
      for (float& value : acc) value = 0.0f;
      const bool is_narrow = C::kCutsLastRound && uniform(u.slice) != 0;
      const auto store_first = [&] { store_columns<C, 0, C::kBlockN / 2>(acc, p, shared, u, is_narrow, t); };
      const auto peek = [&] { return has_products(await_unit(num_units + 1)); };
      goes_on = multiply_blocks_ahead<C>(acc, part, shared, uniform(u.num_blocks), stages, uniform(u.m0) & 3, is_narrow, t, hand_on, store_first, peek);
      // In any case, as a choice would make the compiler wait for the products; where no unit goes on, nobody looks at these.
      start_part<C>(part, stages.slot, 0, t);
      if (!is_narrow) store_columns<C, C::kBlockN / 2, C::kBlockN>(acc, p, shared, u, false, t);
      give_back(num_units);
      if (goes_on) ++num_units;
    }
    ptx::wgmma_wait<0>();
  }
  if (C::kBuffers > 1 && ptx::thread_index() % 32 == 0) ptx::bulk_wait_read<0>();  // shared memory stays until it is read
}

}  // namespace waybill::cuda
