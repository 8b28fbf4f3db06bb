// SPDX-License-Identifier: Apache-2.0
// Where each route's row goes: counts from sorted ids, then places from everybody's counts.
#include "bench/cuda/moe/slot_kernels.h"

namespace waybill::cuda::moe_bench {
namespace {

// A thread an expert: its first position in the sorted ids by bisection.
__global__ void slot_count(const __grid_constant__ DevPeers peers, const SlotShape s, const std::uint16_t* __restrict__ sorted, std::int32_t* offsets) {
  const int e = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), n = s.T * s.K;
  if (e > s.E) return;
  const auto first_at_least = [&](int id) {
    int low = 0, high = n;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (sorted[middle] < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int begin = first_at_least(e);
  offsets[e] = begin;
  if (e == s.E) return;
  const int count = first_at_least(e + 1) - begin;
  for (int p = 0; p < s.P; ++p) peers.at<std::int32_t>(p, s.counts)[peers.rank * s.E + e] = count;
}

constexpr int kThreads = 1024;

// One CTA. A thread takes consecutive experts; rows before its first by a scan over the CTA, started anew at every rank's first expert.
__global__ void __launch_bounds__(kThreads)
    slot_places(const __grid_constant__ DevPeers peers, const SlotShape s, std::int32_t* begin, std::int32_t* local_offsets, std::int32_t* local_rows) {
  __shared__ std::int32_t sums[kThreads + 1];
  const auto* counts = peers.at<std::int32_t>(peers.rank, s.counts);
  const int t = static_cast<int>(threadIdx.x), share = (s.L + kThreads - 1) / kThreads;
  for (int p = 0; p < s.P; ++p) {
    const auto rows_of = [&](int l) {  // the block of a local expert
      if (s.layout == SlotLayout::kPadded) return s.longest;
      if (s.layout == SlotLayout::kCapacity) return s.P * s.capacity;
      int sum = 0;
      for (int source = 0; source < s.P; ++source) sum += counts[source * s.E + p * s.L + l];
      return sum;
    };
    int mine = 0;
    for (int l = t * share; l < min(s.L, (t + 1) * share); ++l) mine += rows_of(l);
    __syncthreads();
    if (t == 0) sums[0] = 0;
    sums[t + 1] = mine;
    __syncthreads();
    for (int d = 1; d < kThreads; d *= 2) {
      const int other = t + 1 > d ? sums[t + 1 - d] : 0;
      __syncthreads();
      sums[t + 1] += other;
      __syncthreads();
    }
    int at = sums[t];
    for (int l = t * share; l < min(s.L, (t + 1) * share); ++l) {
      const int e = p * s.L + l;
      if (p == peers.rank) local_offsets[l] = at;
      int before = 0;
      for (int source = 0; source < s.P; ++source) {
        if (source == peers.rank) begin[e] = at + (s.layout == SlotLayout::kCapacity ? source * s.capacity : before);
        before += counts[source * s.E + e];
        if (p == peers.rank) local_rows[source * s.L + l] = counts[source * s.E + e];
      }
      at += rows_of(l);
    }
    if (p == peers.rank && t == kThreads - 1) local_offsets[s.L] = sums[kThreads];
  }
}

}  // namespace

void launch_slot_count(const DevPeers& peers, const SlotShape& s, const std::uint16_t* sorted, std::int32_t* offsets, cudaStream_t stream) {
  slot_count<<<static_cast<unsigned>((s.E + 64) / 64), 64, 0, stream>>>(peers, s, sorted, offsets);
}

void launch_slot_places(const DevPeers& peers, const SlotShape& s, std::int32_t* begin, std::int32_t* local_offsets, std::int32_t* local_rows,
                        cudaStream_t stream) {
  slot_places<<<1, kThreads, 0, stream>>>(peers, s, begin, local_offsets, local_rows);
}

}  // namespace waybill::cuda::moe_bench
