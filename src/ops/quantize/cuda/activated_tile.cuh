// SPDX-License-Identifier: Apache-2.0
// How the tile kernels on activations get a tile of gate, up and da: by asynchronous copies into slots of shared memory, 32 KiB each, of which every thread
// reads what it asked for itself.
#pragma once

#include "ops/quantize/cuda/activated_piece.cuh"
#include "ops/quantize/cuda/quantize_tile.cuh"

namespace waybill::cuda {
namespace {

inline constexpr int kSlot = kTile * kTile / 8;  // of 16 bytes

// Rows and columns that are not there come as zeros. may_start: have_left() of what was there.
__device__ __forceinline__ void start_slot(const std::uint16_t* data, std::int64_t stride, int first_column, const Place& at, uint4* slot, bool may_start) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(slot + threadIdx.x));
  const bool has_column = may_start && at.column() < at.column_end;
  const std::uint16_t* from = data + (has_column ? at.row(0) * stride + first_column + at.column() : 0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool is_there = has_column && at.has_row(i);
    ptx::copy_async_16(to + i * kThreads * 16, is_there ? from : data, is_there);
    from += stride;
  }
}

// magnitudes: magnitudes_of() all that the thread has read from the slots, so that it has left them.
__device__ __forceinline__ bool have_left(std::uint32_t magnitudes) {
  asm volatile("" : "+r"(magnitudes));
  return magnitudes < 0x80000000u;
}

// The weights of a thread's rows, asked for before the copies are waited for.
__device__ __forceinline__ void load_weights(const ActivatedSource& source, const Place& at, float (&weights)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i] = at.has_row(i) && at.column() < at.column_end ? weight_of(source, at.row(i)) : 1.0f;
}

__device__ __forceinline__ uint4 slot_piece(const uint4* slots, int slot, int i) { return slots[slot * kSlot + i * kThreads + static_cast<int>(threadIdx.x)]; }

}  // namespace
}  // namespace waybill::cuda
