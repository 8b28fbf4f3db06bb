// SPDX-License-Identifier: Apache-2.0
// What the two launches of the portable quantiser share: any format, width, alignment and block; no speed claim.
#pragma once

#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

inline constexpr int kThreads = 256, kGrid = 1056;

// The block table of a run-time block height: the kernels below count blocks of a group by themselves.
__device__ int blocks_of(int rows, int block_rows) { return (rows + block_rows - 1) / block_rows; }

// first_block [groups + 1] in shared memory, by thread 0: a cold path.
__device__ void count_blocks(const GroupTable& table, int groups, int block_rows, int* first_block) {
  if (threadIdx.x == 0) {
    int blocks = 0;
    for (int g = 0; g < groups; ++g) {
      first_block[g] = blocks;
      blocks += blocks_of(table.end_row(g) - table.first_row(g), block_rows);
    }
    first_block[groups] = blocks;
  }
  __syncthreads();
}

}  // namespace
}  // namespace waybill::cuda
