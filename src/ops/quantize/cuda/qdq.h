// SPDX-License-Identifier: Apache-2.0
// quantize_dequantize() and hadamard_rows() (waybill/quantize.h) on the GPU, rows found through a list, in one call: the operands of a recipe's
// matmuls as bf16. To the bit the CPU's fp32 results of the same values, rounded to bf16.
#pragma once

#include "ops/quantize/cuda/quantize_params.h"
#include "waybill/quantize_format.h"

namespace waybill::cuda {

// In device memory where a replayed graph must see another one; else `value`.
struct SeedSource {
  std::uint64_t value = 0;
  const std::uint64_t* pointer = nullptr;
};

// Formats: MXFP8 in blocks of 1 x 32 and 32 x 1, NVFP4 in 1 x 16, 16 x 1 and 16 x 16; another one is an error. C a multiple of 8 and of block_columns,
// rows aligned to 16 bytes. Only NVFP4's vectors are rounded stochastically, only its columns are rotated. Group g takes the random numbers of the key
// random_u64(random_u64(seed, draws), first_id + g * id_stride), as src/moe/recipe_operands.cc does.
struct QdqCall {
  WideRows x;  // bf16. rows, offsets, groups: of the slots; list: where they lie
  void* y;     // bf16 [S, C] contiguous; hadamard: each group filled to whole blocks of 16 rows, which y must hold (S + 15 groups do)
  ElementFormat element;
  ScaleFormat scale;
  ScaleRule rule;
  int block_rows, block_columns;
  bool stochastic, hadamard;
  SeedSource seed;
  std::uint64_t draws;
  std::int64_t first_id;
  std::int64_t id_stride = 1;
  float* group_scales;      // kE4M3: room for [groups]
  std::int32_t* y_offsets;  // hadamard: [groups + 1], where y's groups start, written; else null
};
// Queued on `stream`; nothing waits, nothing is allocated.
void launch_qdq(const QdqCall& call, cudaStream_t stream);

// Its parts, for calls that launch_qdq() has checked.
void launch_qdq_rows(const QdqCall& p, cudaStream_t stream);             // blocks of 1 x 16, 1 x 32
void launch_qdq_columns(const QdqCall& p, cudaStream_t stream);          // of 16 x 1, 32 x 1, 16 x 16
void launch_qdq_rotated_largest(const QdqCall& p, cudaStream_t stream);  // group_scales = the largest number of each group, rotated; zeros before

}  // namespace waybill::cuda
