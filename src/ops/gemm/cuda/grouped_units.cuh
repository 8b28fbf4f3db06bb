// SPDX-License-Identifier: Apache-2.0
// Units of work of a grouped matmul, found on the device from the offsets: no list in memory, no launch to build one.
//
// A unit is what one cluster computes at a time. In a cluster of two, the CTAs take two row tiles of one group and share the columns of B
// (kPairM); a group's odd last row tile is shared instead, and the CTAs take neighbouring columns (kPairN). A warp walks the groups in
// windows of 32, a group a lane, and finds unit numbers that only grow.
#pragma once

#include "core/cuda/ptx.cuh"
#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

enum PairMode : int { kPairM = 0, kPairN = 1 };

struct alignas(16) Unit {
  int group, m0, m_valid, n0;                      // m0: first row of D (kNT, kNN: row of the ragged tensor), m_valid of this tile's rows exist
  int k_row, num_blocks, k_tail, pair;             // kTN: first row; k_tail rows of the last block exist. num_blocks -1: no more units
  int slice, num_slices, first_slot, slot_stride;  // kTN: the partial tile of slice s is at first_slot + s * slot_stride
  // kNT: whether it is only half of the tile's columns; the other half is the unit before or behind.
  __device__ __forceinline__ bool is_narrow() const { return slice != 0; }
};

// kTN: of the groups whose rows exceed 1.5 times the mean, or of the others.
enum UnitShare : int { kAllUnits = 0, kLongUnits = 1, kOtherUnits = 2 };

// kBlockK: rows of a k block. kIsBlocked (kTN): operands lie in blocks of kBlockK rows that start anew at each group, and k_row counts blocks.
// kBlockM: rows of a tile.
template <GemmForm kForm, int kBlockN, int kCluster, int kBlockK = gemm_limits::kBlockK, bool kIsBlocked = false, int kBlockM = gemm_limits::kBlockM>
class UnitWalker {
 public:
  __device__ UnitWalker(const GroupedParams& p, int lane, int num_clusters) : p_(p), lane_(lane), pass_(p.max_split_units > 0 ? 0 : p.num_passes - 1) {
    q_tiles_ = (p.n + kBlockN - 1) / kBlockN;
    if constexpr (kForm == GemmForm::kTN) {
      tiles_ = units_of_tiles((p.m + kBlockM - 1) / kBlockM);
      const long long blocks = max(min(__ldg(p.offsets + p.groups), p.rows), 0) / kBlockK + 1;
      slice_blocks_ = max(static_cast<int>(blocks * p.slice_tiles / (static_cast<long long>(num_clusters) * p.slices_per_cluster)), p.min_slice_blocks);
    }
    if constexpr (kMixes) {
      if (p.long_batch > 0) {
        share_ = kLongUnits, num_long_ = count();
        share_ = kOtherUnits, period_ = num_long_ == 0 ? 1 : 1 + static_cast<int>(3ll * count() / (4ll * num_long_));
      }
    }
    fetch(0);
    take_window();
  }

  // All lanes. False: the unit does not exist; total() is then the number of units.
  __device__ bool find(int number, int rank, Unit& out) {
    if constexpr (kMixes) {
      if (p_.long_batch > 0) number = choose_share(number);
    }
    const bool is_narrow = number >= first_narrow_;
    const int unit = is_narrow ? first_narrow_ + (number - first_narrow_) / 2 : number;
    while (unit >= base_unit_ + window_units_) {
      if (!next_window()) return false;
    }
    const unsigned reached = __ballot_sync(ptx::kFullWarp, lane_end_ > unit - base_unit_);
    const int owner = __ffs(static_cast<int>(reached)) - 1;
    const int local = unit - base_unit_ - __shfl_sync(ptx::kFullWarp, lane_end_ - lane_units_, owner);
    const int begin = __shfl_sync(ptx::kFullWarp, kIsBlocked ? lane_block_ : lane_begin_, owner), rows = __shfl_sync(ptx::kFullWarp, lane_rows_, owner);
    out.group = base_group_ + owner;
    describe(unit, local, begin, rows, rank, out);
    if (is_narrow) out.slice = 1, out.n0 += (number - first_narrow_) % 2 * (kBlockN / 2);
    return true;
  }
  // Units of the groups of its share; all lanes.
  __device__ int count() const {
    int units = 0;
    for (int g = lane_; g < p_.groups; g += 32) {
      const int begin = min(max(__ldg(p_.offsets + g), 0), p_.rows), end = min(max(__ldg(p_.offsets + g + 1), begin), p_.rows);
      units += units_of_rows(end - begin, g);
    }
    return __shfl_sync(ptx::kFullWarp, inclusive_sum(units), 31);
  }
  __device__ int total() const { return base_unit_ + window_units_ + num_narrow_ + num_long_; }

  // Row-ragged forms; all lanes, once at least a unit a cluster has been drawn.
  __device__ void cut_last_round(int num_clusters) {
    const int units = count();
    const int last = units % num_clusters;
    if (units > num_clusters && 2 * last <= num_clusters) first_narrow_ = units - last, num_narrow_ = last;
  }

 private:
  static constexpr bool kMixes = kForm == GemmForm::kTN && !kIsBlocked;  // 8-bit kernels lack the registers for it, and for knowing the empty passes
  // kTN, groups that are not cut (p.long_batch > 0): units of long groups, which the tensor cores bound, are drawn beside those of the others, which D's way
  // to memory bounds: long_batch of them, which start together and so share what they read, then (period_ - 1) * long_batch others. Both kinds in their
  // groups' order; the long ones end first, so that the last units are short. Walks anew: two walks cost too many registers.
  __device__ int choose_share(int number) {
    const int batch = p_.long_batch, lone = num_long_ % batch, mixed = (num_long_ - lone) * period_;  // the lone ones come first
    const int n = number - lone, cycle = n / (batch * period_), in_cycle = n - cycle * batch * period_;
    const bool is_long = number < lone || (n < mixed && in_cycle < batch);
    share_ = is_long ? kLongUnits : kOtherUnits;
    base_group_ = 0, base_unit_ = 0;
    fetch(0);
    take_window();
    if (number < lone) return number;
    return is_long ? lone + cycle * batch + in_cycle : n - (n < mixed ? (cycle + 1) * batch : num_long_ - lone);
  }
  __device__ bool is_long(int rows) const { return 2ll * rows * p_.groups > 3ll * min(max(__ldg(p_.offsets + p_.groups), 0), p_.rows); }
  __device__ int units_of_tiles(int m_tiles) const {
    if constexpr (kCluster == 1) return m_tiles * q_tiles_;
    return (m_tiles >> 1) * q_tiles_ + (m_tiles & 1) * ((q_tiles_ + 1) >> 1);
  }
  __device__ static int blocks_of(int rows) { return (rows + kBlockK - 1) / kBlockK; }
  __device__ int slices_of(int blocks) const { return max((blocks + slice_blocks_ / 2) / slice_blocks_, 1); }
  // Where slice `slice` of a group starts. kIsBlocked: without a division of 64 bits, whose registers a kernel may lack.
  __device__ static int first_block_of(int slice, int blocks, int slices) {
    if constexpr (kIsBlocked) return slice * (blocks / slices) + min(slice, blocks % slices);
    return static_cast<int>(static_cast<long long>(slice) * blocks / slices);
  }
  // kTN: groups in slices first, then the others from long to short in steps of 3/4, so that the last units are short.
  __device__ int pass_of(int blocks, int slices) const {
    int pass = slices > 1 ? 0 : min(1, p_.num_passes - 1);
    for (int limit = slice_blocks_; pass > 0 && pass < p_.num_passes - 1 && blocks <= limit; limit = limit * 3 / 4) ++pass;
    return pass;
  }
  __device__ int units_of_rows(int rows, int group) const {
    if (group >= p_.groups) return 0;
    if constexpr (kForm == GemmForm::kTN) {  // an empty group's units write zeros
      const int blocks = blocks_of(rows), slices = slices_of(blocks);
      if (kMixes && share_ != kAllUnits && is_long(rows) != (share_ == kLongUnits)) return 0;
      return pass_of(blocks, slices) == pass_ ? slices * tiles_ : 0;
    } else {
      return units_of_tiles((rows + kBlockM - 1) / kBlockM);
    }
  }
  __device__ int inclusive_sum(int value) const {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(ptx::kFullWarp, value, step);
      if (lane_ >= step) value += below;
    }
    return value;
  }
  __device__ void fetch(int group) {
    const int g = group + lane_;
    next_begin_ = g <= p_.groups ? __ldg(p_.offsets + g) : 0;
    next_end_ = g < p_.groups ? __ldg(p_.offsets + g + 1) : 0;
  }
  __device__ void take_window() {
    const int g = base_group_ + lane_;
    lane_begin_ = min(max(next_begin_, 0), p_.rows);
    const int end = min(max(next_end_, lane_begin_), p_.rows);
    if (g < p_.groups && (next_begin_ < 0 || next_end_ != end || (g == 0 && next_begin_ != 0)) && p_.status != nullptr && blockIdx.x == 0) {
      atomicOr(&p_.status->flags, static_cast<unsigned>(kStatusBadOffsets));
    }
    lane_rows_ = g < p_.groups ? end - lane_begin_ : 0;
    lane_units_ = units_of_rows(lane_rows_, g);
    if constexpr (kMixes) {
      const int blocks = blocks_of(lane_rows_);
      if (p_.max_split_units > 0) seen_passes_ |= ptx::redux_or(g < p_.groups ? 1u << pass_of(blocks, slices_of(blocks)) : 0u);
    }
    lane_end_ = inclusive_sum(lane_units_);
    if constexpr (kIsBlocked) {
      const int blocks = blocks_of(lane_rows_), end = next_block_ + inclusive_sum(blocks);
      lane_block_ = end - blocks;
      next_block_ = __shfl_sync(ptx::kFullWarp, end, 31);
    }
    window_units_ = __shfl_sync(ptx::kFullWarp, lane_end_, 31);
    fetch(base_group_ + 32);
  }
  __device__ bool next_window() {
    int next = base_group_ + 32;
    if (next >= p_.groups) {
      if constexpr (kMixes) {  // the first pass has seen every group: those without any are left out
        const int later = __ffs(static_cast<int>(seen_passes_ >> pass_ >> 1));
        if (later == 0) return false;
        pass_ += later;
      } else {
        if (kForm != GemmForm::kTN || pass_ == p_.num_passes - 1) return false;
        ++pass_;
      }
      next = 0;
      next_block_ = 0;
      fetch(0);
    }
    base_unit_ += window_units_;
    base_group_ = next;
    take_window();
    return true;
  }
  __device__ void describe(int unit, int local, int begin, int rows, int rank, Unit& out) const {
    int m_tiles;
    if constexpr (kForm == GemmForm::kTN) {
      m_tiles = (p_.m + kBlockM - 1) / kBlockM;
      const int blocks = blocks_of(rows), slices = slices_of(blocks), slice = local / tiles_;
      const int first = first_block_of(slice, blocks, slices), last = first_block_of(slice + 1, blocks, slices);
      out.slice = slice, out.num_slices = slices, out.first_slot = unit - slice * tiles_, out.slot_stride = tiles_;
      out.k_row = begin + (kIsBlocked ? first : first * kBlockK), out.num_blocks = last - first;
      out.k_tail = slice == slices - 1 && blocks > 0 ? rows - (blocks - 1) * kBlockK : kBlockK;
      local -= slice * tiles_;
    } else {
      m_tiles = (rows + kBlockM - 1) / kBlockM;
      out.slice = 0, out.num_slices = 1, out.first_slot = 0, out.slot_stride = 0;
      out.k_row = 0, out.num_blocks = blocks_of(p_.k), out.k_tail = kBlockK;
    }
    const int pairs = m_tiles / kCluster;
    int m_tile, n_tile;
    if (local < pairs * q_tiles_) {
      const int band = local / (p_.band * q_tiles_), in_band = local - band * p_.band * q_tiles_;
      const int width = min(p_.band, pairs - band * p_.band);
      n_tile = in_band / width;
      m_tile = (band * p_.band + in_band - n_tile * width) * kCluster + rank;
      out.pair = kPairM;
    } else {
      n_tile = (local - pairs * q_tiles_) * kCluster + rank;
      m_tile = m_tiles - 1;
      out.pair = kPairN;
    }
    const int extent = kForm == GemmForm::kTN ? p_.m : rows, m_local = m_tile * kBlockM;
    out.m0 = m_local + (kForm == GemmForm::kTN ? 0 : begin);
    out.m_valid = min(extent - m_local, kBlockM);
    out.n0 = n_tile * kBlockN;
    if (kForm == GemmForm::kTN && out.num_slices > 1 && unit >= p_.max_split_units) out.m_valid = 0, out.num_blocks = 0, out.num_slices = 1;
  }

  const GroupedParams& p_;
  int lane_, q_tiles_, tiles_ = 0, slice_blocks_ = 1;
  int base_group_ = 0, base_unit_ = 0, window_units_ = 0;
  int lane_begin_ = 0, lane_rows_ = 0, lane_units_ = 0, lane_end_ = 0, lane_block_ = 0, next_block_ = 0;
  int next_begin_ = 0, next_end_ = 0;
  int pass_;
  UnitShare share_ = kAllUnits;
  int num_long_ = 0, period_ = 1;                   // units of long groups; one in `period_` units is one
  unsigned seen_passes_ = 0;                        // kTN: a bit each
  int first_narrow_ = 0x7fffffff, num_narrow_ = 0;  // units from first_narrow_ on have two numbers each
};

}  // namespace waybill::cuda
