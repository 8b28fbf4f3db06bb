// SPDX-License-Identifier: Apache-2.0
// What the kernels of the common dequantisations share: bf16 results, widths in eights; 8 bits under byte scales of powers of two, or NVFP4. Bits: those of
// dequantize.cu.
#pragma once

#include <bit>

#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/wide_codes.cuh"

namespace waybill::cuda {
namespace {

inline constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256;

struct WidenGrid {
  int segments;              // of kWarpColumns a row
  std::uint32_t multiplier;  // unit / segments = high(unit * multiplier) >> shift for units below 2^31; 0: segments is 1
  int shift, column_shift;   // log2 of the block's columns
  __device__ __forceinline__ int row_of(int unit) const {
    return multiplier == 0 ? unit : static_cast<int>(__umulhi(static_cast<std::uint32_t>(unit), multiplier) >> shift);
  }
};

inline WidenGrid widen_grid(const WideRows& y, const CodedRows& in) {
  WidenGrid grid{};
  grid.segments = (y.columns + kWarpColumns - 1) / kWarpColumns;
  if (grid.segments > 1) {
    const int bits = std::bit_width(static_cast<unsigned>(grid.segments - 1));
    grid.shift = bits - 1;
    grid.multiplier =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + static_cast<unsigned>(grid.segments) - 1) / static_cast<unsigned>(grid.segments));
  }
  grid.column_shift = std::countr_zero(static_cast<unsigned>(in.block_columns));
  return grid;
}

// The value of a code that has no short way, by the ways of dequantize.cu.
template <ElementFormat kFormat>
__device__ __forceinline__ uint4 widen_singly(uint2 codes, uint2 scales) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t code = (i < 4 ? codes.x : codes.y) >> (8 * (i % 4)) & 0xffu, scale = (i < 4 ? scales.x : scales.y) >> (8 * (i % 4)) & 0xffu;
    const std::uint32_t bits = bf16_bits(__fmul_rn(decode_one<kFormat>(code), decode_e8m0_bits(scale)));
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <ElementFormat kFormat>
__device__ __forceinline__ uint4 widen_under(uint2 codes, const std::uint32_t (&scales)[4]) {
  return make_uint4(multiply_pairs(widen_pair<kFormat>(spread_low(codes.x)), scales[0]), multiply_pairs(widen_pair<kFormat>(spread_high(codes.x)), scales[1]),
                    multiply_pairs(widen_pair<kFormat>(spread_low(codes.y)), scales[2]), multiply_pairs(widen_pair<kFormat>(spread_high(codes.y)), scales[3]));
}

}  // namespace
}  // namespace waybill::cuda
