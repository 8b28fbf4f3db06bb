// SPDX-License-Identifier: Apache-2.0
// What the three products of an expert's two matmuls must multiply, written out per recipe and expert: the formats, directions and seeds
// stand here once more, by hand, on top of quantize(), dequantize() and hadamard_rows_ref() only. Sums are in double.
#pragma once

#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ops/quantize/qdq_ref.h"
#include "waybill/random.h"
#include "waybill/recipe.h"

namespace waybill::test {

// A dense matrix of one expert, and with sums its magnitudes: sum |a b|, the scale of rounding errors.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<float> values;
  float at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

struct Sums {
  std::vector<double> values, magnitudes;
};

inline Matrix matrix_of(std::int64_t rows, std::int64_t columns, const std::function<float(std::int64_t, std::int64_t)>& value) {
  Matrix m{rows, columns, {}};
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) m.values.push_back(value(r, c));
  }
  return m;
}

// What a block is for. `kAlongRow`: along a row (1 x B). `kAlongColumn`: along a column (B x 1).
enum class Direction { kAlongRow, kAlongColumn };

// quantize() and dequantize() of one expert's matrix.
inline Matrix through_codes(const QuantConfig& config, const Matrix& m) {
  Matrix result = m;
  const auto blocks = [](std::int64_t size, std::int64_t block) { return (size + block - 1) / block; };
  const bool is_f32 = config.scale == ScaleFormat::kF32 || config.scale == ScaleFormat::kPowerOfTwo;
  Tensor codes(DType::kU8, {m.rows, config.element == ElementFormat::kE2M1 ? m.columns / 2 : m.columns}), group(DType::kF32, {1});
  Tensor scales(is_f32 ? DType::kF32 : DType::kU8, {blocks(m.rows, config.block_rows), blocks(m.columns, config.block_columns)});
  quantize(config, TensorView::of(m.values.data(), {m.rows, m.columns}), {}, {codes, scales, group});
  dequantize(config, {codes, scales, group}, {}, TensorView::of(result.values.data(), {m.rows, m.columns}));
  return result;
}

inline Matrix rotated(const Matrix& m, std::uint16_t signs) {
  const std::int32_t offsets[] = {0, static_cast<std::int32_t>(m.rows)};
  Matrix result{(m.rows + 15) / 16 * 16, m.columns, {}};
  result.values.resize(static_cast<std::size_t>(result.rows * result.columns));
  hadamard_rows_ref(TensorView::of(m.values.data(), {m.rows, m.columns}), {}, TensorView::of(offsets, {2}), signs,
                    TensorView::of(result.values.data(), {result.rows, result.columns}));
  return result;
}

enum class Role { kRows, kGradient, kWeight };

// One product's number in the contract of random numbers (src/moe/recipe_operands.h): second dgrad 1, second wgrad 2, first dgrad 3, first wgrad 4.
struct Randomness {
  std::uint64_t layer_seed = 0, product = 0, expert = 0;
  std::uint64_t seed() const { return random_u64(random_u64(layer_seed, product), expert); }
  std::uint16_t signs() const { return static_cast<std::uint16_t>(random_u64(layer_seed, 0x100 + product)); }
};

// An operand as the recipe multiplies it. `is_wgrad`: the product contracts along the rows of slots.
inline Matrix operand(Recipe recipe, const Matrix& m, Role role, Direction direction, bool is_wgrad, const Randomness& random) {
  const bool row = direction == Direction::kAlongRow;
  const auto shaped = [row](QuantConfig config, std::int64_t block) {
    config.block_rows = row ? 1 : block, config.block_columns = row ? block : 1;
    return config;
  };
  switch (recipe) {
    case Recipe::kF32:
      return m;
    case Recipe::kBF16: {
      Matrix result = m;
      for (float& value : result.values) value = static_cast<float>(bf16(value));
      return result;
    }
    case Recipe::kFP8:
      return through_codes(role == Role::kWeight ? fp8_tiles() : shaped(fp8_rows(), 128), m);
    case Recipe::kMXFP8:
      return through_codes(shaped(mxfp8_rows(), 32), m);
    case Recipe::kNVFP4:
      break;
  }
  QuantConfig config = shaped(nvfp4_rows(), 16);
  if (role == Role::kWeight) config.block_rows = config.block_columns = 16;
  config.stochastic = role == Role::kGradient;
  config.seed = random.seed();
  return through_codes(config, is_wgrad ? rotated(m, random.signs()) : m);
}

// [a.rows, b.rows]: sum over columns of a and b.
inline Sums product(const Matrix& a, const Matrix& b) {
  Sums s;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < b.rows; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t c = 0; c < a.columns; ++c) {
        const double term = static_cast<double>(a.at(i, c)) * static_cast<double>(b.at(j, c));
        sum += term, magnitude += std::abs(term);
      }
      s.values.push_back(sum), s.magnitudes.push_back(magnitude);
    }
  }
  return s;
}

inline Matrix transposed(const Matrix& m) {
  return matrix_of(m.columns, m.rows, [&](std::int64_t r, std::int64_t c) { return m.at(c, r); });
}

// The worst |actual - expected| in units of its bound: a chain of `terms` fp32 multiply-adds, rounded once more at the end.
inline double worst_ratio(std::span<const float> actual, const Sums& expected, std::int64_t terms) {
  double worst = actual.size() == expected.values.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(actual.size(), expected.values.size()); ++i) {
    const double bound = (static_cast<double>(terms) + 2) * 0x1p-24 * expected.magnitudes[i] + 1e-40;
    worst = std::max(worst, std::abs(static_cast<double>(actual[i]) - expected.values[i]) / bound);
  }
  return std::isfinite(worst) ? worst : HUGE_VAL;
}

}  // namespace waybill::test
