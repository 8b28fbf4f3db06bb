// SPDX-License-Identifier: Apache-2.0
// The further copies of a quantised tensor: turned codes, swizzled scales, both directions from one call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

TEST(QuantizeCopies, TurnedCodesAreTheCodesOfBlocksWithZerosBehindAGroupsEnd) {
  const Tensor offsets = offsets_of({130, 0, 3});
  const Tensor x = wild_tensor(140, 40, 1);
  Quantized q({ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1}, 140, 40, offsets);
  Tensor turned(DType::kU8, {3, 40, 128});
  QuantizedView view = q.view();
  view.turned = turned;
  quantize(q.config, x, offsets, view);
  const auto* codes = q.codes.as<std::uint8_t>();
  const auto* got = turned.as<std::uint8_t>();
  const std::int64_t first[] = {0, 128, 130}, rows[] = {128, 2, 3};
  for (std::int64_t b = 0; b < 3; ++b) {
    for (std::int64_t c = 0; c < 40; ++c) {
      for (std::int64_t r = 0; r < 128; ++r)
        ASSERT_EQ(got[(b * 40 + c) * 128 + r], r < rows[b] ? codes[(first[b] + r) * 40 + c] : 0) << b << " " << c << " " << r;
    }
  }
  // Without codes: the same.
  Tensor again(DType::kU8, {3, 40, 128});
  view.codes = {}, view.turned = again;
  quantize(q.config, x, offsets, view);
  EXPECT_TRUE(bit_equal(turned, again));
}

TEST(QuantizeCopies, SwizzledScalesAreThoseOfSwizzleScales) {
  const Tensor offsets = offsets_of({130, 0, 3});
  const Tensor x = wild_tensor(140, 96, 2);
  Quantized q(mxfp8_rows(), 140, 96, offsets);
  const SwizzledLayout layout = swizzled_layout(offsets, 3);
  Tensor got(DType::kU8, {layout.byte_offsets.back()}), want(DType::kU8, {layout.byte_offsets.back()});
  QuantizedView view = q.view();
  view.swizzled = got;
  quantize(q.config, x, offsets, view);
  swizzle_scales(layout, q.scales, want.as<std::uint8_t>());
  EXPECT_TRUE(bit_equal(got, want));
}

TEST(QuantizeCopies, BothDirectionsAreTwoCalls) {
  const Tensor offsets = offsets_of({5, 70, 0, 64});
  const Tensor x = wild_tensor(139, 64, 3);
  Quantized rows(mxfp8_rows(), 139, 64, offsets), columns(mxfp8_columns(), 139, 64, offsets);
  quantize_both(rows.config, columns.config, x, offsets, rows.view(), columns.view());
  const Quantized one = quantized(mxfp8_rows(), x, offsets), two = quantized(mxfp8_columns(), x, offsets);
  EXPECT_TRUE(bit_equal(rows.codes, one.codes) && bit_equal(rows.scales, one.scales));
  EXPECT_TRUE(bit_equal(columns.codes, two.codes) && bit_equal(columns.scales, two.scales));
}

TEST(QuantizeCopies, RefusalsNameTheRule) {
  const Tensor x = wild_tensor(64, 64, 4);
  Quantized rows(mxfp8_rows(), 64, 64, {}), tiles(fp8_tiles(), 64, 64, {}), nv(nvfp4_rows(), 64, 64, {});
  Tensor small(DType::kU8, {1, 32, 128}), turned(DType::kU8, {1, 64, 128}), bytes(DType::kU8, {10});
  using ::testing::HasSubstr;
  const auto with = [](const Quantized& q, const TensorView& turn, const TensorView& swizzle) {
    QuantizedView view = q.view();
    view.turned = turn, view.swizzled = swizzle;
    return view;
  };
  EXPECT_THAT(refusal([&] { quantize(tiles.config, x, {}, with(tiles, small, {})); }),
              HasSubstr("turned must be contiguous [1, 64, 128], got u8 [1, 32, 128]"));
  EXPECT_THAT(refusal([&] { quantize(nv.config, x, {}, with(nv, turned, {})); }), HasSubstr("turned codes have 8 bits"));
  EXPECT_THAT(refusal([&] { quantize(tiles.config, x, {}, with(tiles, {}, bytes)); }), HasSubstr("got blocks of 128 x 128"));
  EXPECT_THAT(refusal([&] { quantize(rows.config, x, {}, with(rows, {}, bytes)); }), HasSubstr("swizzled must hold 512 bytes, got u8 [10]"));
  EXPECT_THAT(refusal([&] { quantize_both(rows.config, tiles.config, x, {}, rows.view(), tiles.view()); }), HasSubstr("got 1 x 32 and 128 x 128"));
}

TEST(QuantizeCopies, MaxBlockRowsHoldsAnySplit) {
  EXPECT_EQ(max_block_rows(0, 5, 128), 0);
  EXPECT_EQ(max_block_rows(256, 1, 128), 2 + 0);
  for (std::int64_t S = 1; S < 400; S += 13) {
    for (std::int64_t L = 1; L < 9; ++L) {
      // As many groups of one row as there can be, the rest in the last.
      const std::int64_t ones = std::min(L, S) - 1, rest = S - ones;
      EXPECT_GE(max_block_rows(S, L, 32), ones + (rest + 31) / 32);
    }
  }
}

}  // namespace
}  // namespace waybill::testing
