// SPDX-License-Identifier: Apache-2.0
// qdq.h: which kernels a call takes. Two-level scales need a pass of its own for the largest magnitude of a group.
#include "ops/quantize/cuda/qdq.h"

#include <fmt/format.h>

#include "waybill/error.h"

namespace waybill::cuda {

void launch_qdq(const QdqCall& p, cudaStream_t stream) {
  const bool is_mxfp8 = p.element == ElementFormat::kE4M3 && p.scale == ScaleFormat::kE8M0;
  const int length = is_mxfp8 ? 32 : 16;
  const bool is_row = p.block_rows == 1 && p.block_columns == length, is_column = p.block_rows == length && p.block_columns == 1;
  const bool is_tile = !is_mxfp8 && p.block_rows == length && p.block_columns == length;
  WB_CHECK((is_mxfp8 || (p.element == ElementFormat::kE2M1 && p.scale == ScaleFormat::kE4M3)) && (is_row || is_column || is_tile),
           "rounding to a block format: takes MXFP8 in blocks of 1 x 32 and 32 x 1 and NVFP4 in 1 x 16, 16 x 1 and 16 x 16, got blocks of {} x {}",
           p.block_rows, p.block_columns);
  WB_CHECK((!p.stochastic || (!is_mxfp8 && !is_tile)) && (!p.hadamard || (!is_mxfp8 && is_column)),
           "rounding to a block format: only NVFP4's vectors are rounded stochastically, only its columns are rotated, got blocks of {} x {}", p.block_rows,
           p.block_columns);
  if (p.x.columns == 0 || p.x.groups == 0) return;
  if (!is_mxfp8) {
    (void)cudaMemsetAsync(p.group_scales, 0, static_cast<std::size_t>(p.x.groups) * sizeof(float), stream);
    if (p.hadamard) {
      launch_qdq_rotated_largest(p, stream);
      launch_group_scales_finish(p.group_scales, p.x.groups, stream);
    } else {
      launch_group_scales(p.x, p.group_scales, stream);
    }
  }
  is_row ? launch_qdq_rows(p, stream) : launch_qdq_columns(p, stream);
}

}  // namespace waybill::cuda
