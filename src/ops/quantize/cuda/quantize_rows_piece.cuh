// SPDX-License-Identifier: Apache-2.0
// What the kernels of row blocks do with eight columns in a lane's registers.
#pragma once

#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/wide_piece.cuh"

namespace waybill::cuda {
namespace {

// Codes and scales of columns column .. column + 7 of a row of `columns`; all lanes of the warp, those of a block adjacent.
template <ElementFormat kFormat, bool kDivides, int kBlock, bool kIsBf16>
__device__ __forceinline__ void quantize_piece(int columns, const CodedRows& out, bool needs_groups, const GroupTable& table, const Piece<kIsBf16>& piece,
                                               int row, int column, bool is_there) {
  std::uint32_t amax = piece.largest();
#pragma unroll
  for (int mask = kBlock / 16; mask > 0; mask /= 2) amax = max(amax, __shfl_xor_sync(ptx::kFullWarp, amax, mask));
  if (!is_there) return;
  const int g = needs_groups ? table.group_of_row(row) : 0;
  const float group = kFormat == ElementFormat::kE2M1 ? __ldg(out.group_scales + g) : 1.0f;
  const BlockScale scale = block_scale<kFormat>(amax, out.scale, out.rule, group);
  const uint2 codes = kDivides && scale.reciprocal != 0
                          ? encode_eight<kFormat>([&](int i) { return divide(__fmul_rn(piece.value(i), scale.factor), scale.divisor, scale.reciprocal); })
                          : encode_eight<kFormat>([&](int i) { return to_element<kDivides>(piece.value(i), scale); });
  if (out.codes != nullptr) {
    if constexpr (kFormat == ElementFormat::kE2M1) {
      *reinterpret_cast<std::uint32_t*>(out.codes + row * out.code_stride + column / 2) = codes.x;
    } else {
      *reinterpret_cast<uint2*>(out.codes + row * out.code_stride + column) = codes;
    }
  }
  if (column % kBlock != 0) return;
  const std::int64_t at = row * out.scale_stride + column / kBlock * out.scale_column_stride;
  if (out.scale == ScaleFormat::kF32 || out.scale == ScaleFormat::kPowerOfTwo) {
    static_cast<float*>(out.scales)[at] = __uint_as_float(scale.stored);
  } else if (out.scales != nullptr) {
    static_cast<std::uint8_t*>(out.scales)[at] = static_cast<std::uint8_t>(scale.stored);
  }
  if (out.swizzled != nullptr) {
    const int tile_columns = (columns / kBlock + 3) / 4;
    const std::int64_t swizzled = swizzled_index(table.first_block(g), tile_columns, row - table.first_row(g), column / kBlock);
    if (swizzled < out.swizzled_bytes) out.swizzled[swizzled] = static_cast<std::uint8_t>(scale.stored);
  }
}

}  // namespace

}  // namespace waybill::cuda
