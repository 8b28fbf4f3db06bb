// SPDX-License-Identifier: Apache-2.0
// What the kernels on tiles of 128 rows of a group x 128 columns share: scales of column blocks (128 x 1 or 32 x 1), of row blocks of the same length
// or of the tile, and codes as the values lie or turned: [block of 128 rows][column][row], which is what a product over rows reads.
//
// 256 threads; thread (ty, tx) = (t / 16, t % 16) holds rows 8 ty .. + 7 x columns 8 tx .. + 7 in registers. Row maxima meet by shuffles among the 16
// lanes of a row, column maxima in shared memory. Turned codes pass through shared memory, adjacent in both.
#pragma once

#include <algorithm>

#include "ops/quantize/cuda/cache_hints.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/wide_codes.cuh"
#include "ops/quantize/cuda/wide_piece.cuh"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kTile = 128, kWarps = kThreads / 32;

// Made of all bits of the pieces but the highest, which it never has: who waits for it has the pieces in registers.
template <bool kIsBf16>
__device__ __forceinline__ std::uint32_t magnitudes_of(const Piece<kIsBf16> (&pieces)[8]) {
  std::uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int k = 0; k < 4 * Piece<kIsBf16>::kVectors; ++k) all |= pieces[i].word(k);
  }
  return all & kMagnitudeBits;
}

// What values are multiplied by, or divided by.
template <bool kDivides>
struct Apply {
  float by;
  __device__ __forceinline__ static Apply of(const BlockScale& scale) { return {scale.factor}; }
  __device__ __forceinline__ float operator()(float value) const { return __fmul_rn(value, by); }
};
template <>
struct Apply<true> {
  float by, reciprocal;
  __device__ __forceinline__ static Apply of(const BlockScale& scale) { return {scale.divisor, scale.reciprocal}; }
  __device__ __forceinline__ float operator()(float value) const { return reciprocal != 0 ? divide(value, by, reciprocal) : __fdiv_rn(value, by); }
};

// kStage: columns whose turned codes lie in shared memory at a time.
template <int kBlock, bool kDivides, int kStage = kTile>
struct TileShared {
  std::uint8_t turned[kTile * kStage];
  std::uint32_t part[kWarps][kTile];  // largest magnitudes of a warp's 16 rows
  Apply<kDivides> apply[kTile / kBlock][kTile];
  alignas(16) Apply<kDivides> of_rows[kTile / kBlock][kTile];  // a warp reads its own 16 rows only
};

// One 128 x 128 tile and this thread's place in it.
struct Place {
  int group, row0, valid, column0, tx, ty;
  int block;       // of 128 rows, counted over all groups
  int column_end;  // first column behind those that the tile may hold
  __device__ int row(int i) const { return row0 + 8 * ty + i; }
  __device__ bool has_row(int i) const { return 8 * ty + i < valid; }
  __device__ int column() const { return column0 + 8 * tx; }
};

__device__ __forceinline__ void store_scale(const CodedRows& out, std::int64_t row, int column, const BlockScale& scale) {
  if (row >= out.scale_rows) return;
  const std::int64_t at = row * out.scale_stride + column * out.scale_column_stride;
  if (out.scale == ScaleFormat::kE8M0) {
    static_cast<std::uint8_t*>(out.scales)[at] = static_cast<std::uint8_t>(scale.stored);
  } else {
    static_cast<float*>(out.scales)[at] = __uint_as_float(scale.stored);
  }
}

// Halves the values by swapping with the lane at distance `mask`: a lane keeps the half that its bit names.
template <int kCount>
__device__ __forceinline__ void meet(std::uint32_t (&m)[8], int lane, int mask) {
  const bool upper = (lane & mask) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const std::uint32_t keep = upper ? m[i + kCount / 2] : m[i], give = upper ? m[i] : m[i + kCount / 2];
    m[i] = max(keep, __shfl_xor_sync(ptx::kFullWarp, give, mask));
  }
}

// Scales of row blocks, stored, and in shared memory.
template <ElementFormat kFormat, bool kDivides, int kBlock, int kStage, bool kIsBf16>
__device__ __forceinline__ void scale_rows(const Piece<kIsBf16> (&pieces)[8], const CodedRows& out, const Place& at,
                                           TileShared<kBlock, kDivides, kStage>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = pieces[i].largest();
  constexpr int kOwned = kBlock == 128 ? 1 : 2;
  int first;  // row of the thread's 8 whose maximum ends up here
  if constexpr (kBlock == 128) {
    meet<8>(m, lane, 8), meet<4>(m, lane, 4), meet<2>(m, lane, 2);
    m[0] = max(m[0], __shfl_xor_sync(ptx::kFullWarp, m[0], 1));
    first = lane % 16 / 2;
  } else {
    meet<8>(m, lane, 2), meet<4>(m, lane, 1);
    first = lane % 4 * 2;
  }
  __syncwarp();  // the last tile's have been read
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    const BlockScale scale = block_scale<kFormat>(m[i], out.scale, out.rule, 1.0f);
    if (kBlock == 128 && lane % 2 != 0) continue;
    shared.of_rows[8 * at.tx / kBlock][8 * at.ty + first + i] = Apply<kDivides>::of(scale);
    // The last tile may hold fewer columns than its blocks (32) would.
    if (at.has_row(first + i) && at.column() / kBlock * kBlock < at.column_end) store_scale(out, at.row(first + i), at.column() / kBlock, scale);
  }
  __syncwarp();
}

// Scales of column blocks, stored, and in shared memory.
template <ElementFormat kFormat, bool kDivides, int kBlock, int kStage, bool kIsBf16>
__device__ __forceinline__ void scale_columns(ColumnMaximum<kIsBf16> largest, const CodedRows& out, const GroupTable& table, const Place& at,
                                              TileShared<kBlock, kDivides, kStage>& shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  largest.join_lane(16);
  if (lane < 16) {
    auto* to = reinterpret_cast<uint4*>(&shared.part[warp][8 * at.tx]);
    to[0] = make_uint4(largest.column(0), largest.column(1), largest.column(2), largest.column(3));
    to[1] = make_uint4(largest.column(4), largest.column(5), largest.column(6), largest.column(7));
  }
  __syncthreads();
  constexpr int kWarpsOfBlock = kBlock / 16;
  for (int e = thread; e < kTile * kTile / kBlock; e += kThreads) {
    const int block = e / kTile, column = e % kTile;
    std::uint32_t amax = 0;
#pragma unroll
    for (int w = 0; w < kWarpsOfBlock; ++w) amax = max(amax, shared.part[block * kWarpsOfBlock + w][column]);
    const BlockScale scale = block_scale<kFormat>(amax, out.scale, out.rule, 1.0f);
    shared.apply[block][column] = Apply<kDivides>::of(scale);
    if (block * kBlock >= at.valid || at.column0 + column >= at.column_end) continue;
    const std::int64_t row = kBlock == 128 ? at.block : table.first_block<1>(at.group) + (at.row0 - table.first_row(at.group)) / kBlock + block;
    store_scale(out, row, at.column0 + column, scale);
  }
  __syncthreads();
}

// One scale for the tile; returns what to apply.
template <ElementFormat kFormat, bool kDivides, bool kIsBf16>
__device__ __forceinline__ Apply<kDivides> scale_tile(const ColumnMaximum<kIsBf16>& largest, const CodedRows& out, const Place& at,
                                                      TileShared<128, kDivides>& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = max(amax, largest.column(i));
  amax = ptx::redux_max(amax);
  if (thread % 32 == 0) shared.part[0][thread / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, shared.part[0][w]);
  const BlockScale scale = block_scale<kFormat>(amax, out.scale, out.rule, 1.0f);
  if (thread == 0) store_scale(out, at.block, at.column0 / kTile, scale);
  return Apply<kDivides>::of(scale);
}

// bf16 under powers of two: two products at a time in bf16 itself, exact but for what no element is near.
template <bool kDivides, bool kIsBf16>
inline constexpr bool kInPairs = kIsBf16 && !kDivides;
__device__ __forceinline__ std::uint32_t pair_of(const Apply<false>& low, const Apply<false>& high) {
  return ptx::permute_bytes(__float_as_uint(low.by), __float_as_uint(high.by), 0x7632);
}
__device__ __forceinline__ float low_half(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Codes of rows as x lies. kOfRows: apply[i] belongs to row i, else to column i; kOne: apply[0] to all.
enum class Scales : int { kOfRows, kOfColumns, kOne };
template <ElementFormat kFormat, Scales kScales, bool kDivides, bool kStreams = false, bool kIsBf16>
__device__ __forceinline__ void store_codes(const Piece<kIsBf16> (&pieces)[8], const CodedRows& out, const Place& at,
                                            const Apply<kDivides> (&apply)[kScales == Scales::kOne ? 1 : 8]) {
  if (at.column() >= at.column_end) return;
  std::uint8_t* to = out.codes + at.row(0) * out.code_stride + at.column();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!at.has_row(i)) break;
    uint2 codes;
    if constexpr (kInPairs<kDivides, kIsBf16>) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int first = kScales == Scales::kOfColumns ? 2 * k : (kScales == Scales::kOfRows ? i : 0),
                  second = kScales == Scales::kOfColumns ? first + 1 : first;
        const std::uint32_t product = multiply_pairs(pieces[i].word(k), pair_of(apply[first], apply[second]));
        pairs[k] = encode_pair<kFormat>(low_half(product), high_half(product));
      }
      codes = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    } else {
      codes = encode_eight<kFormat>([&](int j) { return apply[kScales == Scales::kOfColumns ? j : (kScales == Scales::kOfRows ? i : 0)](pieces[i].value(j)); });
    }
    store_once<kStreams>(reinterpret_cast<uint2*>(to), codes);
    to += out.code_stride;
  }
}

// Where the 8 codes of rows 8 ty .. of a column lie in shared memory: 16-byte pieces and their halves change places, against bank conflicts.
__device__ __forceinline__ int turned_place(int column, int ty) {
  return column * kTile + (((ty >> 1) ^ (column >> 3 & 7)) << 4) + (((ty & 1) ^ (column >> 6)) << 3);
}

// The codes of rows 8 ty .. of columns 8 tx + 2 k and the next.
template <ElementFormat kFormat, bool kIsOne, bool kDivides, bool kIsBf16>
__device__ __forceinline__ void turn_two(const Piece<kIsBf16> (&pieces)[8], int k, const Apply<kDivides> (&apply)[kIsOne ? 1 : 8], std::uint64_t mask,
                                         uint2 (&codes)[2]) {
  if constexpr (kInPairs<kDivides, kIsBf16>) {
    const std::uint32_t scales = pair_of(apply[kIsOne ? 0 : 2 * k], apply[kIsOne ? 0 : 2 * k + 1]);
    std::uint32_t low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t a = multiply_pairs(pieces[2 * i].word(k), scales), b = multiply_pairs(pieces[2 * i + 1].word(k), scales);
      low[i] = encode_pair<kFormat>(low_half(a), low_half(b)), high[i] = encode_pair<kFormat>(high_half(a), high_half(b));
    }
    codes[0] = make_uint2(low[0] | low[1] << 16, low[2] | low[3] << 16), codes[1] = make_uint2(high[0] | high[1] << 16, high[2] | high[3] << 16);
  } else {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int j = 2 * k + c;
      codes[c] = encode_eight<kFormat>([&](int i) { return apply[kIsOne ? 0 : j](pieces[i].value(j)); });
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) codes[c].x &= static_cast<std::uint32_t>(mask), codes[c].y &= static_cast<std::uint32_t>(mask >> 32);
}

// columns: of the whole tensor, which a block of `turned` holds.
template <ElementFormat kFormat, bool kIsOne, int kStage, bool kStreams = false, bool kDivides, bool kIsBf16>
__device__ __forceinline__ void store_turned(const Piece<kIsBf16> (&pieces)[8], const CodedRows& out, int columns, const Place& at, std::uint8_t* stage,
                                             const Apply<kDivides> (&apply)[kIsOne ? 1 : 8]) {
  const int missing = min(max(8 * at.ty + 8 - at.valid, 0), 8);  // rows past the group's end are zeros, also where the block is NaN
  const std::uint64_t mask = missing == 8 ? 0 : ~std::uint64_t{0} >> (8 * missing);
  constexpr int kTurns = kTile / kStage, kThreadsOfTurn = 16 / kTurns;
  uint2 codes[8];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint2 two[2];
    turn_two<kFormat, kIsOne>(pieces, k, apply, mask, two);
    codes[2 * k] = two[0], codes[2 * k + 1] = two[1];
    if constexpr (kTurns == 1) {
#pragma unroll
      for (int c = 0; c < 2; ++c) *reinterpret_cast<uint2*>(stage + turned_place(8 * at.tx + 2 * k + c, at.ty)) = two[c];
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if constexpr (kTurns > 1) {
      if (turn > 0) __syncthreads();  // what lay there is on its way
      if (at.tx / kThreadsOfTurn == turn) {
#pragma unroll
        for (int j = 0; j < 8; ++j) *reinterpret_cast<uint2*>(stage + turned_place(8 * (at.tx % kThreadsOfTurn) + j, at.ty)) = codes[j];
      }
    }
    __syncthreads();
    if (at.block >= out.turned_blocks) continue;
    const int column0 = at.column0 + turn * kStage, bytes = min(kStage, at.column_end - column0) * kTile;
    std::uint8_t* to = out.turned + (static_cast<std::int64_t>(at.block) * columns + column0) * kTile;
#pragma unroll
    for (int i = 0; i < kTile * kStage / (16 * kThreads); ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * kThreads, column = piece / 8, q = piece % 8;
      uint4 v = *reinterpret_cast<const uint4*>(stage + column * kTile + ((q ^ (column >> 3 & 7)) << 4));
      if (kStage > 64 && column >= 64) v = make_uint4(v.z, v.w, v.x, v.y);
      if (16 * piece < bytes) store_once<kStreams>(reinterpret_cast<uint4*>(to + 16 * piece), v);
    }
  }
}

// A tile under blocks of rows (rows.codes not null) and of columns. kStreams: codes by streaming stores.
template <ElementFormat kFormat, bool kStreams = false, bool kDivides, int kBlock, int kStage, bool kIsBf16>
__device__ __forceinline__ void code_tile(const Piece<kIsBf16> (&pieces)[8], const CodedRows& rows, const CodedRows& columns, int num_columns,
                                          const GroupTable& table, const Place& at, TileShared<kBlock, kDivides, kStage>& shared) {
  if (rows.codes != nullptr) scale_rows<kFormat>(pieces, rows, at, shared);
  ColumnMaximum<kIsBf16> largest;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest.add(pieces[i]);
  scale_columns<kFormat>(largest, columns, table, at, shared);
  Apply<kDivides> apply[8];
  if (rows.codes != nullptr) {
    const Apply<kDivides>* of_rows = shared.of_rows[8 * at.tx / kBlock] + 8 * at.ty;
#pragma unroll
    for (int i = 0; i < 8; ++i) apply[i] = of_rows[i];
    store_codes<kFormat, Scales::kOfRows, kDivides, kStreams>(pieces, rows, at, apply);
  }
  const Apply<kDivides>* of_columns = shared.apply[8 * at.ty / kBlock] + 8 * at.tx;
#pragma unroll
  for (int j = 0; j < 8; ++j) apply[j] = of_columns[j];
  if (columns.codes != nullptr) store_codes<kFormat, Scales::kOfColumns, kDivides, kStreams>(pieces, columns, at, apply);
  if (columns.turned != nullptr) store_turned<kFormat, false, kStage, kStreams>(pieces, columns, num_columns, at, shared.turned, apply);
}

// The tile of a unit; units walk the columns of a row of blocks first.
__device__ __forceinline__ Place place_of(int columns, const GroupTable& table, unsigned unit, unsigned column_tiles) {
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned block = unit / column_tiles;
  Place at;
  at.block = static_cast<int>(block);
  at.column0 = static_cast<int>(unit - block * column_tiles) * kTile;
  at.group = table.group_of_block(static_cast<int>(block));
  at.row0 = table.first_row(at.group) + (static_cast<int>(block) - table.first_block(at.group)) * kTile;
  at.valid = min(kTile, table.end_row(at.group) - at.row0);
  at.tx = thread % 16, at.ty = thread / 16, at.column_end = columns;
  return at;
}

}  // namespace

}  // namespace waybill::cuda
