// SPDX-License-Identifier: Apache-2.0
// An activation's result in tiles of 128 rows of a group x 128 columns, read once as gate and up: column blocks (128 x 1 or 32 x 1), row blocks of the
// same length beside them; codes as they lie, or turned (quantize_tile.cuh).
//
// Grid: persistent, 256 threads, two CTAs an SM; the next tile's gate and up come by asynchronous copies while this one's codes are made and stored.
// Bytes: h once, every kind of codes once; the result itself is never written.
#include "ops/quantize/cuda/activated_launch.cuh"
#include "ops/quantize/cuda/activated_tile.cuh"

namespace waybill::cuda {
namespace {

constexpr int kActivatedCtas = 2;  // an SM

__device__ __forceinline__ void start_both(const ActivatedSource& source, const Place& at, uint4* slots, bool may_start) {
  start_slot(source.h, source.h_stride, 0, at, slots, may_start);
  if (is_gated(source)) start_slot(source.h, source.h_stride, source.F, at, slots + kSlot, may_start);
  ptx::copy_async_commit();
}

template <ElementFormat kFormat, bool kDivides, int kBlock>
__global__ void __launch_bounds__(kThreads, kActivatedCtas)
    quantize_activated_tiles(const WideRows x, const ActivatedSource source, const CodedRows rows, const CodedRows columns) {
  extern __shared__ __align__(16) int memory[];
  __shared__ TileShared<kBlock, kDivides> shared;
  auto* slots = reinterpret_cast<uint4*>(memory);
  GroupTable table;
  table.build<128, kBlock == 128 ? 0 : kBlock>(x, memory + 2 * kSlot * 4);
  const unsigned column_tiles = static_cast<unsigned>(source.F + kTile - 1) / kTile, num_units = static_cast<unsigned>(table.num_blocks()) * column_tiles;
  if (x.status != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && (kBlock == 128 ? table.num_blocks() : table.num_blocks<1>()) > columns.scale_rows) {
    atomicOr(&x.status->flags, static_cast<unsigned>(kStatusBadOffsets));
  }
  if (blockIdx.x >= num_units) return;
  const bool gated = is_gated(source);
  start_both(source, place_of(source.F, table, blockIdx.x, column_tiles), slots, true);
  for (unsigned unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const Place at = place_of(source.F, table, unit, column_tiles);
    float weights[8];
    load_weights(source, at, weights);
    ptx::copy_async_wait<0>();
    Piece<true> pieces[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      pieces[i] = activated_piece(source, slot_piece(slots, 0, i), gated ? slot_piece(slots, 1, i) : make_uint4(0, 0, 0, 0), weights[i]);
    }
    if (unit + gridDim.x < num_units) start_both(source, place_of(source.F, table, unit + gridDim.x, column_tiles), slots, have_left(magnitudes_of(pieces)));
    code_tile<kFormat>(pieces, rows, columns, source.F, table, at, shared);
  }
}

struct ActivatedTiles {
  static constexpr int kSlots = 2, kCtas = kActivatedCtas;
  template <ElementFormat kFormat, bool kDivides, int kBlock>
  static auto kernel() {
    return quantize_activated_tiles<kFormat, kDivides, kBlock>;
  }
};

}  // namespace

void launch_quantize_activated_tiles(const ActivatedCall& call, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  activated_tiles::launch<ActivatedTiles>(call, rows, columns, stream);
}

}  // namespace waybill::cuda
