// SPDX-License-Identifier: Apache-2.0
// Low-precision formats, bit-exact on CPU and GPU: FP8 E4M3/E5M2, E2M1 and E8M0 codecs, blocks with one scale each (MXFP8, FP8 1x128 and
// 128x128, NVFP4) and the swizzled layout of scales.
//
// Blocks never cross a group: their rows start anew at each group's first row and the last one may be short, so that any group size is legal
// and a group's codes do not depend on its neighbours. The largest magnitude of a block is taken in fp32. Row-wise and column-wise copies
// both come from the high-precision source and use the same rule.
#pragma once

#include <cstdint>
#include <vector>

#include "waybill/quantize_format.h"
#include "waybill/status.h"
#include "waybill/stream.h"

namespace waybill {

// ---- Codecs. Round to nearest even, saturating: beyond the largest finite value (infinity included) comes that value. NaN stays NaN, in E2M1,
// which has none, it becomes +6.
WB_API std::uint8_t encode_element(ElementFormat format, float value);
WB_API float decode_element(ElementFormat format, std::uint8_t code);
// Unbiased: the upper neighbour with the probability of its nearness; random is uniform over 32 bits. Exact values stay.
WB_API std::uint8_t encode_element_stochastic(ElementFormat format, float value, std::uint32_t random);
WB_API float largest_value(ElementFormat format);

WB_API std::uint8_t encode_e8m0(float amax, ElementFormat format, ScaleRule rule);  // NaN -> 255, infinity -> 254, 0 -> 0
WB_API float decode_e8m0(std::uint8_t byte);

// ---- Blocks.
struct QuantConfig {
  ElementFormat element = ElementFormat::kE4M3;
  ScaleFormat scale = ScaleFormat::kE8M0;
  ScaleRule rule = ScaleRule::kRoundUp;  // kE8M0 and kPowerOfTwo
  std::int64_t block_rows = 1, block_columns = 32;
  bool stochastic = false;  // element rounding by counter: the draw depends on (seed, row, column) only
  std::uint64_t seed = 0;
};
WB_API QuantConfig mxfp8_rows(ElementFormat element = ElementFormat::kE4M3, ScaleRule rule = ScaleRule::kRoundUp);     // 1 x 32
WB_API QuantConfig mxfp8_columns(ElementFormat element = ElementFormat::kE4M3, ScaleRule rule = ScaleRule::kRoundUp);  // 32 x 1
WB_API QuantConfig fp8_rows(ScaleFormat scale = ScaleFormat::kPowerOfTwo);                                             // 1 x 128, E4M3
WB_API QuantConfig fp8_tiles(ScaleFormat scale = ScaleFormat::kPowerOfTwo);                                            // 128 x 128, E4M3: weights
WB_API QuantConfig nvfp4_rows();                                                                                       // 1 x 16, E2M1 under E4M3
WB_API void validate(const QuantConfig& config);

// Refuses a width that the format's blocks do not fit: MX and NVFP4 blocks must be whole along the columns. `dimension` is the caller's name
// for it ("F"); the message names dimension, value and multiple. The FP8 formats with 128-wide blocks take any width (the last is short).
WB_API void check_block_fit(const QuantConfig& config, const char* dimension, std::int64_t value);

// Scale rows of the groups before g, [L + 1]: the sum of ceil(rows / block_rows). offsets [L + 1] int32.
WB_API std::vector<std::int64_t> block_row_offsets(const TensorView& offsets, std::int64_t block_rows);

// Room that is enough for any offsets: at most this many blocks hold S rows in L groups.
WB_API std::int64_t max_block_rows(std::int64_t S, std::int64_t L, std::int64_t block_rows);

// x [S, C] fp32 or bf16 -> codes and scales. Rows past offsets[L] are neither read nor written.
//   offsets  [L + 1] int32, or null: all rows are one group. Weights [L, N, C] go in as [L * N, C] with offsets g * N.
//   codes    [S, C] f8e4m3, f8e5m2 or u8; E2M1: [S, C / 2] u8, the even column in the low half
//   scales   [block_row_offsets[L], ceil(C / block_columns)]: u8 (kE8M0), f32 (kPowerOfTwo, kF32), f8e4m3 or u8 (kE4M3); any strides: the
//            8-bit matmuls (waybill/quantized_gemm.h) read 1 x 128 scales fastest where those of adjacent rows are adjacent
//   group_scales [L] f32, written for kE4M3 only: S_g = 448 * 6 / (largest magnitude of the group); 1 for zeros
//   turned   [block_row_offsets(offsets, 128)[L], C, 128], 8-bit elements: the codes once more (or only: codes may be null then) for a product
//            that contracts over rows: blocks of 128 rows, a column's rows adjacent, zeros past the group's end
//   swizzled u8, block_rows 1, byte scales: the scales once more, in swizzled_layout(offsets, C / block_columns), padding included
// A block that holds a NaN gets a NaN scale and NaN codes. Bit-equal for any number of threads, on the CPU and on a GPU.
// CPU: finished on return. GPU: queued on stream.native, nothing waits, capturable. The values of offsets are then not checked on the host:
// `status` gets kStatusBadOffsets where they are not an increasing sequence from 0 within the rows, or where scales or turned have too few
// blocks (what does not fit is left out). Implementations cuda (the formats of the recipes; bf16 or fp32 aligned to 16 bytes, C a multiple of
// 8) and cuda_portable (everything else, no speed claim); WB_LOG=select says which and why. L is at most 4,096 there.
struct QuantizedView {
  TensorView codes, scales, group_scales;
  TensorView turned = {}, swizzled = {};
};
WB_API void quantize(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, Stream stream = {},
                     StatusWord* status = nullptr);

// Both directions from one read of x: `rows` has blocks of 1 x B, `columns` of B x 1, else alike. Same results as two calls of quantize().
WB_API void quantize_both(const QuantConfig& rows, const QuantConfig& columns, const TensorView& x, const TensorView& offsets, const QuantizedView& rows_out,
                          const QuantizedView& columns_out, Stream stream = {}, StatusWord* status = nullptr);

// y [S, C] fp32 or bf16 = element * scale (NVFP4: element * scale / S_g), from codes and scales. The product is formed in fp32; in bf16 it is
// exact for E4M3 under scales 2^-124 .. 2^119. GPU as above.
WB_API void dequantize(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream = {},
                       StatusWord* status = nullptr);

// ---- Operands of a dequantise-then-multiply matmul: y = dequantize(quantize(x)) to the bit, in one pass and without codes.
// Implementations avx512, avx2, portable and ref (WB_FORCE=quantize:<name>); all give the same bits, for any number of threads.
struct QuantizeDequantizeArgs {
  TensorView x;        // [*, C] fp32, columns adjacent
  TensorView rows;     // [S] int32: row s of y comes from x's row rows[s], -1 = a row of zeros. Null: from row s
  TensorView offsets;  // [L + 1] int32, or null: all rows of y are one group. Rows past offsets[L] are not written
  TensorView y;        // [S, C] fp32; may be x where rows is null
  // [L] for stochastic rounding: the draw then depends on (group_seeds[g], row within the group, column) only. Null: as in quantize().
  const std::uint64_t* group_seeds = nullptr;
};
WB_API void quantize_dequantize(const QuantConfig& config, const QuantizeDequantizeArgs& args, Stream stream = {});

// Random Hadamard transform over the rows of each group, 16 at a time: y = H D x with H[i, j] = (-1)^popcount(i & j) / 4 and D the signs:
// bit j of `signs` negates row j of a block. Orthonormal, so that (H D a)^T (H D b) = a^T b. The last block of a group is filled with
// zeros: y has hadamard_offsets(offsets)[L] rows. x, rows and offsets as above.
inline constexpr std::int64_t kHadamardRows = 16;
WB_API std::vector<std::int32_t> hadamard_offsets(const TensorView& offsets);  // [L + 1], multiples of 16
WB_API void hadamard_rows(const TensorView& x, const TensorView& rows, const TensorView& offsets, std::uint16_t signs, const TensorView& y, Stream stream = {});

// y bf16 = x fp32 rounded to nearest even, NaN stays NaN; same shape, contiguous.
WB_API void round_to_bf16(const TensorView& x, const TensorView& y, Stream stream = {});

// ---- Swizzled scales (u8): tiles of 128 rows x 4 columns = 512 bytes, row-major over tiles; each group starts its own tile. In a tile:
// offset = (r % 32) * 16 + (r / 32 % 4) * 4 + c % 4. Padding is written as zeros and never read back.
struct SwizzledLayout {
  std::int64_t columns = 0, padded_columns = 0;                                     // real and padded; the real shape is carried, never inferred
  std::vector<std::int64_t> rows, padded_rows;                                      // [L]
  std::vector<std::int64_t> byte_offsets;                                           // [L + 1]
  std::int64_t index(std::int64_t g, std::int64_t row, std::int64_t column) const;  // byte of a real scale; row counts inside the group
};
// offsets: rows of `scales` per group ([L + 1] int32).
WB_API SwizzledLayout swizzled_layout(const TensorView& offsets, std::int64_t columns);
WB_API void swizzle_scales(const SwizzledLayout& layout, const TensorView& scales, std::uint8_t* out);  // scales [S, columns] u8
WB_API void unswizzle_scales(const SwizzledLayout& layout, const std::uint8_t* in, const TensorView& scales);

}  // namespace waybill
