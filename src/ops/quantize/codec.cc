// SPDX-License-Identifier: Apache-2.0
// Conversions of single values. A minifloat with m fraction bits, bias b: code = (exponent + b - 1) * 2^m + n, where n counts steps of
// 2^(exponent - m); a carry out of n moves to the next exponent by itself, and subnormals are the row exponent = 1 - b.
#include <algorithm>
#include <bit>
#include <limits>

#include "ops/quantize/quantize_ref.h"

namespace waybill {
namespace {

struct Minifloat {
  int fraction_bits, bias;
  std::uint8_t largest_code, nan_code, sign_bit;
  float largest;
};

const Minifloat& traits(ElementFormat format) {
  static constexpr Minifloat kTraits[] = {{3, 7, 0x7e, 0x7f, 0x80, 448.0f}, {2, 15, 0x7b, 0x7f, 0x80, 57344.0f}, {1, 1, 0x7, 0x7, 0x8, 6.0f}};
  WB_CHECK(static_cast<int>(format) <= 2, "unknown element format {}", static_cast<int>(format));
  return kTraits[static_cast<int>(format)];
}

double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52); }

int float_exponent(float magnitude) { return static_cast<int>(std::bit_cast<std::uint32_t>(magnitude) >> 23) - 127; }  // -127 for subnormals

// `round` turns a non-negative number of steps, exact in double, into an integer.
template <class Round>
std::uint8_t encode(ElementFormat format, float value, const Round& round) {
  const Minifloat& t = traits(format);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint8_t sign = (bits >> 31) != 0 ? t.sign_bit : std::uint8_t{0};
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude != magnitude) return format == ElementFormat::kE2M1 ? t.nan_code : static_cast<std::uint8_t>(sign | t.nan_code);
  if (magnitude >= t.largest) return static_cast<std::uint8_t>(sign | t.largest_code);
  const int exponent = std::max(float_exponent(magnitude), 1 - t.bias);
  const int steps = round(static_cast<double>(magnitude) * power_of_two(t.fraction_bits - exponent));
  const int code = ((exponent + t.bias - 1) << t.fraction_bits) + steps;
  return static_cast<std::uint8_t>(sign | std::min<int>(code, t.largest_code));
}

// Adding 2^52 leaves no bit for the fraction, so the addition rounds to nearest even.
int nearest_even(double steps) { return static_cast<int>((steps + 0x1p52) - 0x1p52); }

// The smallest p with amax <= largest * 2^p, for a finite amax > 0.
int exponent_round_up(float amax, const Minifloat& t) {
  int p = std::max(float_exponent(amax) - float_exponent(t.largest) - 1, -127);
  while (static_cast<double>(amax) > static_cast<double>(t.largest) * power_of_two(p)) ++p;
  return p;
}

}  // namespace

std::uint8_t encode_element(ElementFormat format, float value) { return encode(format, value, nearest_even); }

std::uint8_t encode_element_stochastic(ElementFormat format, float value, std::uint32_t random) {
  return encode(format, value, [random](double steps) {
    const int below = static_cast<int>(steps);
    return below + (static_cast<double>(random) < (steps - below) * 0x1p32 ? 1 : 0);
  });
}

float decode_element(ElementFormat format, std::uint8_t code) {
  const Minifloat& t = traits(format);
  const int magnitude = code & (t.sign_bit - 1);
  const float sign = (code & t.sign_bit) != 0 ? -1.0f : 1.0f;
  if (magnitude > t.largest_code) {
    if (format == ElementFormat::kE5M2 && magnitude == 0x7c) return sign * std::numeric_limits<float>::infinity();
    return std::numeric_limits<float>::quiet_NaN();
  }
  const int field = magnitude >> t.fraction_bits, fraction = magnitude & ((1 << t.fraction_bits) - 1);
  const int steps = field == 0 ? fraction : fraction + (1 << t.fraction_bits);
  return sign * static_cast<float>(steps * power_of_two(std::max(field, 1) - t.bias - t.fraction_bits));
}

float largest_value(ElementFormat format) { return traits(format).largest; }

std::uint8_t encode_e8m0(float amax, ElementFormat format, ScaleRule rule) {
  if (amax != amax) return 255;
  WB_CHECK(amax >= 0, "the largest magnitude of a block cannot be negative: {}", amax);
  if (amax == 0) return 0;
  if (amax > std::numeric_limits<float>::max()) return 254;
  const Minifloat& t = traits(format);
  const int exponent = rule == ScaleRule::kFloor ? float_exponent(amax) - float_exponent(t.largest) : exponent_round_up(amax, t);
  return static_cast<std::uint8_t>(std::clamp(exponent + 127, 0, 254));
}

float decode_e8m0(std::uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(power_of_two(byte - 127));
}

}  // namespace waybill
