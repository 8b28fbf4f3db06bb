// SPDX-License-Identifier: Apache-2.0
// Element types and the 16-bit floats that the host and the device share.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "waybill/export.h"

namespace waybill {

enum class DType : std::uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI16 = 3, kI32 = 4, kI64 = 5, kU8 = 6, kU16 = 7, kF64 = 8, kF8E4M3 = 9, kF8E5M2 = 10 };

WB_API std::size_t size_bytes(DType dtype);
WB_API const char* to_string(DType dtype);

// bfloat16: the upper half of a float, rounded to nearest even; NaN stays NaN.
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  WB_HD explicit bf16(float value) : bits(from_float(value)) {}
  WB_HD operator float() const { return to_float(bits); }

  WB_HD static std::uint16_t from_float(float value) {
    std::uint32_t u = bit_cast_u32(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    u += 0x7fffu + ((u >> 16) & 1u);
    return static_cast<std::uint16_t>(u >> 16);
  }
  WB_HD static float to_float(std::uint16_t bits) { return bit_cast_f32(static_cast<std::uint32_t>(bits) << 16); }

 private:
  WB_HD static std::uint32_t bit_cast_u32(float f) {
    std::uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
  }
  WB_HD static float bit_cast_f32(std::uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
};
static_assert(sizeof(bf16) == 2);

// IEEE half. Conversions are exact and round to nearest even.
struct f16 {
  std::uint16_t bits;

  f16() = default;
  explicit f16(float value) : bits(from_float(value)) {}
  operator float() const { return to_float(bits); }

  WB_API static std::uint16_t from_float(float value);
  WB_API static float to_float(std::uint16_t bits);
};
static_assert(sizeof(f16) == 2);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<f16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::kI16;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<std::uint16_t> {
  static constexpr DType value = DType::kU16;
};

}  // namespace waybill
