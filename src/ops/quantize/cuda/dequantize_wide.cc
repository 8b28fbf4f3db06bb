// SPDX-License-Identifier: Apache-2.0
// Which dequantisations have a kernel at the speed of a copy: bf16 results, widths in eights; 8 bits under byte scales of powers of two, or NVFP4.
#include <bit>

#include "ops/quantize/cuda/quantize_params.h"

namespace waybill::cuda {
namespace {

constexpr int kWarpColumns = 256;

bool are_aligned(const WideRows& y, const CodedRows& in) {
  const int code_bytes = in.element == ElementFormat::kE2M1 ? 4 : 8;
  return y.is_bf16 && reinterpret_cast<std::uintptr_t>(y.data) % 16 == 0 && y.stride % 8 == 0 && y.columns % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(in.codes) % static_cast<unsigned>(code_bytes) == 0 && in.code_stride % code_bytes == 0;
}

}  // namespace

bool launch_dequantize_wide(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  if (!are_aligned(y, in) || y.rows * ((y.columns + kWarpColumns - 1) / kWarpColumns) > std::int64_t{1} << 30) return false;
  const bool is_row = in.block_rows == 1 && in.block_columns % 8 == 0 && std::has_single_bit(static_cast<unsigned>(in.block_columns));
  // A lane's eight byte scales by one load.
  const bool packs_scales =
      in.block_columns == 1 && in.scale_column_stride == 1 && in.scale_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(in.scales) % 8 == 0;
  if (in.element == ElementFormat::kE2M1) {
    const bool is_block = in.block_rows == 16 && packs_scales;
    if (!(is_row || is_block) || in.scale != ScaleFormat::kE4M3) return false;
    is_row ? launch_widen_rows(y, in, stream) : launch_widen_columns_nvfp4(y, in, stream);
    return true;
  }
  if (in.scale != ScaleFormat::kE8M0) return false;
  if (is_row) {
    launch_widen_rows(y, in, stream);
    return true;
  }
  if ((in.block_rows != 32 && in.block_rows != 128) || !packs_scales) return false;
  launch_widen_columns(y, in, stream);
  return true;
}

}  // namespace waybill::cuda
