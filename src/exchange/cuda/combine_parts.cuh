// SPDX-License-Identifier: Apache-2.0
// The parts of a token for sum_ring.cuh: its partials at the ranks that made them, in rank order, then the row of call.d
// (a part that crossed no link, of the partials' type), where it is given. D <= 32: one a lane.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/exchange_signal.cuh"
#include "exchange/cuda/sum_ring.cuh"

namespace waybill::cuda {

__device__ __forceinline__ RowEntry entry_of_lane(const ExchangeShape& shape, const RankCall& call, int t) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return t < call.T && lane < shape.D ? handle_part<RowEntry>(call, shape.h_entries)[static_cast<std::int64_t>(t) * shape.D + lane] : RowEntry{-1, 0, 0, 0};
}

// Partials of one `row_bytes` each in window `window` of their rank. kInChunks: waits for the chunk of each before it gives the row away; base [P] in
// shared memory: this rank's first row at each rank.
template <bool kInChunks>
class CombineParts {
 public:
  __device__ __forceinline__ CombineParts(const ExchangeParams& q, const RankCall& call, int rank, std::uint64_t window, int row_bytes, const RowItems& items,
                                          const int* base = nullptr, std::uint32_t epoch = 0)
      : q_(q),
        call_(call),
        window_(window),
        base_(base),
        rank_(rank),
        row_bytes_(row_bytes),
        epoch_(epoch),
        next_(entry_of_lane(q.shape, call, items.row(items.first))) {}

  __device__ __forceinline__ int take(const RowItems& items, int item, const unsigned char* (&row)[2]) {
    const RowEntry entry = next_;
    next_ = entry_of_lane(q_.shape, call_, items.row(item + items.step));
    if (entry.rank >= 0) row[0] = q_.window<unsigned char>(entry.rank, window_) + static_cast<std::int64_t>(entry.row) * row_bytes_;
    if constexpr (kInChunks) {
      bool ok = true;
      if (entry.rank >= 0) ok = await_chunk(q_, rank_, kChunkPartials, entry.rank, (entry.row - base_[entry.rank]) >> q_.shape.chunk_shift, epoch_);
      if (!__all_sync(ptx::kFullWarp, ok ? 1 : 0)) {
        if (!ok) record_lost(q_, rank_, call_);
        return -1;
      }
      ptx::fence_async_proxy_all();  // the partials were written by ordinary stores, and are read by the copy engine
      __syncwarp();
    }
    const int num = __popc(__ballot_sync(ptx::kFullWarp, entry.rank >= 0)), lane = static_cast<int>(threadIdx.x) & 31;
    if (call_.d == nullptr) return num;
    const unsigned char* own = static_cast<const unsigned char*>(call_.d) + items.row(item) * static_cast<std::int64_t>(row_bytes_);
    if (num < 32 && lane == num) row[0] = own;  // a lane without a partial
    if (num == 32 && lane == 0) row[1] = own;
    return num + 1;
  }

 private:
  const ExchangeParams& q_;
  const RankCall& call_;
  std::uint64_t window_;
  const int* base_;
  int rank_, row_bytes_;
  std::uint32_t epoch_;
  RowEntry next_;  // entries are read one item ahead of their use
};

// The sums of a rank's tokens: out [T, H], call.c.
class CombineSums {
 public:
  __device__ __forceinline__ CombineSums(const ExchangeShape& shape, const RankCall& call, const CombineArgs& args, const RowItems& items)
      : shape_(shape), call_(call), args_(args), next_(entry_of_lane(shape, call, items.row(items.first)).rank) {}
  __device__ __forceinline__ int take(const RowItems& items, int item) {
    const int num = __popc(__ballot_sync(ptx::kFullWarp, next_ >= 0)) + (call_.d != nullptr ? 1 : 0);
    next_ = entry_of_lane(shape_, call_, items.row(item + items.step)).rank;
    return num;
  }
  __device__ __forceinline__ float weight(int) const { return 1.0f; }
  template <class Out>
  __device__ __forceinline__ Out* out(const RowItems& items, int item) const {
    return static_cast<Out*>(call_.c) + items.row(item) * args_.out_stride;
  }
  __device__ __forceinline__ void done(const RowItems&, int) const {}

 private:
  const ExchangeShape& shape_;
  const RankCall& call_;
  const CombineArgs& args_;
  int next_;
};

// out = 0: the handle is invalid, or a peer was lost before it could be read. CTA `cta` of `ctas`.
template <class Out>
__device__ __forceinline__ void clear_out(const CombineArgs& args, const RankCall& call, int cta, int ctas) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int t = static_cast<int>(threadIdx.x >> 5) * ctas + cta; t < call.T; t += ctas * static_cast<int>(blockDim.x / 32)) {
    const float zeros[8] = {};
    for (int h = lane * 8; h < args.H; h += 256) store_values<Out>(static_cast<Out*>(call.c) + t * args.out_stride + h, zeros);
  }
}

}  // namespace waybill::cuda
