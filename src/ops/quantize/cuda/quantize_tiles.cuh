// SPDX-License-Identifier: Apache-2.0
// Tiles of 128 rows of a group x 128 columns, read once: column blocks (128 x 1 or 32 x 1), row blocks of the same length beside them, or one
// scale a tile (128 x 128); codes as x lies, or turned (quantize_tile.cuh).
//
// Grid: persistent, 256 threads; the next tile's elements come by asynchronous copies while this one's codes are made and stored.
// Bytes: x once, every kind of codes once.
#pragma once

#include "core/cuda/launch.h"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/quantize_tile.cuh"

namespace waybill::cuda {
namespace {

// What registers allow.
template <int kBlock, bool kIsBf16, bool kDivides>
constexpr int kCtasPerSm = (kBlock == 128 && !kDivides ? 2 : 1) + (kIsBf16 ? 1 : 0);

// Both directions of bf16 under powers of two: rows of so many columns go with the L2's hints, narrower ones with two CTAs an SM and without; measured
// (docs/perf/quantize-gpu.md).
template <int kBlock, bool kDivides, bool kIsTile>
constexpr bool kCanHint = kBlock == 128 && !kDivides && !kIsTile;
constexpr int kWideRow = 4096;

// A thread's elements of the next tile on their way to shared memory; nobody else reads them. magnitudes: magnitudes_of() what the thread has read from
// there before, so that it has left. kHints: what is copied leaves the L2 first.
template <bool kIsBf16, bool kHints>
__device__ __forceinline__ void start_copies(const WideRows& x, const Place& at, uint4* next, std::uint32_t magnitudes) {
  asm volatile("" : "+r"(magnitudes));
  const bool may_start = magnitudes < 0x80000000u;
  constexpr int kPieces = kIsBf16 ? 1 : 2;  // of 16 bytes, for 8 elements
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(next + threadIdx.x));
  std::uint64_t policy = 0;
  if constexpr (kHints) policy = leave_first();
  const auto copy = [&](std::uint32_t place, const void* from, bool is_there) {
    kHints ? copy_async_16_under(place, from, is_there, policy) : ptx::copy_async_16(place, from, is_there);
  };
  if (x.list == nullptr && at.valid == kTile && at.column0 + kTile <= at.column_end) {
    const std::uint8_t* from = static_cast<const std::uint8_t*>(x.data) + (at.row(0) * x.stride + at.column()) * (kIsBf16 ? 2 : 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int h = 0; h < kPieces; ++h) copy(to + (i * kPieces + h) * kThreads * 16, from + 16 * h, may_start);
      from += x.stride * (kIsBf16 ? 2 : 4);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::int64_t source = at.has_row(i) && at.column() < at.column_end ? source_row(x, at.row(i)) : -1;
    const bool is_there = source >= 0 && may_start;
    const std::int64_t element = is_there ? source * x.stride + at.column() : 0;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      copy(to + (i * kPieces + h) * kThreads * 16, static_cast<const std::uint8_t*>(x.data) + element * (kIsBf16 ? 2 : 4) + 16 * h, is_there);
    }
  }
}

template <ElementFormat kFormat, bool kDivides, int kBlock, bool kIsTile, bool kIsBf16, bool kHints>
__global__ void __launch_bounds__(kThreads, kCtasPerSm<kBlock, kIsBf16, kDivides>)
    quantize_tiles(const WideRows x, const CodedRows rows, const CodedRows columns) {
  extern __shared__ __align__(16) int memory[];
  __shared__ TileShared<kBlock, kDivides> shared;
  auto* next = reinterpret_cast<uint4*>(memory);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kHints) ptx::wait_for_dependencies(), ptx::launch_dependents();  // may start while the kernel before it ends
#endif
  GroupTable table;
  table.build<128, kBlock == 128 ? 0 : kBlock>(x, memory + kTile * kTile / (kIsBf16 ? 2 : 1));
  const unsigned column_tiles = static_cast<unsigned>(x.columns + kTile - 1) / kTile, num_units = static_cast<unsigned>(table.num_blocks()) * column_tiles;
  if (x.status != nullptr && threadIdx.x == 0 && blockIdx.x == 0 && (kBlock == 128 ? table.num_blocks() : table.num_blocks<1>()) > columns.scale_rows) {
    atomicOr(&x.status->flags, static_cast<unsigned>(kStatusBadOffsets));
  }
  if (blockIdx.x >= num_units) return;
  start_copies<kIsBf16, kHints>(x, place_of(x.columns, table, blockIdx.x, column_tiles), next, 0);
  for (unsigned unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    Piece<kIsBf16> pieces[8];
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) pieces[i].take(next + i * Piece<kIsBf16>::kVectors * kThreads + threadIdx.x, kThreads);
    const Place at = place_of(x.columns, table, unit, column_tiles);
    // Before all else: the copies take longest.
    if (unit + gridDim.x < num_units) {
      start_copies<kIsBf16, kHints>(x, place_of(x.columns, table, unit + gridDim.x, column_tiles), next, magnitudes_of(pieces));
    }
    if constexpr (kIsTile) {
      ColumnMaximum<kIsBf16> largest;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest.add(pieces[i]);
      const Apply<kDivides> one[1] = {scale_tile<kFormat>(largest, columns, at, shared)};
      if (columns.codes != nullptr) store_codes<kFormat, Scales::kOne, kDivides>(pieces, columns, at, one);
      if (columns.turned != nullptr) store_turned<kFormat, true, kTile>(pieces, columns, x.columns, at, shared.turned, one);
      __syncthreads();
    } else {
      code_tile<kFormat, kHints>(pieces, rows, columns, x.columns, table, at, shared);
    }
  }
}

// Programmatic dependent launch, on the current device.
inline bool can_start_early() {
  int device = 0, major = 0;
  (void)cudaGetDevice(&device), (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9;
}

template <ElementFormat kFormat, bool kDivides, int kBlock, bool kIsTile>
void launch(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  const std::int64_t units = (x.rows / kTile + x.groups) * ((x.columns + kTile - 1) / kTile);
  int ctas_per_sm = x.is_bf16 ? kCtasPerSm<kBlock, true, kDivides> : kCtasPerSm<kBlock, false, kDivides>;
  auto kernel = x.is_bf16 ? quantize_tiles<kFormat, kDivides, kBlock, kIsTile, true, false> : quantize_tiles<kFormat, kDivides, kBlock, kIsTile, false, false>;
  bool starts_early = false;  // not with two CTAs an SM: the next launch's would take the room that they leave (measured)
  if constexpr (kCanHint<kBlock, kDivides, kIsTile>) {
    if (x.is_bf16 && rows.codes != nullptr && columns.turned != nullptr) {
      if (x.columns >= kWideRow) {
        kernel = quantize_tiles<kFormat, kDivides, kBlock, kIsTile, true, true>, starts_early = can_start_early();
      } else {
        ctas_per_sm = 2;
      }
    }
  }
  const std::size_t bytes = kTile * kTile * (x.is_bf16 ? 2u : 4u) + GroupTable::bytes(x.groups, kBlock == 128 ? 1 : 2);
  allow_shared(kernel, bytes + sizeof(TileShared<kBlock, kDivides>));
  launch_kernel(kernel, persistent_ctas(units, ctas_per_sm), kThreads, bytes, stream, starts_early, x, rows, columns);
}

template <ElementFormat kFormat>
void launch_tiles_of(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  const bool divides = columns.scale == ScaleFormat::kF32;
  if (columns.block_columns == 128) {
    divides ? launch<kFormat, true, 128, true>(x, rows, columns, stream) : launch<kFormat, false, 128, true>(x, rows, columns, stream);
  } else if (columns.block_rows == 128) {
    divides ? launch<kFormat, true, 128, false>(x, rows, columns, stream) : launch<kFormat, false, 128, false>(x, rows, columns, stream);
  } else {
    divides ? launch<kFormat, true, 32, false>(x, rows, columns, stream) : launch<kFormat, false, 32, false>(x, rows, columns, stream);
  }
}

}  // namespace

}  // namespace waybill::cuda
