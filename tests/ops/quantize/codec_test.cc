// SPDX-License-Identifier: Apache-2.0
// Codecs over every code and every bf16 input, against a search for the nearest value.
#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "ops/quantize/quantize_test_util.h"

namespace waybill::testing {
namespace {

struct Format {
  ElementFormat format;
  const char* name;
  int num_codes, sign_bit, largest_code;
  double largest, smallest;
};
const Format kFormats[] = {{ElementFormat::kE4M3, "E4M3", 256, 0x80, 0x7e, 448, 0x1p-9},
                           {ElementFormat::kE5M2, "E5M2", 256, 0x80, 0x7b, 57344, 0x1p-16},
                           {ElementFormat::kE2M1, "E2M1", 16, 0x8, 0x7, 6, 0.5}};

class Codec : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Codec, ::testing::ValuesIn(kFormats), [](const auto& param) { return std::string(param.param.name); });

// The value table, written from the definition of a minifloat and not from the codec.
TEST_P(Codec, EveryCodeHasTheValueOfItsBits) {
  const Format& f = GetParam();
  const int fraction_bits = f.format == ElementFormat::kE4M3 ? 3 : f.format == ElementFormat::kE5M2 ? 2 : 1;
  const int bias = f.format == ElementFormat::kE4M3 ? 7 : f.format == ElementFormat::kE5M2 ? 15 : 1;
  for (int code = 0; code < f.num_codes; ++code) {
    const int magnitude = code & (f.sign_bit - 1), exponent = magnitude >> fraction_bits, fraction = magnitude & ((1 << fraction_bits) - 1);
    const float got = decode_element(f.format, static_cast<std::uint8_t>(code));
    if (f.format == ElementFormat::kE4M3 && magnitude == 0x7f) {
      EXPECT_TRUE(std::isnan(got));
    } else if (f.format == ElementFormat::kE5M2 && exponent == 31) {
      EXPECT_TRUE(fraction == 0 ? std::isinf(got) : std::isnan(got)) << code;
    } else {
      const double unit = static_cast<double>(fraction) / (1 << fraction_bits);
      const double value = exponent == 0 ? std::ldexp(unit, 1 - bias) : std::ldexp(1 + unit, exponent - bias);
      EXPECT_EQ(got, static_cast<float>((code & f.sign_bit) != 0 ? -value : value)) << code;
      EXPECT_EQ(std::signbit(got), (code & f.sign_bit) != 0) << code;
      EXPECT_EQ(encode_element(f.format, got), code) << "a value must encode to its own code";
    }
  }
  EXPECT_EQ(largest_value(f.format), static_cast<float>(f.largest));
  EXPECT_EQ(decode_element(f.format, 1), static_cast<float>(f.smallest));
}

// The nearest magnitude by search; a tie goes to the even code.
int nearest_code(const Format& f, double magnitude) {
  int best = 0;
  double distance = magnitude;
  for (int code = 1; code <= f.largest_code; ++code) {
    const double d = std::abs(magnitude - decode_element(f.format, static_cast<std::uint8_t>(code)));
    if (d < distance || (d == distance && code % 2 == 0)) {
      best = code;
      distance = d;
    }
  }
  return best;
}

TEST_P(Codec, EveryBf16InputGoesToTheNearestCode) {
  const Format& f = GetParam();
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = bf16::to_float(static_cast<std::uint16_t>(bits));
    const int code = encode_element(f.format, value);
    const int sign = std::signbit(value) ? f.sign_bit : 0;
    if (std::isnan(value)) {
      EXPECT_EQ(code, f.format == ElementFormat::kE2M1 ? 0x7 : (sign | 0x7f)) << bits;
    } else {
      ASSERT_EQ(code, sign | nearest_code(f, std::min(static_cast<double>(std::abs(value)), f.largest))) << "input " << value;
    }
  }
}

TEST_P(Codec, NeighboursOfEveryTieRoundTheRightWay) {
  const Format& f = GetParam();
  for (int code = 0; code < f.largest_code; ++code) {
    const float below = decode_element(f.format, static_cast<std::uint8_t>(code)), above = decode_element(f.format, static_cast<std::uint8_t>(code + 1));
    const float middle = 0.5f * (below + above);
    EXPECT_EQ(encode_element(f.format, middle), code % 2 == 0 ? code : code + 1) << middle;
    EXPECT_EQ(encode_element(f.format, std::nextafter(middle, 0.0f)), code) << middle;
    EXPECT_EQ(encode_element(f.format, std::nextafter(middle, kInfinity)), code + 1) << middle;
  }
  EXPECT_EQ(encode_element(f.format, kInfinity), f.largest_code);
  EXPECT_EQ(encode_element(f.format, -kInfinity), f.largest_code | f.sign_bit);
  EXPECT_EQ(encode_element(f.format, 1e-45f), 0);
}

TEST_P(Codec, StochasticRoundingIsUnbiasedAndKeepsExactValues) {
  const Format& f = GetParam();
  std::mt19937 random(7);
  for (int code = 0; code < f.largest_code; code += 5) {
    const float below = decode_element(f.format, static_cast<std::uint8_t>(code)), above = decode_element(f.format, static_cast<std::uint8_t>(code + 1));
    EXPECT_EQ(encode_element_stochastic(f.format, below, 0), code);
    EXPECT_EQ(encode_element_stochastic(f.format, below, 0xffffffffu), code);
    const float value = below + 0.25f * (above - below);
    EXPECT_EQ(encode_element_stochastic(f.format, value, 0), code + 1);  // any chance at all is enough for the smallest draw
    EXPECT_EQ(encode_element_stochastic(f.format, value, 0xffffffffu), code);
    int up = 0;
    const int draws = 20000;
    for (int i = 0; i < draws; ++i) up += encode_element_stochastic(f.format, value, static_cast<std::uint32_t>(random())) == code + 1;
    EXPECT_NEAR(static_cast<double>(up) / draws, 0.25, 5 * std::sqrt(0.25 * 0.75 / draws)) << "seed 7, code " << code;  // five standard deviations
  }
  EXPECT_EQ(encode_element_stochastic(f.format, 1e30f, 0), f.largest_code);
}

TEST(E8m0, EveryByteIsItsPowerOfTwo) {
  for (int byte = 0; byte < 255; ++byte) EXPECT_EQ(decode_e8m0(static_cast<std::uint8_t>(byte)), static_cast<float>(std::ldexp(1.0, byte - 127))) << byte;
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
  EXPECT_GT(decode_e8m0(0), 0.0f);  // 2^-127, not zero
}

TEST(E8m0, EdgeInputsHaveTheirCodes) {
  for (const ScaleRule rule : {ScaleRule::kRoundUp, ScaleRule::kFloor}) {
    EXPECT_EQ(encode_e8m0(kNaN, ElementFormat::kE4M3, rule), 255);
    EXPECT_EQ(encode_e8m0(kInfinity, ElementFormat::kE4M3, rule), 254);
    EXPECT_EQ(encode_e8m0(0.0f, ElementFormat::kE4M3, rule), 0);
    EXPECT_EQ(encode_e8m0(1e-45f, ElementFormat::kE4M3, rule), 0);
  }
  EXPECT_EQ(encode_e8m0(std::numeric_limits<float>::max(), ElementFormat::kE4M3, ScaleRule::kRoundUp), 127 + 120);
}

// Both rules against their definition, for every positive bf16 amax and its fp32 neighbours.
TEST(E8m0, BothRulesFollowTheirDefinitionForEveryAmax) {
  for (const ElementFormat format : {ElementFormat::kE4M3, ElementFormat::kE5M2, ElementFormat::kE2M1}) {
    const double largest = largest_value(format);
    for (int bits = 1; bits < 0x7f80; ++bits) {
      const float base = bf16::to_float(static_cast<std::uint16_t>(bits));
      for (const float amax : {std::nextafter(base, 0.0f), base, std::nextafter(base, kInfinity)}) {
        if (amax == 0 || std::isinf(amax)) continue;
        const int up = encode_e8m0(amax, format, ScaleRule::kRoundUp) - 127, floor = encode_e8m0(amax, format, ScaleRule::kFloor) - 127;
        ASSERT_LE(static_cast<double>(amax), largest * std::ldexp(1.0, up)) << amax;
        if (up > -127) {
          ASSERT_GT(static_cast<double>(amax), largest * std::ldexp(1.0, up - 1)) << amax;
        }
        ASSERT_EQ(floor, std::max(std::ilogb(amax) - std::ilogb(largest), -127)) << amax;
      }
    }
  }
}

}  // namespace
}  // namespace waybill::testing
