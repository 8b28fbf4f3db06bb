// SPDX-License-Identifier: Apache-2.0
// quantize_dequantize(), hadamard_rows() and round_to_bf16(): every instruction set against the reference, to the bit, and the reference
// against its definition.
#include <gtest/gtest.h>

#include <bit>

#include "ops/quantize/qdq_kernels.h"
#include "ops/quantize/qdq_ref.h"
#include "ops/quantize/quantize_test_util.h"
#include "waybill/recipe.h"

namespace waybill::testing {
namespace {

struct Format {
  const char* name;
  QuantConfig config;
};

QuantConfig with(QuantConfig config, std::int64_t block_rows, std::int64_t block_columns, bool stochastic = false) {
  config.block_rows = block_rows, config.block_columns = block_columns, config.stochastic = stochastic, config.seed = 77;
  return config;
}

std::vector<Format> formats() {
  const ElementFormat e5m2 = ElementFormat::kE5M2;
  return {{"mxfp8_rows", mxfp8_rows()},
          {"mxfp8_rows_floor", mxfp8_rows(ElementFormat::kE4M3, ScaleRule::kFloor)},
          {"mxfp8_columns", mxfp8_columns()},
          {"mxfp8_e5m2_rows", mxfp8_rows(e5m2)},
          {"mxfp8_e5m2_columns_floor", mxfp8_columns(e5m2, ScaleRule::kFloor)},
          {"mxfp8_e5m2_stochastic", with(mxfp8_rows(e5m2), 1, 32, true)},
          {"fp8_rows", fp8_rows()},
          {"fp8_rows_f32", fp8_rows(ScaleFormat::kF32)},
          {"fp8_columns", with(fp8_rows(), 128, 1)},
          {"fp8_columns_f32_stochastic", with(fp8_rows(ScaleFormat::kF32), 128, 1, true)},
          {"fp8_tiles", fp8_tiles()},
          {"fp8_tiles_f32", fp8_tiles(ScaleFormat::kF32)},
          {"fp4_powers_of_two", with({ElementFormat::kE2M1, ScaleFormat::kPowerOfTwo}, 1, 16)},
          {"nvfp4_rows", nvfp4_rows()},
          {"nvfp4_rows_stochastic", with(nvfp4_rows(), 1, 16, true)},
          {"nvfp4_columns", with(nvfp4_rows(), 16, 1)},
          {"nvfp4_columns_stochastic", with(nvfp4_rows(), 16, 1, true)},
          {"nvfp4_tiles", with(nvfp4_rows(), 16, 16)},
          {"odd_block", with(fp8_rows(), 3, 5)},
          {"block_beyond_the_fast_path", with(fp8_rows(), 2, 300)}};
}

// Runs body under every instruction set of this machine.
template <class Body>
void with_every_set(const Body& body) {
  const detail::QdqKernelList& list = detail::usable_qdq_kernels();
  for (int i = 0; i < list.count; ++i) {
    SCOPED_TRACE(list.sets[i]->name);
    detail::force_quantize(list.sets[i]->name);
    body();
  }
  detail::force_quantize("");
}

Tensor filled(std::int64_t rows, std::int64_t columns) {
  Tensor y(DType::kF32, {rows, columns});
  for (std::int64_t i = 0; i < y.size(); ++i) y.as<float>()[i] = -77.0f;
  return y;
}

// In bits; any NaN equals any other, as the order of a product's factors decides which one it hands on.
std::int64_t first_difference(const Tensor& a, const Tensor& b) {
  for (std::int64_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a.as<float>()[i]) && std::isnan(b.as<float>()[i])) continue;
    if (std::bit_cast<std::uint32_t>(a.as<float>()[i]) != std::bit_cast<std::uint32_t>(b.as<float>()[i])) return i;
  }
  return -1;
}

void expect_same(const Tensor& fast, const Tensor& ref, const Tensor& x) {
  const std::int64_t at = first_difference(fast, ref);
  EXPECT_EQ(at, -1) << "element " << at << " of " << x.view().describe() << ": got " << (at < 0 ? 0 : fast.as<float>()[at]) << ", reference "
                    << (at < 0 ? 0 : ref.as<float>()[at]);
}

void compare(const QuantConfig& config, const Tensor& x, const TensorView& rows = {}, const TensorView& offsets = {}, const std::uint64_t* seeds = nullptr) {
  const std::int64_t S = rows ? rows.shape[0] : x.dim(0);
  const Tensor ref = filled(S, x.dim(1));
  quantize_dequantize_ref(config, {x, rows, offsets, ref, seeds});
  with_every_set([&] {
    ThreadPool pool(3);
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
      const Tensor fast = filled(S, x.dim(1));
      quantize_dequantize(config, {x, rows, offsets, fast, seeds}, Stream::cpu(threads));
      expect_same(fast, ref, x);
    }
  });
}

// Every code, every midpoint between codes and both its neighbours, of both signs, under a scale of 1 and under an odd one.
TEST(QuantizeDequantize, RoundsEveryCodeAndTieAsTheReference) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    const float largest = largest_value(format.config.element);
    std::vector<float> values;
    for (int code = 0; code < 256; ++code) {
      const float a = decode_element(format.config.element, static_cast<std::uint8_t>(code & 0x7f)),
                  b = decode_element(format.config.element, static_cast<std::uint8_t>((code & 0x7f) + 1));
      if (!(a <= largest) || !(b <= largest)) continue;
      const float middle = (a + b) / 2;
      for (const float v :
           {a, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity), std::nextafter(a, 0.0f), std::nextafter(a, kInfinity)}) {
        values.push_back((code & 0x80) != 0 ? -v : v);
      }
    }
    for (const float factor : {1.0f, 3.7e-5f, 0x1p100f, 0x1p-120f}) {
      // The first column and row hold the largest value, so that blocks in either direction have its scale.
      const std::int64_t C = 64, R = static_cast<std::int64_t>(values.size()) / 15 + 16;
      Tensor x = Tensor::zeros(DType::kF32, {R, C});
      for (std::int64_t i = 0; i < x.size(); ++i) {
        const bool top = i % C % 16 == 0 || i / C % 16 == 0;
        x.as<float>()[i] = factor * (top ? largest : values[static_cast<std::size_t>((i * 7 + i / C) % static_cast<std::int64_t>(values.size()))]);
      }
      compare(format.config, x);
    }
  }
}

// Samples of all bit patterns: subnormals, infinities and NaN included.
TEST(QuantizeDequantize, TakesAnyBitsAsTheReference) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    Tensor x(DType::kF32, {333, 96});
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const auto draw = random_u64(5, static_cast<std::uint64_t>(i));
      auto bits = static_cast<std::uint32_t>(draw);
      if (i / 96 % 3 != 0 && (bits & 0x7f800000u) == 0x7f800000u) bits &= 0xbfffffffu;  // two thirds of the rows are finite
      if (i / 96 % 3 == 1) bits = (bits & 0x807fffffu) | ((120u + bits % 16u) << 23);   // one third is ordinary
      if (i % 41 == 0) bits &= 0x80000000u;
      x.as<float>()[i] = std::bit_cast<float>(bits);
    }
    compare(format.config, x);
    compare(format.config, x, {}, offsets_of({0, 1, 15, 16, 17, 127, 128, 29}));
  }
}

TEST(QuantizeDequantize, GathersGroupsAndPaddingRowsAsTheReference) {
  const std::vector<std::int32_t> sizes = {44, 0, 1, 200, 32, 129};
  const Tensor offsets = offsets_of(sizes), x = wild_tensor(90, 160, 8);
  std::vector<std::int32_t> list(410);
  for (std::size_t s = 0; s < list.size(); ++s) list[s] = s % 11 == 3 ? -1 : static_cast<std::int32_t>((s * 37) % 90);
  const std::vector<std::uint64_t> seeds = {9, 8, 7, 6, 5, 4};
  const TensorView rows = TensorView::of(list.data(), {static_cast<std::int64_t>(list.size())});
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    compare(format.config, x, rows, offsets);
    compare(format.config, x, rows, offsets, seeds.data());
  }
}

TEST(QuantizeDequantize, InPlaceEqualsACopy) {
  for (const Format& format : formats()) {
    SCOPED_TRACE(format.name);
    with_every_set([&] {
      const Tensor x = wild_tensor(75, 96, 12), copy = filled(75, 96), in_place = wild_tensor(75, 96, 12);
      quantize_dequantize(format.config, {x, {}, {}, copy});
      quantize_dequantize(format.config, {in_place, {}, {}, in_place});
      expect_same(in_place, copy, x);
    });
  }
}

// The draw counts rows from the group's first: moving a group does not change it, and its seed alone decides.
TEST(QuantizeDequantize, StochasticGroupsDependOnTheirSeedAndContentsOnly) {
  const QuantConfig config = with(nvfp4_rows(), 1, 16, true);
  const Tensor group = wild_tensor(20, 32, 3), both(DType::kF32, {33, 32});
  const Tensor other = wild_tensor(13, 32, 4);
  std::memcpy(both.as<float>(), other.as<float>(), 13 * 32 * sizeof(float));
  std::memcpy(both.as<float>() + 13 * 32, group.as<float>(), 20 * 32 * sizeof(float));
  const std::uint64_t alone[] = {42}, pair[] = {41, 42}, changed[] = {43};
  const Tensor a(DType::kF32, {20, 32}), b(DType::kF32, {33, 32}), c(DType::kF32, {20, 32});
  quantize_dequantize(config, {group, {}, offsets_of({20}), a, alone});
  quantize_dequantize(config, {both, {}, offsets_of({13, 20}), b, pair});
  quantize_dequantize(config, {group, {}, offsets_of({20}), c, changed});
  EXPECT_EQ(std::memcmp(a.as<float>(), b.as<float>() + 13 * 32, 20 * 32 * sizeof(float)), 0);
  EXPECT_FALSE(bit_equal(a, c));
}

TEST(Hadamard, EqualsTheMatrixOfItsDefinition) {
  const std::vector<std::int32_t> sizes = {5, 0, 16, 33};
  const Tensor offsets = offsets_of(sizes);
  const std::int64_t C = 37;
  Tensor x(DType::kF32, {20, C});
  for (std::int64_t i = 0; i < x.size(); ++i)
    x.as<float>()[i] = static_cast<float>(static_cast<int>(mix64(static_cast<std::uint64_t>(i)) % 2001) - 1000);  // sums are exact
  std::vector<std::int32_t> list(54);
  for (std::size_t s = 0; s < list.size(); ++s) list[s] = s == 2 ? -1 : static_cast<std::int32_t>((s * 7) % 20);
  const TensorView rows = TensorView::of(list.data(), {54});
  const std::uint16_t signs = 0xb5c3;
  const std::vector<std::int32_t> first = hadamard_offsets(offsets);
  EXPECT_EQ(first, (std::vector<std::int32_t>{0, 16, 16, 32, 80}));
  const Tensor ref = filled(80, C);
  hadamard_rows_ref(x, rows, offsets, signs, ref);
  for (std::size_t g = 0; g < sizes.size(); ++g) {
    for (std::int64_t r = 0; r < first[g + 1] - first[g]; ++r) {
      for (std::int64_t c = 0; c < C; ++c) {
        double sum = 0;
        for (std::int64_t j = 0; j < 16; ++j) {
          const std::int64_t in_group = r / 16 * 16 + j;
          if (in_group >= sizes[g]) continue;
          const std::int32_t row = list[static_cast<std::size_t>(offsets.as<std::int32_t>()[g] + in_group)];
          if (row < 0) continue;
          const int negative = std::popcount(static_cast<unsigned>(r % 16 & j)) % 2 + (signs >> j & 1);
          sum += (negative % 2 == 1 ? -0.25 : 0.25) * static_cast<double>(x.as<float>()[row * C + c]);
        }
        ASSERT_EQ(ref.as<float>()[(first[g] + r) * C + c], sum) << "group " << g << " row " << r << " column " << c;
      }
    }
  }
  const Tensor wild = wild_tensor(20, C, 6);
  for (const Tensor* source : std::initializer_list<const Tensor*>{&x, &wild}) {
    const Tensor expected = filled(80, C);
    hadamard_rows_ref(*source, rows, offsets, signs, expected);
    with_every_set([&] {
      ThreadPool pool(2);
      const Tensor y = filled(80, C);
      hadamard_rows(*source, rows, offsets, signs, y, Stream::cpu(&pool));
      expect_same(y, expected, *source);
    });
  }
}

TEST(RoundToBf16, EqualsTheTypeForAnyBits) {
  Tensor x(DType::kF32, {1000, 331}), ref(DType::kBF16, {1000, 331});
  for (std::int64_t i = 0; i < x.size(); ++i) x.as<float>()[i] = std::bit_cast<float>(static_cast<std::uint32_t>(mix64(static_cast<std::uint64_t>(i))));
  for (std::int64_t i = 0; i < 4096; ++i) x.as<float>()[i] = std::bit_cast<float>(0x3f7f0000u + static_cast<std::uint32_t>(i * 0x1000));  // ties
  x.as<float>()[0] = kNaN, x.as<float>()[1] = kInfinity, x.as<float>()[2] = std::bit_cast<float>(0x7f800001u);
  round_to_bf16_ref(x, ref);
  with_every_set([&] {
    ThreadPool pool(2);
    const Tensor y(DType::kBF16, {1000, 331});
    round_to_bf16(x, y, Stream::cpu(&pool));
    EXPECT_TRUE(bit_equal(y, ref));
  });
}

TEST(QuantizeDequantize, RefusalsNameTheValues) {
  const Tensor x(DType::kF32, {4, 32}), y(DType::kF32, {4, 32}), narrow(DType::kF32, {4, 31});
  const std::int32_t far[] = {0, 1, 4, 2}, near[] = {3, 2, 1, 0};
  EXPECT_NE(refusal([&] {
              quantize_dequantize(mxfp8_rows(), {x, TensorView::of(far, {4}), {}, y});
            }).find("rows[2] = 4 is outside [-1, 4)"),
            std::string::npos);
  EXPECT_NE(refusal([&] { quantize_dequantize(mxfp8_rows(), {x, {}, offsets_of({3, 2}), y}); }).find("the groups have 5"), std::string::npos);
  EXPECT_NE(refusal([&] { quantize_dequantize(mxfp8_rows(), {narrow, {}, {}, narrow}); }).find("31 mod 32 = 31"), std::string::npos);
  EXPECT_NE(refusal([&] { quantize_dequantize(mxfp8_rows(), {x, TensorView::of(near, {4}), {}, x}); }).find("y may be x only"), std::string::npos);
  EXPECT_NE(refusal([&] { hadamard_rows(x, {}, offsets_of({4}), 0, y); }).find("[16, 32]"), std::string::npos);
  EXPECT_NE(refusal([&] { round_to_bf16(x, y); }).find("bf16"), std::string::npos);
}

TEST(RecipeFormats, AreThoseOfTheTable) {
  using enum Contraction;
  const auto shape = [](const RecipeConfig& recipe, Operand operand, Contraction along) {
    const QuantConfig format = operand_format(recipe, operand, along);
    return std::array<std::int64_t, 2>{format.block_rows, format.block_columns};
  };
  using Shape = std::array<std::int64_t, 2>;
  for (const auto& [kind, block] : {std::pair{Recipe::kFP8, 128}, std::pair{Recipe::kMXFP8, 32}, std::pair{Recipe::kNVFP4, 16}}) {
    RecipeConfig recipe;
    recipe.kind = kind;
    for (const Operand operand : {Operand::kActivation, Operand::kGradient}) {
      EXPECT_EQ(shape(recipe, operand, kColumns), (Shape{1, block}));
      EXPECT_EQ(shape(recipe, operand, kRows), (Shape{block, 1}));
      EXPECT_EQ(operand_format(recipe, operand, kRows).stochastic, kind == Recipe::kNVFP4 && operand == Operand::kGradient);
    }
    EXPECT_EQ(shape(recipe, Operand::kWeight, kColumns), kind == Recipe::kMXFP8 ? (Shape{1, 32}) : (Shape{block, block}));
    EXPECT_EQ(shape(recipe, Operand::kWeight, kRows), kind == Recipe::kMXFP8 ? (Shape{32, 1}) : (Shape{block, block}));
    EXPECT_FALSE(operand_format(recipe, Operand::kWeight, kRows).stochastic);
    EXPECT_EQ(operand_format(recipe, Operand::kWeight, kRows).element, kind == Recipe::kNVFP4 ? ElementFormat::kE2M1 : ElementFormat::kE4M3);
  }
  EXPECT_NE(refusal([] { operand_format({}, Operand::kWeight, kRows); }).find("fp32 has no blocks"), std::string::npos);
  EXPECT_NE(refusal([] { check_recipe_fit({Recipe::kMXFP8}, "F", 7984); }).find("F = 7984 does not fit MXFP8"), std::string::npos);
  EXPECT_EQ(refusal([] { check_recipe_fit({Recipe::kFP8}, "F", 7985); }), "accepted");
}

}  // namespace
}  // namespace waybill::testing
