// SPDX-License-Identifier: Apache-2.0
// What the product of coded operands gets that turns them into bf16 beside itself (widened_sm90.cuh). Rows of the ragged operand and of a group's weights
// are counted in blocks of 256 that start anew at each group. The bf16 copies are rings: block b of the rows lies in slot b % ring_blocks, group g's weights
// in slot g % ring_groups; who fills a slot waits until the product has read what was there.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/gemm/cuda/grouped_params.h"
#include "ops/gemm/widened_room.h"

namespace waybill::cuda {

using detail::kWidenedRows;  // of a block; those of a pair of row tiles
inline constexpr GemmTile kWidenedTile{256, 4, 2, 2};
inline constexpr int kWidenedBand = 8;

struct CodedSource {
  const std::uint8_t* codes;
  std::int64_t code_stride;  // bytes
  const std::uint8_t* scales;
  std::int64_t scale_stride;
  const float* group_scales;  // NVFP4
  std::uint16_t* wide;        // the ring
};

struct WidenedParams {
  GroupedParams product;  // over the rings; its offsets are progress.offsets
  CodedSource rows, weights;
  const std::int32_t* first_block;            // [groups + 1] of the rows
  const std::int32_t* first_turn;             // [groups + 1] blocks of rows and weights in the order in which they are needed
  std::uint32_t *rows_ready, *weights_ready;  // a block each: pieces that are bf16
  std::uint32_t *rows_read, *weights_read;    // a block and a group each: columns of tiles that have been multiplied
  std::uint32_t *next_piece, *next_unit;
  int weight_blocks;  // of a group
  int ring_blocks, ring_groups;
  int piece_rows, piece_shift;  // a power of two; a block has 1 << piece_shift pieces of so many rows
  int opening_turns;            // made by all warps, before the product begins
};

// Writes offsets that never decrease and the tables, clears the counts; broken offsets are reported.
struct WidenedSetup {
  const std::int32_t* from;  // [groups + 1]
  std::int32_t *offsets, *first_block, *first_turn;
  std::uint32_t* counts;
  std::int64_t num_counts;
  int groups, rows, weight_blocks;
  StatusWord* status;
};
void launch_widened_setup(const WidenedSetup& setup, cudaStream_t stream);

// The kernels: E4M3 in blocks of 1 x 32 under bytes, NVFP4 in blocks of 1 x 16.
const void* widened_nt_e4m3();
const void* widened_nt_e2m1();

}  // namespace waybill::cuda
