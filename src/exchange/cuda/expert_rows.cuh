// SPDX-License-Identifier: Apache-2.0
// What the kernels between rows and expert order share: the slots of a row, and the padding of the experts.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {

// Up to 32 slots of a row, one a lane.
struct RowSlots {
  int position;
  float weight;
  int num;
};

__device__ __forceinline__ RowSlots load_slots(const ExchangeShape& shape, const RankCall& call, int begin, int end, bool weighted) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  RowSlots slots{0, 1.0f, min(32, end - begin)};
  if (lane < slots.num) {
    slots.position = handle_part<int>(call, shape.h_slot_position)[begin + lane];
    if (weighted) slots.weight = handle_part<float>(call, shape.h_slot_weight)[slots.position];
  }
  return slots;
}

// Reads a row's bounds two items ahead of their use and its slots one ahead, so that neither is waited for. kEntry: its entry, too.
template <bool kEntry>
struct RowAhead {
  int begin, end;            // of the row to be moved
  int entry;                 // RowMeta::entry, token * D + index
  RowSlots slots;            // its first 32 slots
  int next_begin, next_end;  // of the row behind it
  int next_entry;

  // row: none where it is negative or not below R.
  __device__ __forceinline__ void bounds(const ExchangeShape& shape, const RankCall& call, int row, int R) {
    const int* offsets = handle_part<int>(call, shape.h_row_slot_offsets) + row;
    const bool is_row = row >= 0 && row < R;
    next_begin = is_row ? offsets[0] : 0, next_end = is_row ? offsets[1] : 0;
    if (kEntry) next_entry = is_row ? handle_part<int>(call, shape.h_row_entry)[row] : 0;
  }
  __device__ __forceinline__ void start(const ExchangeShape& shape, const RankCall& call, int row, int row_behind, int R, bool weighted) {
    bounds(shape, call, row, R);
    advance(shape, call, row_behind, R, weighted);
  }
  // The row behind becomes the one to be moved.
  __device__ __forceinline__ void advance(const ExchangeShape& shape, const RankCall& call, int row_behind, int R, bool weighted) {
    begin = next_begin, end = next_end, entry = kEntry ? next_entry : 0;
    slots = load_slots(shape, call, begin, end, weighted);
    bounds(shape, call, row_behind, R);
  }
};

// visit(s) for every padding slot, by the warps of the grid.
template <class Visit>
__device__ __forceinline__ void for_padding(const ExchangeShape& shape, const RankCall& call, int num_warps, int warp, const Visit& visit) {
  const HandleHeader& header = *header_of(call);
  if (header.S_padded == header.S) return;
  const int* counts = handle_part<int>(call, shape.h_expert_counts);
  const int* offsets = handle_part<int>(call, shape.h_expert_offsets);
  for (int e = warp; e < shape.L; e += num_warps) {
    for (int s = offsets[e] + counts[e]; s < offsets[e + 1]; ++s) visit(s);
  }
}

}  // namespace waybill::cuda
