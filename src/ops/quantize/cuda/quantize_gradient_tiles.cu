// SPDX-License-Identifier: Apache-2.0
// An activation's gradient in tiles of 128 rows of a group x 128 columns of gate, up and da, read once, which give a tile of the gradient of gate and one of
// up: column blocks (128 x 1 or 32 x 1), row blocks of the same length beside them; codes as they lie, or turned (quantize_tile.cuh). Partial sums of the
// weights' gradient: 64 columns each, which 8 lanes hold.
//
// Grid: persistent, 256 threads, two CTAs an SM; the next tiles come by asynchronous copies while this one's codes are made and stored. The gradient of up
// waits where up lay; turned codes pass through shared memory in halves, so that two CTAs fit. Bytes: h and da once, every kind of codes once; the gradient
// itself is never written.
#include "ops/quantize/cuda/activated_launch.cuh"
#include "ops/quantize/cuda/activated_tile.cuh"

namespace waybill::cuda {
namespace {

constexpr int kGradientCtas = 2;  // an SM

constexpr int kStage = kTile / 2;

// Adds what the lane at distance `mask` holds: a lane keeps the row that its bit names, of which it gets the other's part.
__device__ __forceinline__ float add_other(float lower, float upper, int lane, int mask) {
  const bool is_upper = (lane & mask) != 0;
  return (is_upper ? upper : lower) + __shfl_xor_sync(ptx::kFullWarp, is_upper ? lower : upper, mask);
}

// t[j][q]: sums over columns 2 q and 2 q + 1 and the lane beside it, of row 2 j + lane % 2. A tree over the 8 lanes of 64 columns, neighbours first, as
// in activation_backward().
__device__ __forceinline__ void store_sums(const float (&t)[4][4], const ActivatedSource& source, const Place& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32, own = (lane & 1) + 2 * (lane & 2) + (lane >> 1 & 2);
  float sums[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float first = add_other(t[0][q], t[2][q], lane, 2), second = add_other(t[1][q], t[3][q], lane, 2);
    sums[q] = add_other(first, second, lane, 4);
  }
  const int column = at.column0 + (at.tx & 8) * 8;
  if (!at.has_row(own) || column >= at.column_end) return;
  source.partial_sums[static_cast<std::int64_t>(at.row(own)) * source.num_partials + column / kSumColumns] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ void start_early(const ActivatedSource& source, const Place& at, uint4* slots, bool may_start) {
  start_slot(source.h, source.h_stride, 0, at, slots, may_start);
  start_slot(source.da, source.da_stride, 0, at, slots + 2 * kSlot, may_start);
  ptx::copy_async_commit();
}
__device__ __forceinline__ void start_up(const ActivatedSource& source, const Place& at, uint4* slots, bool may_start) {
  if (is_gated(source)) start_slot(source.h, source.h_stride, source.F, at, slots + kSlot, may_start);
  ptx::copy_async_commit();
}

// gate: the gradient of gate. That of up goes to the slot that up came from. Returns the magnitudes of the latter, for have_left().
__device__ __forceinline__ std::uint32_t take_gradients(const ActivatedSource& source, const Place& at, uint4* slots, Piece<true> (&gate)[8]) {
  const bool gated = is_gated(source);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t magnitudes = 0;
  float weights[8], sums[4][4];
  load_weights(source, at, weights);
  ptx::copy_async_wait<0>();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float of_rows[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 2 * j + r;
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      const GradientPiece piece = gradient_piece(source, slot_piece(slots, 0, i), gated ? slot_piece(slots, 1, i) : zeros, slot_piece(slots, 2, i), weights[i]);
      gate[i] = piece.gate;
      if (gated) slots[kSlot + i * kThreads + static_cast<int>(threadIdx.x)] = piece.up.w;
      magnitudes |= piece.up.w.x | piece.up.w.y | piece.up.w.z | piece.up.w.w;
#pragma unroll
      for (int q = 0; q < 4; ++q) of_rows[r][q] = piece.sums[q];
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) sums[j][q] = add_other(of_rows[0][q], of_rows[1][q], lane, 1);
  }
  if (source.partial_sums != nullptr) store_sums(sums, source, at);
  return magnitudes & kMagnitudeBits;
}

template <ElementFormat kFormat, bool kDivides, int kBlock>
__global__ void __launch_bounds__(kThreads, kGradientCtas)
    quantize_gradient_tiles(const WideRows x, const ActivatedSource source, const CodedRows rows, const CodedRows columns) {
  extern __shared__ __align__(16) int memory[];
  __shared__ TileShared<kBlock, kDivides, kStage> shared;
  auto* slots = reinterpret_cast<uint4*>(memory);
  GroupTable table;
  table.build<128, kBlock == 128 ? 0 : kBlock>(x, memory + 3 * kSlot * 4);
  const unsigned column_tiles = static_cast<unsigned>(source.F + kTile - 1) / kTile, num_units = static_cast<unsigned>(table.num_blocks()) * column_tiles;
  if (x.status != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && (kBlock == 128 ? table.num_blocks() : table.num_blocks<1>()) > columns.scale_rows) {
    atomicOr(&x.status->flags, static_cast<unsigned>(kStatusBadOffsets));
  }
  if (blockIdx.x >= num_units) return;
  const bool gated = is_gated(source);
  start_early(source, place_of(source.F, table, blockIdx.x, column_tiles), slots, true);
  start_up(source, place_of(source.F, table, blockIdx.x, column_tiles), slots, true);
  for (unsigned unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    Place at = place_of(source.F, table, unit, column_tiles);
    const bool has_next = unit + gridDim.x < num_units;
    Piece<true> pieces[8];
    const std::uint32_t others = take_gradients(source, at, slots, pieces);
    if (has_next) {
      start_early(source, place_of(source.F, table, unit + gridDim.x, column_tiles), slots, have_left(magnitudes_of(pieces) | others));
    }
    code_tile<kFormat>(pieces, rows, columns, x.columns, table, at, shared);
    if (!gated) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) pieces[i].w = slot_piece(slots, 1, i);
    if (has_next) start_up(source, place_of(source.F, table, unit + gridDim.x, column_tiles), slots, have_left(magnitudes_of(pieces)));
    at.column0 += source.F, at.column_end += source.F;
    code_tile<kFormat>(pieces, rows, columns, x.columns, table, at, shared);
  }
}

struct GradientTiles {
  static constexpr int kSlots = 3, kCtas = kGradientCtas;
  template <ElementFormat kFormat, bool kDivides, int kBlock>
  static auto kernel() {
    return quantize_gradient_tiles<kFormat, kDivides, kBlock>;
  }
};

}  // namespace

void launch_quantize_gradient_tiles(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  activated_tiles::launch<GradientTiles>(call, rows, columns, stream);
}

}  // namespace waybill::cuda
