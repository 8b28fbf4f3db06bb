// SPDX-License-Identifier: Apache-2.0
// The parts of a received row for sum_ring.cuh: its slots in expert order y, up to kMaxRingSlots (64) of them, two a lane.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/sum_ring.cuh"

namespace waybill::cuda {

// The slots of a received row, row order: [x, y).
__device__ __forceinline__ int2 slots_of_row(const ExchangeShape& shape, const RankCall& call, int row) {
  const int* offsets = handle_part<int>(call, shape.h_row_slot_offsets) + row;
  return row >= 0 ? int2{offsets[0], offsets[1]} : int2{0, 0};
}

// What an order says of its number n: the result row that it stands for (-1: none), and that one's slots.
// Rows in the order of the handle.
struct RowsInOrder {
  int R;
  __device__ __forceinline__ int operator()(int row) const { return row < R ? row : -1; }
  __device__ __forceinline__ int2 slots(const ExchangeShape& shape, const RankCall& call, int row) const { return slots_of_row(shape, call, (*this)(row)); }
};

// Tokens of the only rank: the slots of a token's row, none where it went nowhere.
struct TokensInOrder {
  int T;
  __device__ __forceinline__ int operator()(int t) const { return t < T ? t : -1; }
  __device__ __forceinline__ int2 slots(const ExchangeShape& shape, const RankCall& call, int t) const {
    if (t >= T) return int2{0, 0};
    const RowEntry entry = handle_part<RowEntry>(call, shape.h_entries)[t];
    return entry.rank >= 0 ? int2{entry.slot_begin, entry.slot_begin + entry.num_slots} : int2{0, 0};
  }
};

// Rows chunk by chunk: a chunk of every source, the other ranks' first, then the next chunk. `order` counts as if all chunks were full: some numbers
// stand for no row (-1). offsets [P + 1] in shared memory.
struct RowsByChunk {
  const int* offsets;
  int P, rank, shift, count;
  __device__ __forceinline__ int source(int order) const {
    const int source = (order >> shift) % P + rank + 1;
    return source >= P ? source - P : source;
  }
  __device__ __forceinline__ int chunk(int order) const { return (order >> shift) / P; }
  __device__ __forceinline__ int operator()(int order) const {
    if (order >= count) return -1;
    const int s = source(order), row = offsets[s] + (chunk(order) << shift) + (order & ((1 << shift) - 1));
    return row < offsets[s + 1] ? row : -1;
  }
  __device__ __forceinline__ int2 slots(const ExchangeShape& shape, const RankCall& call, int order) const { return slots_of_row(shape, call, (*this)(order)); }
  __device__ __forceinline__ int rows_in(int source, int chunk) const { return min(1 << shift, offsets[source + 1] - offsets[source] - (chunk << shift)); }
};

// Bounds of a row are read three items ahead of their use, positions two, weights one.
template <class Order, bool kWeighted>
class SlotsAhead {
 public:
  int num = 0;
  int position[2] = {0, 0};
  float weight[2] = {1.0f, 1.0f};

  __device__ __forceinline__ SlotsAhead(const ExchangeShape& shape, const RankCall& call, const Order& order, const RowItems& items)
      : shape_(shape), call_(call), order_(order) {
    read_bounds(items, items.first);
    shift(items, items.first + items.step);
    shift(items, items.first + 2 * items.step);
  }
  // num, position and weight become those of `item`.
  __device__ __forceinline__ void take(const RowItems& items, int item) {
    num = num0_;
#pragma unroll
    for (int i = 0; i < 2; ++i) position[i] = position0_[i], weight[i] = weight0_[i];
    shift(items, item + 3 * items.step);
  }

 private:
  __device__ __forceinline__ void read_bounds(const RowItems& items, int item) {
    const int2 slots = item < items.count ? order_.slots(shape_, call_, items.row(item)) : int2{0, 0};
    begin2_ = slots.x, end2_ = slots.y;
  }
  __device__ __forceinline__ void shift(const RowItems& items, int item) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    num0_ = num1_;
    num1_ = end2_ - begin2_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      position0_[i] = position1_[i];
      if (kWeighted && i * 32 + lane < num0_) weight0_[i] = handle_part<float>(call_, shape_.h_slot_weight)[position0_[i]];
      if (i * 32 + lane < num1_) position1_[i] = handle_part<int>(call_, shape_.h_slot_position)[begin2_ + i * 32 + lane];
    }
    read_bounds(items, item);
  }

  const ExchangeShape& shape_;
  const RankCall& call_;
  const Order& order_;
  int num0_ = 0, position0_[2] = {0, 0};
  float weight0_[2] = {1.0f, 1.0f};
  int num1_ = 0, position1_[2] = {0, 0};
  int begin2_ = 0, end2_ = 0;
};

// y: slots of `stride` bytes each.
template <class Order>
class SlotParts {
 public:
  __device__ __forceinline__ SlotParts(const ExchangeShape& shape, const RankCall& call, const Order& order, const RowItems& items, const void* y,
                                       std::int64_t stride)
      : ahead_(shape, call, order, items), y_(static_cast<const unsigned char*>(y)), stride_(stride) {}
  __device__ __forceinline__ int take(const RowItems& items, int item, const unsigned char* (&row)[2]) {
    ahead_.take(items, item);
    row[0] = y_ + ahead_.position[0] * stride_, row[1] = y_ + ahead_.position[1] * stride_;
    return ahead_.num;
  }

 private:
  SlotsAhead<Order, false> ahead_;
  const unsigned char* y_;
  std::int64_t stride_;
};

// z: rows of `stride` elements. Finish(item) is called when an item is written.
template <class Order, bool kWeighted, class Finish>
class SlotSums {
 public:
  __device__ __forceinline__ SlotSums(const ExchangeShape& shape, const RankCall& call, const Order& order, const RowItems& items, void* z, std::int64_t stride,
                                      const Finish& finish)
      : ahead_(shape, call, order, items), order_(order), z_(z), stride_(stride), finish_(finish) {}
  __device__ __forceinline__ int take(const RowItems& items, int item) {
    ahead_.take(items, item);
    return ahead_.num;
  }
  __device__ __forceinline__ float weight(int d) const { return __shfl_sync(ptx::kFullWarp, d < 32 ? ahead_.weight[0] : ahead_.weight[1], d & 31); }
  template <class Out>
  __device__ __forceinline__ Out* out(const RowItems& items, int item) const {
    const int row = order_(items.row(item));
    return row < 0 ? nullptr : static_cast<Out*>(z_) + row * stride_;
  }
  __device__ __forceinline__ void done(const RowItems& items, int item) const { finish_(items, item); }

 private:
  SlotsAhead<Order, kWeighted> ahead_;
  const Order& order_;
  void* z_;
  std::int64_t stride_;
  const Finish& finish_;
};

}  // namespace waybill::cuda
