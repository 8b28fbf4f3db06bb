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

// The slots of a row that will be read next: fetched while the row before it moves. begin = end: none.
struct NextRow {
  int begin = 0, end = 0;
  RowSlots slots{0, 1.0f, 0};
};
__device__ __forceinline__ NextRow fetch_row(const ExchangeShape& shape, const RankCall& call, std::int64_t row, int R, bool weighted) {
  NextRow next;
  if (row >= R) return next;
  const int* offsets = handle_part<int>(call, shape.h_row_slot_offsets) + row;
  next.begin = offsets[0], next.end = offsets[1];
  next.slots = load_slots(shape, call, next.begin, next.end, weighted);
  return next;
}

// visit(s) for every padding slot, by the warps of the grid.
template <class Visit>
__device__ __forceinline__ void for_padding(const ExchangeShape& shape, const RankCall& call, int num_warps, int warp, const Visit& visit) {
  if (shape.alignment == 1) return;
  const int* counts = handle_part<int>(call, shape.h_expert_counts);
  const int* offsets = handle_part<int>(call, shape.h_expert_offsets);
  if (header_of(call)->R == 0) return;
  for (int e = warp; e < shape.L; e += num_warps) {
    for (int s = offsets[e] + counts[e]; s < offsets[e + 1]; ++s) visit(s);
  }
}

}  // namespace waybill::cuda
