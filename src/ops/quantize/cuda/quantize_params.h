// SPDX-License-Identifier: Apache-2.0
// What the quantiser kernels get from the host, and how they are launched. Formats and layouts: waybill/quantize.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "waybill/quantize_format.h"
#include "waybill/status.h"

namespace waybill::cuda {

// A tensor of rows; strides count elements. Rows past offsets[groups] are neither read nor written.
struct WideRows {
  void* data;
  bool is_bf16;
  std::int64_t stride, rows;
  int columns;
  const std::int32_t* offsets;  // [groups + 1] or null: one group of all rows
  int groups;
  StatusWord* status;                  // or null
  const std::int32_t* list = nullptr;  // [rows] or null: row s is the tensor's row list[s], zeros where that is -1. Reading kernels only
};

// Codes and scales of one direction. Null parts are not written (or not there to be read).
struct CodedRows {
  ElementFormat element;
  ScaleFormat scale;
  ScaleRule rule;
  int block_rows, block_columns;
  std::uint8_t* codes;
  std::int64_t code_stride;  // bytes
  void* scales;              // bytes or floats
  std::int64_t scale_stride, scale_column_stride, scale_rows;
  float* group_scales;
  std::uint8_t* turned;  // [turned_blocks, columns, 128]; launch_quantize_portable: zeros before the launch
  std::int64_t turned_blocks;
  std::uint8_t* swizzled;  // zeros before the launch
  std::int64_t swizzled_bytes;
  bool stochastic;
  std::uint64_t seed;
};

// Largest group count that the kernels' tables in shared memory hold.
inline constexpr int kMaxQuantizeGroups = 4096;

// Any format, width and alignment, in two launches: scales, and then codes under them; no speed claim.
void launch_quantize_portable_scales(const WideRows& x, const CodedRows& out, cudaStream_t stream);
void launch_quantize_portable_codes(const WideRows& x, const CodedRows& out, cudaStream_t stream);
inline void launch_quantize_portable(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  if (x.rows == 0 || x.columns == 0 || x.groups == 0) return;
  launch_quantize_portable_scales(x, out, stream);
  launch_quantize_portable_codes(x, out, stream);
}
// y = element * scale (/ the group's scale).
void launch_dequantize(const WideRows& y, const CodedRows& in, cudaStream_t stream);
// The same where there is a kernel at the speed of a copy (dequantize_wide.cc); false: nothing was launched.
bool launch_dequantize_wide(const WideRows& y, const CodedRows& in, cudaStream_t stream);
void launch_widen_rows(const WideRows& y, const CodedRows& in, cudaStream_t stream);  // for calls that it has accepted
void launch_widen_columns(const WideRows& y, const CodedRows& in, cudaStream_t stream);
void launch_widen_columns_nvfp4(const WideRows& y, const CodedRows& in, cudaStream_t stream);

// NVFP4's first pass: the scale of each group. group_scales [groups]: zeros before the launch.
void launch_group_scales(const WideRows& x, float* group_scales, cudaStream_t stream);
void launch_group_scales_finish(float* group_scales, int groups, cudaStream_t stream);  // largest magnitudes -> scales, in place

// Blocks of 1 x 128, 1 x 32 (8-bit elements) or 1 x 16 (E2M1 under E4M3): quantize_rows.cu. x and codes aligned to 16 and 8 bytes with their
// strides, columns a multiple of 8.
void launch_quantize_rows(const WideRows& x, const CodedRows& out, cudaStream_t stream);

// In tiles of 128 x 128, 8-bit elements: `columns` has blocks of 128 x 1, 32 x 1 or 128 x 128; `rows` (1 x the same block) may have null codes.
void launch_quantize_tiles_e4m3(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream);
void launch_quantize_tiles_e5m2(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream);
inline void launch_quantize_tiles(const WideRows& x, const CodedRows& rows, const CodedRows& columns, cudaStream_t stream) {
  if (x.rows == 0 || x.columns == 0 || x.groups == 0) return;
  columns.element == ElementFormat::kE4M3 ? launch_quantize_tiles_e4m3(x, rows, columns, stream) : launch_quantize_tiles_e5m2(x, rows, columns, stream);
}

}  // namespace waybill::cuda
