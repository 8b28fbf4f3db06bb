// SPDX-License-Identifier: Apache-2.0
// Kernels of older designs of the exchange, as a careful engineer would have written them: what the benchmark exchange_negative.cc measures
// beside ours. Nothing in src depends on them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

inline constexpr int kMaxOldRanks = 8;
inline constexpr int kMapTile = 64;  // tokens

// Routing by dense byte maps [T, E] of all ranks: gathered, then scanned for rows and for the slots of this rank's experts.
struct DenseMap {
  std::int32_t P, rank, T, E;
  const std::uint8_t* own;               // [T, E]
  std::uint8_t* gathered[kMaxOldRanks];  // of each rank, as this GPU sees it: [P][T, E]
  std::uint32_t* hits;                   // [P * T] one bit a destination rank
  std::int32_t* row;                     // [P destinations][P * T] place of a token among the rows of a destination
  std::int32_t* tile_counts;             // [L][P * T / kMapTile]
  std::int32_t* expert_offsets;          // [L + 1]
  std::int32_t* slot_row;                // [S]
};
void launch_dense_map_push(const DenseMap& m, cudaStream_t stream);
void launch_dense_map_plan(const DenseMap& m, cudaStream_t stream);

// How a row's slots are found in its map [R, L] (position of the slot in expert order, -1: none).
enum class SlotVisit { kEvery, kPruned, kSetBits };
void launch_slot_map(const std::int32_t* expert_offsets, const std::int32_t* slot_row, std::int32_t R, std::int32_t L, std::int32_t* map, cudaStream_t stream);
void launch_map_permute(SlotVisit visit, const std::int32_t* map, std::int32_t R, std::int32_t L, const void* rows, void* y, std::int32_t row_bytes,
                        cudaStream_t stream);
void launch_map_unpermute(SlotVisit visit, const std::int32_t* map, std::int32_t R, std::int32_t L, const void* y, void* z, std::int32_t row_bytes,
                          cudaStream_t stream);  // bf16

// Sums of a row's slots by atomics, in no fixed order.
struct AtomicCombine {
  const std::int32_t* slot_row;   // [S_padded], -1: padding
  const std::int32_t* num_slots;  // on the device: S_padded
  std::int32_t R, H;
  const void* y;  // bf16 [S_padded, H]
  float* sums;    // [R, H], scratch
  void* z;        // bf16 [R, H]
};
void launch_atomic_combine(const AtomicCombine& c, cudaStream_t stream);

// One remote payload for every selected expert: x [T] rows straight to expert order at their ranks.
struct DirectTarget {
  std::int32_t rank, position;  // rank -1: no route
};
struct DirectWrite {
  std::int32_t T, K, row_bytes;
  const DirectTarget* target;      // [T, K]
  unsigned char* y[kMaxOldRanks];  // of each rank
};
void launch_direct_write(const DirectWrite& w, const void* x, int ctas, cudaStream_t stream);

}  // namespace waybill::cuda
