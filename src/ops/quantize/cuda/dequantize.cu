// SPDX-License-Identifier: Apache-2.0
// y = element * scale, NVFP4: / the group's scale; in fp32, rounded to y's type. Grid: persistent, 256 threads; a warp takes 256 columns of a
// row at a time, two of them under way together, a lane 8 adjacent columns where widths and addresses allow, else single elements. Bytes:
// codes and scales once, y once.
#include <cuda_bf16.h>

#include <algorithm>
#include <bit>

#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWarpColumns = 256;

// Pieces of a lane; one where registers would not hold two.
template <ElementFormat kFormat, int kBlockRows>
constexpr int kUnderWay = (kFormat == ElementFormat::kE2M1) && (kBlockRows > 1) ? 1 : 2;

struct DequantizeGrid {
  int segments;       // of kWarpColumns a row
  int column_shift;   // is_wide: log2 of the block's columns
  bool is_wide;       // 8 codes and 8 results of a lane are aligned
  bool packs_scales;  // is_wide, byte scales a column: those of a lane's eight columns are aligned, too
  bool needs_groups;  // for block rows or NVFP4's scales
};

__device__ __forceinline__ float scale_at(const CodedRows& in, std::int64_t index) {
  if (in.scale == ScaleFormat::kE8M0) return decode_e8m0_bits(__ldg(static_cast<const std::uint8_t*>(in.scales) + index));
  if (in.scale == ScaleFormat::kE4M3) return decode_one<ElementFormat::kE4M3>(__ldg(static_cast<const std::uint8_t*>(in.scales) + index));
  return __ldg(static_cast<const float*>(in.scales) + index);
}

// Codes 2 i and 2 i + 1 of a lane's eight.
template <ElementFormat kFormat>
__device__ __forceinline__ float2 decode_two(uint2 codes, int i) {
  if constexpr (kFormat == ElementFormat::kE2M1) {
    const std::uint32_t both = codes.x >> (8 * i);
    return make_float2(decode_one<kFormat>(both), decode_one<kFormat>(both >> 4));
  }
  const std::uint32_t both = (i < 2 ? codes.x : codes.y) >> (16 * (i % 2));
  return make_float2(decode_one<kFormat>(both & 0xffu), decode_one<kFormat>(both >> 8 & 0xffu));
}

template <ElementFormat kFormat>
__device__ __forceinline__ uint2 load_codes(const CodedRows& in, std::int64_t row, int column) {
  if constexpr (kFormat == ElementFormat::kE2M1) return make_uint2(__ldg(reinterpret_cast<const unsigned*>(in.codes + row * in.code_stride + column / 2)), 0);
  return ptx::ld_stream_v2(in.codes + row * in.code_stride + column);
}

template <ElementFormat kFormat>
__device__ __forceinline__ void store_eight(const WideRows& y, const CodedRows& in, std::int64_t row, int column, uint2 codes, std::int64_t scale_row,
                                            float group, const DequantizeGrid& grid) {
  const std::int64_t scales = scale_row * in.scale_stride;
  float v[8];
  if (grid.packs_scales) {
    const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(in.scales) + scales + column));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = decode_two<kFormat>(codes, i);
      const std::uint32_t both = (i < 2 ? bytes.x : bytes.y) >> (16 * (i % 2));
      v[2 * i] = __fmul_rn(two.x, decode_e8m0_bits(both & 0xffu)), v[2 * i + 1] = __fmul_rn(two.y, decode_e8m0_bits(both >> 8 & 0xffu));
    }
  } else {
    const bool is_shared = in.block_columns > 1;
    const float shared_scale = is_shared ? scale_at(in, scales + (column >> grid.column_shift) * in.scale_column_stride) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = decode_two<kFormat>(codes, i);
      v[2 * i] = __fmul_rn(two.x, is_shared ? shared_scale : scale_at(in, scales + (column + 2 * i) * in.scale_column_stride));
      v[2 * i + 1] = __fmul_rn(two.y, is_shared ? shared_scale : scale_at(in, scales + (column + 2 * i + 1) * in.scale_column_stride));
    }
  }
  if (kFormat == ElementFormat::kE2M1 && in.scale == ScaleFormat::kE4M3) {
    const float reciprocal = group_reciprocal(group);
#pragma unroll
    for (float& value : v) value = reciprocal != 0 ? divide(value, group, reciprocal) : __fdiv_rn(value, group);
  }
  const std::int64_t at = row * y.stride + column;
  if (y.is_bf16) {
    uint4 packed;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(y.data) + at) = packed;
  } else {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(y.data) + at);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

template <ElementFormat kFormat>
__device__ __forceinline__ void store_singly(const WideRows& y, const CodedRows& in, std::int64_t row, int column, std::int64_t scale_row, float group) {
  for (int c = column; c < min(column + 8, y.columns); ++c) {
    const std::uint8_t* codes = in.codes + row * in.code_stride;
    const std::uint32_t code = kFormat == ElementFormat::kE2M1 ? codes[c / 2] >> (4 * (c % 2)) : codes[c];
    const float value = __fmul_rn(decode_one<kFormat>(code), scale_at(in, scale_row * in.scale_stride + c / in.block_columns * in.scale_column_stride));
    store_value(y, row, c, in.scale == ScaleFormat::kE4M3 ? __fdiv_rn(value, group) : value);
  }
}

template <ElementFormat kFormat, int kBlockRows>
__global__ void __launch_bounds__(kThreads) dequantize(const WideRows y, const CodedRows in, const DequantizeGrid grid) {
  extern __shared__ int memory[];
  GroupTable table;
  int begin = 0, rows = static_cast<int>(y.rows);
  if (grid.needs_groups) {
    table.build<kBlockRows>(y, memory);
    rows = table.rows(), begin = table.first_row(0);
  } else if (y.offsets != nullptr) {
    rows = min(max(__ldg(y.offsets + y.groups), 0), rows), begin = min(max(__ldg(y.offsets), 0), rows);
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, num_units = rows * grid.segments;
  constexpr int kPieces = kUnderWay<kFormat, kBlockRows>;
  const int step = static_cast<int>(gridDim.x) * kWarps * kPieces;
  for (int first = begin * grid.segments + (static_cast<int>(blockIdx.x) * kWarps + warp) * kPieces; first < num_units; first += step) {
    uint2 codes[kPieces];
    int row[kPieces], column[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int unit = first + i;
      row[i] = unit / grid.segments;
      column[i] = unit < num_units ? (unit - row[i] * grid.segments) * kWarpColumns + 8 * lane : y.columns;
      if (grid.is_wide && column[i] < y.columns) codes[i] = load_codes<kFormat>(in, row[i], column[i]);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (column[i] >= y.columns) continue;
      std::int64_t scale_row = row[i];
      float group = 1.0f;
      if (grid.needs_groups) {
        const int g = table.group_of_row(row[i]);
        if constexpr (kBlockRows > 1) scale_row = table.first_block(g) + (row[i] - table.first_row(g)) / kBlockRows;
        if (in.scale == ScaleFormat::kE4M3) group = __ldg(in.group_scales + g);
      }
      if (scale_row >= in.scale_rows) continue;
      if (grid.is_wide) {
        store_eight<kFormat>(y, in, row[i], column[i], codes[i], scale_row, group, grid);
      } else {
        store_singly<kFormat>(y, in, row[i], column[i], scale_row, group);
      }
    }
  }
}

template <ElementFormat kFormat, int kBlockRows>
void launch(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(y.data) % 16 == 0 && reinterpret_cast<std::uintptr_t>(in.codes) % 8 == 0 && y.stride % 8 == 0 &&
                          in.code_stride % 8 == 0 && y.columns % 8 == 0;
  // Two levels of scales under 8-bit elements, which no recipe has, go singly.
  const bool is_plain = in.scale != ScaleFormat::kE4M3 || kFormat == ElementFormat::kE2M1;
  const auto columns = static_cast<unsigned>(in.block_columns);
  DequantizeGrid grid{};
  grid.segments = (y.columns + kWarpColumns - 1) / kWarpColumns;
  grid.column_shift = std::countr_zero(columns);
  grid.is_wide = is_aligned && is_plain && (columns == 1 || (columns % 8 == 0 && std::has_single_bit(columns)));
  grid.packs_scales = grid.is_wide && columns == 1 && in.scale == ScaleFormat::kE8M0 && in.scale_column_stride == 1 && in.scale_stride % 8 == 0 &&
                      reinterpret_cast<std::uintptr_t>(in.scales) % 8 == 0;
  grid.needs_groups = kBlockRows > 1 || in.scale == ScaleFormat::kE4M3;
  const std::int64_t units = y.rows * grid.segments, per_cta = kWarps * kUnderWay<kFormat, kBlockRows>;
  const auto ctas = static_cast<unsigned>(std::min<std::int64_t>((units + per_cta - 1) / per_cta, grid.needs_groups ? num_sms() * 8 : 1 << 30));
  const auto shared = static_cast<unsigned>(grid.needs_groups ? GroupTable::bytes(y.groups, 1) : 0u);
  dequantize<kFormat, kBlockRows><<<ctas, kThreads, shared, stream>>>(y, in, grid);
}

template <ElementFormat kFormat>
void launch_format(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  if (in.block_rows == 1) launch<kFormat, 1>(y, in, stream);
  if (in.block_rows == 16) launch<kFormat, 16>(y, in, stream);
  if (in.block_rows == 32) launch<kFormat, 32>(y, in, stream);
  if (in.block_rows == 128) launch<kFormat, 128>(y, in, stream);
}

}  // namespace

void launch_dequantize(const WideRows& y, const CodedRows& in, cudaStream_t stream) {
  if (y.rows == 0 || y.columns == 0 || y.groups == 0 || launch_dequantize_wide(y, in, stream)) return;
  if (in.element == ElementFormat::kE4M3) launch_format<ElementFormat::kE4M3>(y, in, stream);
  if (in.element == ElementFormat::kE5M2) launch_format<ElementFormat::kE5M2>(y, in, stream);
  if (in.element == ElementFormat::kE2M1) launch_format<ElementFormat::kE2M1>(y, in, stream);
}

}  // namespace waybill::cuda
