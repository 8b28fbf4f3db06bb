// SPDX-License-Identifier: Apache-2.0
// Kernels of the designs that send a row once per expert (loop, padded, capacity). A launch serves one rank; they wait for no peer: barriers between
// them are launches of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "fabric/cuda_local/device_peers.h"

namespace waybill::cuda::moe_bench {

enum class SlotLayout : int { kTight = 0, kPadded = 1, kCapacity = 2 };

struct SlotShape {
  std::int32_t P, E, L, K, T, H;
  SlotLayout layout;
  std::int32_t longest;   // padded: rows of a local expert's block
  std::int32_t capacity;  // capacity: rows of a source's block of a local expert
  // Windows.
  std::uint64_t counts;            // [P][E] i32: routes of each source for each expert
  std::uint64_t rows, y, dy;       // [capacity of the buffers, H] bf16; y also holds the gradient of rows
  std::uint64_t weight, d_weight;  // [capacity of the buffers] f32
};

// Routes sorted by expert, stable: order [T K] i32 of route numbers, sorted [T K] u16 ids. temp null: its size to temp_bytes.
void sort_routes(const std::int16_t* ids, std::uint16_t* sorted, const std::int32_t* numbers, std::int32_t* order, std::int64_t count, int end_bit, void* temp,
                 std::size_t& temp_bytes, cudaStream_t stream);
void launch_iota(std::int32_t* numbers, std::int64_t count, cudaStream_t stream);
// offsets [E + 1] of the sorted ids (-1 sorts last and is left out); the counts go to every peer's window.
void launch_slot_count(const DevPeers& peers, const SlotShape& s, const std::uint16_t* sorted, std::int32_t* offsets, cudaStream_t stream);
// From all counts: begin [E], where this rank's rows of an expert start at the expert's rank; local_offsets [L + 1] and local_rows [P][L] of this rank as a
// receiver.
void launch_slot_places(const DevPeers& peers, const SlotShape& s, std::int32_t* begin, std::int32_t* local_offsets, std::int32_t* local_rows,
                        cudaStream_t stream);
// Rows x [T, H] bf16 to window `to`; with weights [T, K]: also them, and place [T K] (-1: dropped or no route).
void launch_slot_push(const DevPeers& peers, const SlotShape& s, const std::uint16_t* sorted, const std::int32_t* order, const std::int32_t* offsets,
                      const std::int32_t* begin, const void* x, const float* weights, std::int32_t* place, std::uint64_t to, int num_sms, cudaStream_t stream);
// Rows of the blocks that no source fills: rows 0, weight 0.
void launch_slot_clear(const DevPeers& peers, const SlotShape& s, const std::int32_t* local_rows, std::uint64_t to, bool with_weight, int num_sms,
                       cudaStream_t stream);
// out [T, H] bf16 = (addend [T, H] f32 or nothing) + the token's rows of `from`, in order k.
void launch_slot_pull(const DevPeers& peers, const SlotShape& s, const std::int16_t* ids, const std::int32_t* place, std::uint64_t from, const float* addend,
                      void* out, int num_sms, cudaStream_t stream);
// d_weights [T, K] from the slots' d_weight.
void launch_slot_values(const DevPeers& peers, const SlotShape& s, const std::int16_t* ids, const std::int32_t* place, float* d_weights, cudaStream_t stream);

}  // namespace waybill::cuda::moe_bench
