// SPDX-License-Identifier: Apache-2.0
// Offsets of groups from their sizes (CTA 0) and zeros in the rows past the last group (all CTAs, each of which sums the sizes by itself).
// 256 threads a CTA. Bytes moved: 4 a size and CTA, 4 an offset, the rows past the last group.
#include <algorithm>

#include "ops/gemm/cuda/group_rows.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Sum over the CTA of one value a thread, and the sum of the threads before this one.
__device__ __forceinline__ long long scan(long long value, long long& before) {
  __shared__ long long of_warp[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  long long sum = value;
  for (int step = 1; step < 32; step <<= 1) {
    const long long other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // of_warp of the former round has been read
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  long long base = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) base += of_warp[w];
    total += of_warp[w];
  }
  before = base + sum - value;
  return total;
}

// Writes the offsets in CTA 0; returns the end of the last group.
__device__ __forceinline__ std::int64_t end_of_groups(const GroupRows& p) {
  if (p.sizes == nullptr) return min(max(p.offsets[p.groups], 0), p.S);
  long long sum = 0;
  for (int first = 0; first < p.groups; first += kThreads) {
    const int g = first + static_cast<int>(threadIdx.x);
    const long long size = g < p.groups ? max(p.sizes[g], 0) : 0;
    long long before = 0;
    const long long total = scan(size, before);
    if (blockIdx.x == 0 && g < p.groups) p.offsets[g + 1] = static_cast<std::int32_t>(min(sum + before + size, static_cast<long long>(p.S)));
    sum += total;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[0] = 0;
  return min(sum, static_cast<long long>(p.S));
}

__global__ void __launch_bounds__(kThreads) group_rows(const GroupRows p) {
  const std::int64_t end = end_of_groups(p);
  if (p.rows == nullptr) return;
  unsigned char* const begin = p.rows + end * p.row_bytes;
  unsigned char* const stop = p.rows + static_cast<std::int64_t>(p.S) * p.row_bytes;
  // Whole 16-byte words, and single bytes before the first and after the last.
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const auto head = static_cast<std::int64_t>((16 - (address & 15)) & 15);
  unsigned char* const first = begin + (head < stop - begin ? head : stop - begin);
  const std::int64_t words = (stop - first) / 16, thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (std::int64_t i = thread; i < words; i += static_cast<std::int64_t>(gridDim.x) * kThreads) reinterpret_cast<uint4*>(first)[i] = make_uint4(0, 0, 0, 0);
  if (blockIdx.x != 0 || threadIdx.x >= 16) return;
  if (begin + threadIdx.x < first) begin[threadIdx.x] = 0;
  if (first + words * 16 + threadIdx.x < stop) first[words * 16 + threadIdx.x] = 0;
}

}  // namespace

void launch_group_rows(const GroupRows& p, int num_sms, cudaStream_t stream) {
  const std::int64_t bytes = p.rows != nullptr ? p.row_bytes * p.S : 0;
  const auto ctas = static_cast<unsigned>(std::clamp<std::int64_t>(bytes / (kThreads * 16), 1, num_sms));
  group_rows<<<ctas, kThreads, 0, stream>>>(p);
}

}  // namespace waybill::cuda
