// SPDX-License-Identifier: Apache-2.0
// Quantise and dequantise in one pass: the loops. Every instruction set compiles them under its own target attribute. They do what
// codec.cc and quantize_ref.cc do, in fp32 and without branches per element; tests hold them equal to the bit.
//
// Rounding without codes: for a magnitude a with exponent e and elements of m fraction bits, c = 1.5 * 2^(e + 23 - m) has a unit in the last
// place of 2^(e - m), the elements' step at a. So (a + c) - c rounds a to the elements, ties to even, by one addition.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "waybill/quantize.h"
#include "waybill/random.h"

namespace waybill::detail {

#define WB_QDQ_INLINE inline __attribute__((always_inline))

constexpr std::int64_t kQdqChunk = 256;  // columns that one pass holds scales for

// One row of blocks: up to block_rows rows that share scales. A null row reads as zeros.
struct QdqBlock {
  const float* const* x;  // [num_rows]
  float* y;               // [num_rows, columns], rows y_stride apart; may be what x points at
  std::int64_t num_rows, columns, y_stride;
  float group_scale;        // kE4M3
  std::uint64_t key;        // stochastic: mix64 of the seed
  std::int64_t first_draw;  // counter of element (0, 0); a row has `columns` draws
};

WB_QDQ_INLINE std::int32_t bits_of(float value) { return std::bit_cast<std::int32_t>(value); }
WB_QDQ_INLINE float float_of(std::int32_t bits) { return std::bit_cast<float>(bits); }
constexpr std::int32_t kAbsMask = 0x7fffffff, kInfinityBits = 0x7f800000, kNaNBits = 0x7fc00000, kLargestBits = 0x7f7fffff;

template <ElementFormat kFormat>
struct ElementOf {
  static constexpr int kFraction = kFormat == ElementFormat::kE4M3 ? 3 : kFormat == ElementFormat::kE5M2 ? 2 : 1;
  static constexpr int kBias = kFormat == ElementFormat::kE4M3 ? 7 : kFormat == ElementFormat::kE5M2 ? 15 : 1;
  static constexpr float kLargest = kFormat == ElementFormat::kE4M3 ? 448.0f : kFormat == ElementFormat::kE5M2 ? 57344.0f : 6.0f;
  static constexpr std::int32_t kSmallestNormal = (128 - kBias) << 23;  // its exponent, in place

  // The exponent field of a's steps, in place; subnormal elements share the smallest normal one's.
  static WB_QDQ_INLINE std::int32_t exponent(float a) {
    const std::int32_t field = bits_of(a) & kInfinityBits;
    return field > kSmallestNormal ? field : kSmallestNormal;
  }
  // a in [0, kLargest].
  static WB_QDQ_INLINE float nearest(float a) {
    const float c = float_of((exponent(a) + ((23 - kFraction) << 23)) | 0x400000);
    return (a + c) - c;
  }
  static WB_QDQ_INLINE float stochastic(float a, std::uint32_t random) {
    const std::int32_t field = exponent(a) - (kFraction << 23);  // of one step
    const float step = float_of(field), steps = a * float_of((254 << 23) - field);
    const float below = static_cast<float>(static_cast<std::int32_t>(steps));
    const double nearness = static_cast<double>(steps - below) * 0x1p32;
    return (below + (static_cast<double>(random) < nearness ? 1.0f : 0.0f)) * step;
  }
  // Integers, whose minimum is one instruction: a choice of floats would be a branch. The bits of a NaN are larger than any number's.
  static WB_QDQ_INLINE float saturated(float magnitude) {
    constexpr std::int32_t kTop = std::bit_cast<std::int32_t>(kLargest);
    const std::int32_t bits = bits_of(magnitude);
    return float_of(bits < kTop ? bits : kTop);
  }
};

// A block's scale, as the formats of waybill/quantize.h store it, and the factor that brings values into the elements' range.
struct QdqScale {
  float scale, inverse;
};

template <ElementFormat kElement, ScaleFormat kScale>
struct QdqScheme {
  using Element = ElementOf<kElement>;

  // From the bits of the block's largest magnitude; NaN bits give a NaN scale.
  static WB_QDQ_INLINE QdqScale scale_of(std::int32_t amax, ScaleRule rule, float group) {
    const float finite = float_of(amax < kLargestBits ? amax : kLargestBits);
    float scale;
    float inverse = 0;
    if constexpr (kScale == ScaleFormat::kE8M0 || kScale == ScaleFormat::kPowerOfTwo) {
      constexpr std::int32_t kTop = std::bit_cast<std::int32_t>(Element::kLargest);
      const std::int32_t up = rule == ScaleRule::kRoundUp && (amax & 0x7fffff) > (kTop & 0x7fffff) ? 1 : 0;
      std::int32_t byte = (amax >> 23) - (kTop >> 23) + 127 + up;
      byte = amax == kInfinityBits ? 254 : byte;
      byte = byte < 0 ? 0 : byte;
      scale = float_of(byte == 0 ? 0x400000 : byte << 23);
      inverse = float_of(byte == 254 ? 0x400000 : (254 - byte) << 23);
    } else if constexpr (kScale == ScaleFormat::kF32) {
      const float ratio = finite / Element::kLargest;
      constexpr float kSmallest = std::numeric_limits<float>::min();
      scale = amax == 0 ? 1.0f : ratio > kSmallest ? ratio : kSmallest;
    } else {
      using Coarse = ElementOf<ElementFormat::kE4M3>;
      scale = Coarse::nearest(Coarse::saturated(finite / Element::kLargest * group));
    }
    return {amax > kInfinityBits ? float_of(kNaNBits) : scale, inverse};
  }

  static WB_QDQ_INLINE float to_element(float value, QdqScale s, float group) {
    if constexpr (kScale == ScaleFormat::kE8M0 || kScale == ScaleFormat::kPowerOfTwo) return value * s.inverse;
    if constexpr (kScale == ScaleFormat::kF32) return value / s.scale;
    return value * group / s.scale;
  }
  static WB_QDQ_INLINE float from_element(float element, QdqScale s, float group) {
    if constexpr (kScale == ScaleFormat::kE4M3) return element * s.scale / group;
    return element * s.scale;
  }

  // A finite value under a scale that is a number and not 0.
  template <bool kStochastic>
  static WB_QDQ_INLINE float round_trip(float value, QdqScale s, float group, std::uint32_t random) {
    const float ratio = to_element(value, s, group);
    const float magnitude = Element::saturated(float_of(bits_of(ratio) & kAbsMask));
    const float element = kStochastic ? Element::stochastic(magnitude, random) : Element::nearest(magnitude);
    const float signed_element = float_of(bits_of(element) | (bits_of(value) & ~kAbsMask));
    return from_element(signed_element, s, group);
  }
};

WB_QDQ_INLINE std::uint32_t draw(std::uint64_t key, std::int64_t counter) {
  return static_cast<std::uint32_t>(mix64(key ^ mix64(static_cast<std::uint64_t>(counter) * 0xd1342543de82ef95ull + 1)) >> 32);
}

// Blocks along the columns: scales for a chunk of columns side by side.
template <class Scheme, bool kStochastic>
WB_QDQ_INLINE void column_blocks(const QuantConfig& config, const QdqBlock& b) {
  const float group = b.group_scale;
  const ScaleRule rule = config.rule;
  std::int32_t amax[kQdqChunk];
  std::int32_t kept[kQdqChunk], fill[kQdqChunk];  // bits of the result, and what stands where none is kept: NaN or 0
  float scale[kQdqChunk], inverse[kQdqChunk], value[kQdqChunk];
  std::uint32_t random[kQdqChunk];
  for (std::int64_t first = 0; first < b.columns; first += kQdqChunk) {
    const std::int64_t width = b.columns - first < kQdqChunk ? b.columns - first : kQdqChunk;
    for (std::int64_t c = 0; c < width; ++c) amax[c] = 0;
    for (std::int64_t r = 0; r < b.num_rows; ++r) {
      const float* x = b.x[r];
      if (x == nullptr) continue;
      x += first;
      for (std::int64_t c = 0; c < width; ++c) {
        const std::int32_t bits = bits_of(x[c]) & kAbsMask;
        amax[c] = bits > amax[c] ? bits : amax[c];
      }
    }
    for (std::int64_t c = 0; c < width; ++c) {
      const QdqScale s = Scheme::scale_of(amax[c], rule, group);
      scale[c] = s.scale, inverse[c] = s.inverse;
      kept[c] = s.scale > 0.0f ? -1 : 0;
      fill[c] = s.scale != s.scale ? kNaNBits : 0;
    }
    for (std::int64_t r = 0; r < b.num_rows; ++r) {
      float* y = b.y + r * b.y_stride + first;
      const float* x = b.x[r] == nullptr ? nullptr : b.x[r] + first;
      if (x == nullptr) {
        for (std::int64_t c = 0; c < width; ++c) y[c] = float_of(fill[c]);
        continue;
      }
      if constexpr (kStochastic) {
        const std::int64_t counter = b.first_draw + r * b.columns + first;
        const std::uint64_t key = b.key;
        for (std::int64_t c = 0; c < width; ++c) random[c] = draw(key, counter + c);
      }
      for (std::int64_t c = 0; c < width; ++c) value[c] = x[c];
      for (std::int64_t c = 0; c < width; ++c) {
        const float rounded = Scheme::template round_trip<kStochastic>(value[c], {scale[c], inverse[c]}, group, kStochastic ? random[c] : 0u);
        y[c] = float_of((bits_of(rounded) & kept[c]) | fill[c]);
      }
    }
  }
}

// Blocks of several columns: one scale a block. kWidth fixes the loops' length; 0 = `width` columns, the short last block.
template <class Scheme, bool kStochastic, int kWidth>
WB_QDQ_INLINE void row_block(const QuantConfig& config, const QdqBlock& b, std::int64_t first, std::int64_t short_width) {
  constexpr int kLocal = kWidth > 0 ? kWidth : kQdqChunk;
  const std::int64_t width = kWidth > 0 ? kWidth : short_width;
  const float group = b.group_scale;
  std::int32_t largest[kLocal];
  for (std::int64_t c = 0; c < width; ++c) largest[c] = 0;
  for (std::int64_t r = 0; r < b.num_rows; ++r) {
    const float* x = b.x[r];
    if (x == nullptr) continue;
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int32_t bits = bits_of(x[first + c]) & kAbsMask;
      largest[c] = bits > largest[c] ? bits : largest[c];
    }
  }
  std::int32_t amax = 0;
  for (std::int64_t c = 0; c < width; ++c) amax = largest[c] > amax ? largest[c] : amax;
  const QdqScale s = Scheme::scale_of(amax, config.rule, group);
  // A NaN, or a block whose scale is 0: it is nothing beside its group.
  const bool is_filled = !(s.scale > 0.0f);
  const float fill = amax > kInfinityBits ? float_of(kNaNBits) : 0.0f;
  for (std::int64_t r = 0; r < b.num_rows; ++r) {
    float* y = b.y + r * b.y_stride + first;
    const float* x = b.x[r];
    if (x == nullptr || is_filled) {
      for (std::int64_t c = 0; c < width; ++c) y[c] = fill;
      continue;
    }
    float value[kLocal];  // y may be x
    for (std::int64_t c = 0; c < width; ++c) value[c] = x[first + c];
    if constexpr (kStochastic) {
      std::uint32_t random[kLocal];
      const std::int64_t counter = b.first_draw + r * b.columns + first;
      const std::uint64_t key = b.key;
      for (std::int64_t c = 0; c < width; ++c) random[c] = draw(key, counter + c);
      for (std::int64_t c = 0; c < width; ++c) y[c] = Scheme::template round_trip<true>(value[c], s, group, random[c]);
    } else {
      for (std::int64_t c = 0; c < width; ++c) y[c] = Scheme::template round_trip<false>(value[c], s, group, 0u);
    }
  }
}

template <class Scheme, bool kStochastic>
WB_QDQ_INLINE void row_blocks(const QuantConfig& config, const QdqBlock& b) {
  const std::int64_t width = config.block_columns;
  std::int64_t first = 0;
  if (width == 16) {
    for (; first + 16 <= b.columns; first += 16) row_block<Scheme, kStochastic, 16>(config, b, first, 0);
  } else if (width == 32) {
    for (; first + 32 <= b.columns; first += 32) row_block<Scheme, kStochastic, 32>(config, b, first, 0);
  } else if (width == 128) {
    for (; first + 128 <= b.columns; first += 128) row_block<Scheme, kStochastic, 128>(config, b, first, 0);
  }
  for (; first < b.columns; first += width) row_block<Scheme, kStochastic, 0>(config, b, first, width < b.columns - first ? width : b.columns - first);
}

// A row of blocks under one row of scales; formats with many one-row blocks call it a row at a time.
template <ElementFormat kElement, ScaleFormat kScale, bool kStochastic>
WB_QDQ_INLINE void qdq_block(const QuantConfig& config, const QdqBlock& block) {
  using Scheme = QdqScheme<kElement, kScale>;
  if (config.block_columns == 1)
    column_blocks<Scheme, kStochastic>(config, block);
  else
    row_blocks<Scheme, kStochastic>(config, block);
}

// The largest magnitude of a row, as bits; NaN counts as 0.
WB_QDQ_INLINE std::int32_t largest_number_bits(const float* x, std::int64_t count) {
  std::int32_t amax = 0;
  for (std::int64_t c = 0; c < count; ++c) {
    const std::int32_t bits = bits_of(x[c]) & kAbsMask, number = bits > kInfinityBits ? 0 : bits;
    amax = number > amax ? number : amax;
  }
  return amax;
}

// One block of the Hadamard transform: y = H D x on 16 rows; rows past num_rows and null rows are zeros.
WB_QDQ_INLINE void hadamard_block(const float* const* x, std::int64_t num_rows, std::int64_t columns, std::uint16_t signs, float* y) {
  constexpr std::int64_t kRows = kHadamardRows, kWidth = 32;
  for (std::int64_t first = 0; first < columns; first += kWidth) {
    const std::int64_t width = columns - first < kWidth ? columns - first : kWidth;
    float v[kRows][kWidth];
    for (std::int64_t r = 0; r < kRows; ++r) {
      const float* row = r < num_rows ? x[r] : nullptr;
      const float sign = (signs >> r & 1) != 0 ? -0.25f : 0.25f;
      for (std::int64_t c = 0; c < kWidth; ++c) v[r][c] = row != nullptr && c < width ? sign * row[first + c] : 0.0f;
    }
    for (std::int64_t half = 1; half < kRows; half *= 2) {
      for (std::int64_t r = 0; r < kRows; ++r) {
        if ((r & half) != 0) continue;
        for (std::int64_t c = 0; c < kWidth; ++c) {
          const float a = v[r][c], b = v[r + half][c];
          v[r][c] = a + b;
          v[r + half][c] = a - b;
        }
      }
    }
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t c = 0; c < width; ++c) y[r * columns + first + c] = v[r][c];
    }
  }
}

WB_QDQ_INLINE void bf16_run(const float* x, std::int64_t count, std::uint16_t* y) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(x[i]);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    y[i] = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
}

}  // namespace waybill::detail
