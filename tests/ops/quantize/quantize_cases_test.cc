// SPDX-License-Identifier: Apache-2.0
// Field cases of the low-precision formats.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

// A block of 32: the given values, then ones (or zeros).
Tensor block_of(std::initializer_list<float> values, float rest) {
  Tensor x(DType::kF32, {1, 32});
  for (int i = 0; i < 32; ++i) x.as<float>()[i] = rest;
  int i = 0;
  for (const float value : values) x.as<float>()[i++] = value;
  return x;
}

struct Back {
  int byte;
  Tensor values;
  float at(int i) const { return values.as<float>()[i]; }
};
Back through(const Tensor& x, ScaleRule rule) {
  const Quantized q = quantized(mxfp8_rows(ElementFormat::kE4M3, rule), x);
  return {q.scales.as<std::uint8_t>()[0], dequantized(q, x.dim(0), x.dim(1))};
}

TEST(QuantizeCases, F23_TheScaleRuleIsWhatItSays) {
  EXPECT_EQ(QuantConfig{}.rule, ScaleRule::kRoundUp);
  const Tensor a = block_of({957.0f, 959.5632f}, 1.0f);
  const Back a_up = through(a, ScaleRule::kRoundUp), a_floor = through(a, ScaleRule::kFloor);
  EXPECT_EQ(a_up.byte, 129);
  EXPECT_EQ(a_up.at(0), 960.0f);
  EXPECT_EQ(a_up.at(1), 960.0f);
  EXPECT_EQ(a_floor.byte, 128);
  EXPECT_EQ(a_floor.at(0), 896.0f);
  for (int i = 2; i < 32; ++i) {
    EXPECT_EQ(a_up.at(i), 1.0f);
    EXPECT_EQ(a_floor.at(i), 1.0f);
  }
  const float b_max = std::nextafter(2.0f, 0.0f);  // 0x3FFFFFFF
  const Back b_floor = through(block_of({b_max}, 0.0f), ScaleRule::kFloor), b_up = through(block_of({b_max}, 0.0f), ScaleRule::kRoundUp);
  EXPECT_EQ(b_floor.byte, 119);
  EXPECT_EQ(b_up.byte, 120);
  EXPECT_EQ(b_floor.at(0), 1.75f);
  EXPECT_EQ(b_up.at(0), 2.0f);
  const float c_max = std::nextafter(448.0f, 1e9f);  // 0x43E00001
  const Back c_floor = through(block_of({c_max}, 0.0f), ScaleRule::kFloor), c_up = through(block_of({c_max}, 0.0f), ScaleRule::kRoundUp);
  EXPECT_EQ(c_floor.byte, 127);
  EXPECT_EQ(c_up.byte, 128);
  EXPECT_EQ(c_up.at(0), 448.0f);
  EXPECT_EQ(through(block_of({448.0f}, 0.0f), ScaleRule::kFloor).byte, 127);
  EXPECT_EQ(through(block_of({448.0f}, 0.0f), ScaleRule::kRoundUp).byte, 127);
}

TEST(QuantizeCases, F23_RoundUpNeverSaturates) {
  Tensor x = wild_tensor(64, 128, 23);
  const float edges[] = {448.0f, 448.00003f, 1e-45f, 1e38f, 3.4028235e38f, 0x1p-126f, 0.0f, -449.0f};
  for (int i = 0; i < 8; ++i) x.as<float>()[i * 32] = edges[i];
  const Quantized q = quantized(mxfp8_rows(), x);
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const double scale = decode_e8m0(q.scales.as<std::uint8_t>()[i / 32]);
    ASSERT_LE(std::abs(static_cast<double>(x.as<float>()[i])) / scale, 448.0) << "seed 23, element " << i;
  }
}

TEST(QuantizeCases, F23_RowsAndColumnsUseTheSameRule) {
  const Tensor x = wild_tensor(64, 96, 24);
  Tensor transposed(DType::kF32, {96, 64});
  for (std::int64_t r = 0; r < 64; ++r) {
    for (std::int64_t c = 0; c < 96; ++c) transposed.as<float>()[c * 64 + r] = x.as<float>()[r * 96 + c];
  }
  for (const ScaleRule rule : {ScaleRule::kRoundUp, ScaleRule::kFloor}) {
    const Quantized columns = quantized(mxfp8_columns(ElementFormat::kE4M3, rule), x), rows = quantized(mxfp8_rows(ElementFormat::kE4M3, rule), transposed);
    for (std::int64_t r = 0; r < 64; ++r) {
      for (std::int64_t c = 0; c < 96; ++c) {
        ASSERT_EQ(columns.codes.as<std::uint8_t>()[r * 96 + c], rows.codes.as<std::uint8_t>()[c * 64 + r]);
        ASSERT_EQ(columns.scales.as<std::uint8_t>()[r / 32 * 96 + c], rows.scales.as<std::uint8_t>()[c * 2 + r / 32]);
      }
    }
  }
}

TEST(QuantizeCases, F24_GroupsOfAnySizeGetWholeBlocksOfTheirOwn) {
  const std::vector<std::int32_t> sizes = {44, 0, 1, 32};
  const Tensor offsets = offsets_of(sizes);
  const std::vector<std::int64_t> blocks = block_row_offsets(offsets, 32), rows = block_row_offsets(offsets, 1);
  std::vector<std::int64_t> padded, starts;
  for (std::size_t g = 0; g < 4; ++g) {
    padded.push_back((blocks[g + 1] - blocks[g]) * 32);
    starts.push_back(blocks[g] * 32);
  }
  EXPECT_EQ(padded, (std::vector<std::int64_t>{64, 0, 32, 32}));
  EXPECT_EQ(starts, (std::vector<std::int64_t>{0, 64, 64, 96}));
  EXPECT_EQ(blocks.back() * 32, 128);
  EXPECT_EQ(rows, (std::vector<std::int64_t>{0, 44, 44, 45, 77}));  // bf16: no added rows
  // What the blocks hold equals a copy padded with zeros, and real rows are where they were.
  const std::int64_t C = 64;
  const Tensor x = wild_tensor(77, C, 25);
  Tensor x_padded = Tensor::zeros(DType::kF32, {128, C});
  for (std::size_t g = 0; g < 4; ++g) {
    for (std::int64_t r = 0; r < sizes[g]; ++r) std::memcpy(x_padded.as<float>() + (starts[g] + r) * C, x.as<float>() + (rows[g] + r) * C, C * 4);
  }
  const Quantized q = quantized(mxfp8_columns(), x, offsets), q_padded = quantized(mxfp8_columns(), x_padded);
  EXPECT_TRUE(bit_equal(q.scales, q_padded.scales));
  for (std::size_t g = 0; g < 4; ++g) {
    for (std::int64_t r = 0; r < sizes[g]; ++r) {
      EXPECT_EQ(std::memcmp(q.codes.as<std::uint8_t>() + (rows[g] + r) * C, q_padded.codes.as<std::uint8_t>() + (starts[g] + r) * C, C), 0);
    }
  }
}

TEST(QuantizeCases, F24_WidthsThatDoNotFitAreRefusedByName) {
  const QuantConfig mx = mxfp8_rows();
  EXPECT_NO_THROW(check_block_fit(mx, "H", 2880));
  EXPECT_NO_THROW(check_block_fit(mx, "F", 1408));
  EXPECT_EQ(2880 / mx.block_columns, 90);
  EXPECT_EQ(1408 / mx.block_columns, 44);
  EXPECT_EQ(7984 % mx.block_columns, 16);
  EXPECT_EQ(refusal([&] { check_block_fit(mx, "F", 7984); }), "F = 7984 does not fit MXFP8: it must be a multiple of 32 (7984 mod 32 = 16)");
  const Tensor x = Tensor::zeros(DType::kF32, {1, 7984});
  const Quantized q(mx, 1, 7984, {});
  EXPECT_EQ(refusal([&] { quantize(mx, x, {}, q.view()); }), "C (columns) = 7984 does not fit MXFP8: it must be a multiple of 32 (7984 mod 32 = 16)");
}

TEST(QuantizeCases, F25_PaddingOfSwizzledScalesIsZeroAndNeverRead) {
  const std::vector<std::int32_t> sizes = {1, 31, 32, 33, 127, 129};
  const std::int64_t H = 2880, S = 353;
  const Tensor offsets = offsets_of(sizes);
  const SwizzledLayout layout = swizzled_layout(offsets, H / 32);
  EXPECT_EQ(layout.columns, 90);
  EXPECT_EQ(layout.padded_columns, 92);
  EXPECT_EQ(layout.padded_rows, (std::vector<std::int64_t>{128, 128, 128, 128, 128, 256}));
  EXPECT_EQ(layout.rows, (std::vector<std::int64_t>{1, 31, 32, 33, 127, 129}));
  EXPECT_EQ(layout.byte_offsets, (std::vector<std::int64_t>{0, 11776, 23552, 35328, 47104, 58880, 82432}));
  const Tensor x = wild_tensor(S, H, 26);
  const Quantized q = quantized(mxfp8_rows(), x, offsets);
  const Tensor expected = dequantized(q, S, H, offsets);
  std::vector<std::uint8_t> first;
  for (const int fill : {0x00, 0x7f, 0xff}) {
    std::vector<std::uint8_t> swizzled(82432, static_cast<std::uint8_t>(fill));
    swizzle_scales(layout, q.scales, swizzled.data());
    if (first.empty()) first = swizzled;
    EXPECT_EQ(swizzled, first) << "padding was left as it was";
    std::vector<bool> is_real(swizzled.size(), false);
    for (std::int64_t g = 0; g < 6; ++g) {
      for (std::int64_t r = 0; r < sizes[static_cast<std::size_t>(g)]; ++r) {
        for (std::int64_t c = 0; c < 90; ++c) is_real[static_cast<std::size_t>(layout.index(g, r, c))] = true;
      }
    }
    for (std::size_t i = 0; i < swizzled.size(); ++i) {
      if (is_real[i]) continue;
      EXPECT_EQ(swizzled[i], 0);
      swizzled[i] = static_cast<std::uint8_t>(fill);  // a reader must not care
    }
    EXPECT_EQ(std::count(is_real.begin(), is_real.end(), true), S * 90);
    Quantized read = Quantized(mxfp8_rows(), S, H, offsets, static_cast<std::uint8_t>(fill));
    std::memcpy(read.codes.as<std::uint8_t>(), q.codes.as<std::uint8_t>(), static_cast<std::size_t>(S * H));
    unswizzle_scales(layout, swizzled.data(), read.scales);
    EXPECT_TRUE(bit_equal(dequantized(read, S, H, offsets), expected)) << "padding 0x" << std::hex << fill;
  }
}

TEST(QuantizeCases, F25_ATileHasTheDocumentedOrder) {
  const SwizzledLayout layout = swizzled_layout(offsets_of({300}), 9);
  for (std::int64_t r = 0; r < 300; ++r) {
    for (std::int64_t c = 0; c < 9; ++c) {
      const std::int64_t tile = (r / 128) * 3 + c / 4;
      ASSERT_EQ(layout.index(0, r, c), tile * 512 + (r % 32) * 16 + (r / 32 % 4) * 4 + c % 4);
    }
  }
}

// Rows 299594 * 7168 elements apart: offsets of elements, codes and scales pass 2^31 at their full values, in untouched address space.
TEST(QuantizeCases, F13_RowsBeyond2To31ElementsAreTheRightRows) {
  const std::int64_t stride = std::int64_t{299594} * 7168, S = 3, C = 64;
  const auto map = [](std::int64_t bytes) {
    return mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  void* x_data = map(S * stride * 4);
  void* code_data = map(S * stride);
  void* scale_data = map(S * stride);
  if (x_data == MAP_FAILED || code_data == MAP_FAILED || scale_data == MAP_FAILED) GTEST_SKIP() << "needs 39 GiB of address space";
  const Tensor small = wild_tensor(S, C, 27);
  const auto far = [&](auto* data, std::int64_t columns) {
    TensorView view = TensorView::of(data, {S, columns});
    view.stride[0] = stride;
    return view;
  };
  const TensorView x = far(static_cast<float*>(x_data), C);
  const QuantizedView q{far(static_cast<std::uint8_t*>(code_data), C), far(static_cast<std::uint8_t*>(scale_data), C / 32), {}};
  for (std::int64_t s = 0; s < S; ++s) std::memcpy(static_cast<float*>(x_data) + s * stride, small.as<float>() + s * C, C * 4);
  quantize(mxfp8_rows(), x, {}, q);
  const Quantized expected = quantized(mxfp8_rows(), small);
  for (std::int64_t s = 0; s < S; ++s) {
    EXPECT_EQ(std::memcmp(static_cast<std::uint8_t*>(code_data) + s * stride, expected.codes.as<std::uint8_t>() + s * C, C), 0) << s;
    EXPECT_EQ(std::memcmp(static_cast<std::uint8_t*>(scale_data) + s * stride, expected.scales.as<std::uint8_t>() + s * 2, 2), 0) << s;
  }
  dequantize(mxfp8_rows(), q, {}, x);
  const Tensor back = dequantized(expected, S, C);
  for (std::int64_t s = 0; s < S; ++s) EXPECT_EQ(std::memcmp(static_cast<float*>(x_data) + s * stride, back.as<float>() + s * C, C * 4), 0) << s;
  munmap(x_data, static_cast<std::size_t>(S * stride * 4));
  munmap(code_data, static_cast<std::size_t>(S * stride));
  munmap(scale_data, static_cast<std::size_t>(S * stride));
}

}  // namespace
}  // namespace waybill::testing
