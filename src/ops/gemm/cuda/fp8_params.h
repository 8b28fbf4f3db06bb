// SPDX-License-Identifier: Apache-2.0
// What an 8-bit grouped matmul kernel gets from the host. D = sum over k blocks of 128 of (scale_a scale_b) * (A_block B_block^T):
//   kNT  A [rows, k] with scales [rows, k blocks], B [groups, n, k] with scales a 128 x 128 tile            D [rows, n]
//   kTN  A [blocks, m, 128] with scales [blocks, m], B [blocks, n, 128] with scales [blocks, n]              D [groups, m, n]
// In kTN a block is 128 rows of one group, as quantize() turns them, the last one of a group filled with zeros; blocks start anew at each group.
#pragma once

#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

// Element formats of A and B.
enum class Fp8Types : int { kE4M3 = 0, kE5M2E4M3 = 1, kE4M3E5M2 = 2 };

struct Fp8Params : GroupedParams {
  CUtensorMap a_scale_map, b_scale_map;  // of scales that the copy engine loads: kNT A's where has_scale_map, kTN both
  bool has_scale_map;
  const float *a_scales, *b_scales;
  std::int64_t a_scale_stride, a_scale_k;                 // kNT: floats from one row to the next, from one k block; kTN: from one block, -
  std::int64_t b_scale_group, b_scale_column, b_scale_k;  // kNT: floats from one group, 128 columns of D, k block to the next
  std::int64_t b_scale_stride;                            // kTN: of a block
  int b_blocks;                                           // kNT: 0, or B is [groups * b_blocks, n, 128], k blocks apart
  int max_blocks;                                         // kTN: blocks of A and B
  bool prefetches_sums;                                   // kTN, sums that the copy engine adds: D's lines are fetched into the L2 while a tile is computed
};

namespace fp8_limits {
inline constexpr int kBlockK = 128;
// Math warpgroups of a CTA, 64 rows of the tile each: tiles of 128 columns that leave room for three have three, 192 rows.
constexpr int math_groups(const GemmTile& tile) { return tile.block_n == 128 && tile.stages <= 4 ? 3 : 2; }
constexpr int block_m(const GemmTile& tile) { return 64 * math_groups(tile); }
// kNT: rows of a box of A's scales. The copy engine takes starts at multiples of 16 bytes only, so a box begins up to three rows before the tile.
constexpr int scale_box(int block_m) { return block_m + 4; }
// Floats of a stage's scales, whole pieces of 128 bytes: of A's rows, and of B from first_scale_b() on.
constexpr int scale_floats(GemmForm form, int block_m, int block_n) { return form == GemmForm::kTN ? block_m + block_n : scale_box(block_m) + 28; }
constexpr int first_scale_b(GemmForm form, int block_m) { return form == GemmForm::kTN ? block_m : scale_box(block_m) + 4; }
constexpr int shared_bytes(GemmForm form, const GemmTile& tile) {
  const int rows = block_m(tile);
  return tile.stages * ((rows + tile.block_n) * kBlockK + scale_floats(form, rows, tile.block_n) * 4) + rows / 16 * tile.buffers * gemm_limits::kBufferBytes +
         (form == GemmForm::kNT && tile.block_n == 256 ? 512 : gemm_limits::kControlBytes);  // the widest leave no more
}
}  // namespace fp8_limits

struct Fp8Kernel {
  GemmForm form;
  GemmOutput output;
  Fp8Types types;
  GemmTile tile;
  void (*kernel)(const Fp8Params);
};

}  // namespace waybill::cuda
