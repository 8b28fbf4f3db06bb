// SPDX-License-Identifier: Apache-2.0
// The groups of a tensor of rows, in shared memory: first rows, and the first block of each group where blocks start anew at every group.
#pragma once

#include "core/cuda/ptx.cuh"
#include "ops/quantize/cuda/quantize_params.h"

namespace waybill::cuda {

// Lets a kernel have more than 48 KiB of shared memory where its tables need it, and as many CTAs an SM as fit.
template <class Kernel>
void allow_shared(Kernel kernel, std::size_t bytes) {
  if (bytes <= 48 * 1024) return;
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 192 * 1024);
  (void)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

class GroupTable {
 public:
  // Bytes of shared memory for `tables` block tables beside the rows.
  static std::size_t bytes(int groups, int tables) { return static_cast<std::size_t>((groups + 1) * (1 + tables)) * 4; }

  // All threads of the CTA, at most 1024; kB1, kB2: rows of a block of the first and second table, 0 = no such table.
  template <int kB1, int kB2 = 0>
  __device__ void build(const WideRows& x, int* memory) {
    groups_ = x.groups, first_ = memory, blocks_[0] = memory + groups_ + 1, blocks_[1] = memory + 2 * (groups_ + 1);
    const int limit = static_cast<int>(x.rows), thread = static_cast<int>(threadIdx.x);
    if (x.offsets == nullptr) {
      if (thread == 0) {
        first_[0] = 0, first_[1] = limit;
        if constexpr (kB1 > 0) blocks_[0][0] = 0, blocks_[0][1] = (limit + kB1 - 1) / kB1;
        if constexpr (kB2 > 0) blocks_[1][0] = 0, blocks_[1][1] = (limit + kB2 - 1) / kB2;
      }
      __syncthreads();
      return;
    }
    bool is_broken = false;
    for (int g = thread; g <= groups_; g += static_cast<int>(blockDim.x)) {
      const int at = __ldg(x.offsets + g);
      is_broken |= at < 0 || at > limit || (g == 0 && at != 0);
      first_[g] = min(max(at, 0), limit);
    }
    __syncthreads();
    // The rest by one warp: 32 groups at a time.
    if (thread < 32) {
      int base1 = 0, base2 = 0, largest = 0;
      for (int begin = 0; begin < groups_; begin += 32) {
        const int g = begin + thread;
        const int low = g < groups_ ? first_[g] : limit, high = g < groups_ ? first_[g + 1] : limit, rows = g < groups_ ? max(high - low, 0) : 0;
        is_broken |= g < groups_ && (high < low || low < largest);
        largest = max(largest, low);
        if constexpr (kB1 > 0) base1 = scan<kB1>(blocks_[0], g, rows, base1, thread);
        if constexpr (kB2 > 0) base2 = scan<kB2>(blocks_[1], g, rows, base2, thread);
      }
      if (thread == 0) {
        if constexpr (kB1 > 0) blocks_[0][groups_] = base1;
        if constexpr (kB2 > 0) blocks_[1][groups_] = base2;
      }
    }
    if (is_broken && blockIdx.x == 0 && x.status != nullptr) atomicOr(&x.status->flags, static_cast<unsigned>(kStatusBadOffsets));
    __syncthreads();
  }

  __device__ int rows() const { return first_[groups_]; }
  __device__ int first_row(int group) const { return first_[group]; }
  __device__ int end_row(int group) const { return max(first_[group + 1], first_[group]); }
  template <int kTable = 0>
  __device__ int num_blocks() const {
    return blocks_[kTable][groups_];
  }
  template <int kTable = 0>
  __device__ int first_block(int group) const {
    return blocks_[kTable][group];
  }
  __device__ int group_of_row(int row) const { return find(first_, row); }
  template <int kTable = 0>
  __device__ int group_of_block(int block) const {
    return find(blocks_[kTable], block);
  }

 private:
  // The last group that starts at or before `at`: empty groups share their start with the next.
  __device__ int find(const int* starts, int at) const {
    int low = 0, high = groups_;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= at ? low : high) = middle;
    }
    return low;
  }
  // Writes the first blocks of up to 32 groups from g - lane on; returns the first block behind them.
  template <int kBlock>
  __device__ int scan(int* table, int g, int rows, int base, int lane) const {
    const int own = (rows + kBlock - 1) / kBlock;
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(ptx::kFullWarp, end, step);
      if (lane >= step) end += below;
    }
    if (g < groups_) table[g] = base + end - own;
    return base + __shfl_sync(ptx::kFullWarp, end, 31);
  }

  int groups_ = 0;
  int *first_ = nullptr, *blocks_[2] = {nullptr, nullptr};
};

}  // namespace waybill::cuda
