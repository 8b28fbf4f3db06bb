// SPDX-License-Identifier: Apache-2.0
// Quantising an activation is the activation, then the quantiser; and what is refused. A worked example stands for the order of rounding.
#include "waybill/quantize_activated.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

using ::testing::HasSubstr;

Tensor as_bf16(const Tensor& x) {
  Tensor y(DType::kBF16, {x.dim(0), x.dim(1)});
  for (std::int64_t i = 0; i < x.size(); ++i) y.as<bf16>()[i] = bf16(x.as<float>()[i]);
  return y;
}

struct Out {
  Tensor codes, scales;
  Out(std::int64_t S, std::int64_t C, std::int64_t scale_rows, std::int64_t scale_columns)
      : codes(Tensor::zeros(DType::kU8, {S, C})), scales(Tensor::zeros(DType::kF32, {scale_rows, scale_columns})) {}
  QuantizedView view() const { return {codes, scales, {}}; }
};

// h = [0 | 3] and [1000 | 2]: silu(0) * 3 = 0 and 1000 * 2; under the weights 1 and 0.25 the blocks are 0 and 500, scale 2.
TEST(QuantizeActivated, WorkedExample) {
  Tensor h(DType::kF32, {2, 2}), weight(DType::kF32, {2});
  const float values[] = {0, 3, 1000, 2};
  std::copy(values, values + 4, h.as<float>());
  weight.as<float>()[0] = 1, weight.as<float>()[1] = 0.25f;
  const Out out(2, 1, 2, 1);
  ActivatedRows x;
  x.h = h, x.weight = weight;
  quantize_activated(fp8_rows(), x, {}, out.view());
  EXPECT_EQ(out.codes.as<std::uint8_t>()[0], 0);
  EXPECT_EQ(out.scales.as<float>()[1], 2.0f);
  EXPECT_EQ(decode_element(ElementFormat::kE4M3, out.codes.as<std::uint8_t>()[1]), 256.0f);  // 250 lies between 240 and 256
}

TEST(QuantizeActivated, IsTheTwoOpsInARow) {
  const std::vector<std::int32_t> sizes = {44, 0, 1, 83};
  const std::int64_t S = 130, F = 160, rows_used = 128;
  const Tensor offsets = offsets_of(sizes);
  const QuantConfig rows_config = fp8_rows(), columns_config{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1};
  Tensor weight(DType::kF32, {S});
  for (std::int64_t s = 0; s < S; ++s) weight.as<float>()[s] = static_cast<float>(s % 7) * 0.3f;
  for (const Activation kind : {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared}) {
    for (const bool is_bf16 : {false, true}) {
      for (const bool is_gradient : {false, true}) {
        ActivationConfig activation;
        activation.kind = kind;
        const std::int64_t inner = activation_input_width(activation, F), C = is_gradient ? inner : F;
        const Tensor h = is_bf16 ? as_bf16(wild_tensor(S, inner, 31)) : wild_tensor(S, inner, 31),
                     da = is_bf16 ? as_bf16(wild_tensor(S, F, 32)) : wild_tensor(S, F, 32);
        Tensor values = Tensor::zeros(h.view().dtype, {S, C}), d_weight = Tensor::zeros(DType::kF32, {S}), want_weight = Tensor::zeros(DType::kF32, {S});
        if (is_gradient) {
          activation_backward(activation, h.view().rows(0, rows_used), weight.as<float>(), da.view().rows(0, rows_used), values.view().rows(0, rows_used),
                              want_weight.as<float>());
        } else {
          activation_forward(activation, h.view().rows(0, rows_used), weight.as<float>(), values.view().rows(0, rows_used));
        }
        ActivatedRows x;
        x.activation = activation, x.h = h, x.weight = weight;
        if (is_gradient) x.da = da, x.d_weight = d_weight;
        const std::int64_t blocks = block_row_offsets(offsets, 128).back();
        const Out want(S, C, rows_used, (C + 127) / 128), got(S, C, rows_used, (C + 127) / 128), want_columns(S, C, blocks, C), got_columns(S, C, blocks, C);
        quantize_both(rows_config, columns_config, values, offsets, want.view(), want_columns.view());
        quantize_both_activated(rows_config, columns_config, x, offsets, got.view(), got_columns.view());
        EXPECT_TRUE(bit_equal(want.codes, got.codes) && bit_equal(want.scales, got.scales));
        EXPECT_TRUE(bit_equal(want_columns.codes, got_columns.codes) && bit_equal(want_columns.scales, got_columns.scales));
        EXPECT_TRUE(bit_equal(want_weight, d_weight));
        const Out alone(S, C, rows_used, (C + 127) / 128);
        quantize_activated(rows_config, x, offsets, alone.view());
        EXPECT_TRUE(bit_equal(want.codes, alone.codes) && bit_equal(want.scales, alone.scales));
      }
    }
  }
}

TEST(QuantizeActivated, NoRowsAreLegalAndWriteNothing) {
  const Tensor h(DType::kF32, {0, 64}), offsets = offsets_of({0, 0});
  const Out room(1, 32, 1, 1);
  std::fill_n(room.codes.as<std::uint8_t>(), 32, std::uint8_t{0xab});
  ActivatedRows x;
  x.h = h;
  EXPECT_NO_THROW(quantize_activated(fp8_rows(), x, offsets, {room.codes.view().rows(0, 0), room.scales.view().rows(0, 0), {}}));
  for (int i = 0; i < 32; ++i) EXPECT_EQ(room.codes.as<std::uint8_t>()[i], 0xab);
  EXPECT_EQ(room.scales.as<float>()[0], 0.0f);
}

TEST(QuantizeActivated, RefusesWithTheValues) {
  const Tensor h(DType::kF32, {4, 65}), wide(DType::kF32, {4, 64}), weight(DType::kF32, {3}), da(DType::kF32, {4, 33}), d_weight(DType::kF32, {4});
  const Out out(4, 32, 4, 1);
  const auto refused = [&](const ActivatedRows& x) { return refusal([&] { quantize_activated(fp8_rows(), x, {}, out.view()); }); };
  ActivatedRows x;
  x.h = h;
  EXPECT_THAT(refused(x), HasSubstr("h must hold gate and up, 2F columns"));
  x.h = wide, x.weight = weight;
  EXPECT_THAT(refused(x), HasSubstr("weight must be contiguous f32 [4]"));
  x.weight = {}, x.d_weight = d_weight;
  EXPECT_THAT(refused(x), HasSubstr("da is not given"));
  x.da = da;
  EXPECT_THAT(refused(x), HasSubstr("da must be f32 [4, 32]"));
  EXPECT_THAT(refused({}), HasSubstr("h must be f32 or bf16"));
  x = {}, x.h = wide, x.h.stride[0] = 63;
  EXPECT_THAT(refused(x), HasSubstr("row stride 63 of h is less than its 64 columns"));
  x.h = wide, x.activation.kind = Activation::kClampedSwiGLU, x.activation.limit = -1;
  EXPECT_THAT(refused(x), HasSubstr("the clamp limit must be > 0, got -1"));
}

}  // namespace
}  // namespace waybill::testing
