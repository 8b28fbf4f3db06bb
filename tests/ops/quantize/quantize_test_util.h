// SPDX-License-Identifier: Apache-2.0
// Owners of a quantized tensor and small helpers for the format tests.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "waybill/quantize.h"

namespace waybill::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Tensor offsets_of(const std::vector<std::int32_t>& sizes) {
  Tensor offsets(DType::kI32, {static_cast<std::int64_t>(sizes.size()) + 1});
  offsets.as<std::int32_t>()[0] = 0;
  for (std::size_t g = 0; g < sizes.size(); ++g) offsets.as<std::int32_t>()[g + 1] = offsets.as<std::int32_t>()[g] + sizes[g];
  return offsets;
}

// Values over many powers of two, so that blocks differ in scale.
inline Tensor wild_tensor(std::int64_t rows, std::int64_t columns, std::uint32_t seed) {
  Tensor tensor(DType::kF32, {rows, columns});
  std::mt19937 random(seed);
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    const float mantissa = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
    tensor.as<float>()[i] = std::ldexp(mantissa, static_cast<int>(random() % 13) - 6 + static_cast<int>((i / 97) % 9));
  }
  return tensor;
}

// Memory for quantize(), filled with a pattern first.
struct Quantized {
  QuantConfig config;
  Tensor codes, scales, group_scales;

  Quantized(const QuantConfig& given, std::int64_t S, std::int64_t C, const TensorView& offsets, std::uint8_t fill = 0xa5) : config(given) {
    const std::int64_t L = offsets ? offsets.shape[0] - 1 : 1;
    const std::int64_t block_rows = offsets ? block_row_offsets(offsets, config.block_rows).back() : (S + config.block_rows - 1) / config.block_rows;
    codes.resize(DType::kU8, {S, config.element == ElementFormat::kE2M1 ? C / 2 : C});
    const bool fp32 = config.scale == ScaleFormat::kF32 || config.scale == ScaleFormat::kPowerOfTwo;
    scales.resize(fp32 ? DType::kF32 : DType::kU8, {block_rows, (C + config.block_columns - 1) / config.block_columns});
    group_scales.resize(DType::kF32, {L});
    for (const Tensor* tensor : {&codes, &scales, &group_scales}) {
      if (tensor->size() > 0) std::memset(tensor->view().data, fill, static_cast<std::size_t>(tensor->size()) * size_bytes(tensor->view().dtype));
    }
  }
  QuantizedView view() const { return {codes, scales, group_scales}; }
};

inline Quantized quantized(const QuantConfig& config, const Tensor& x, const TensorView& offsets = {}, ThreadPool* pool = nullptr) {
  Quantized q(config, x.dim(0), x.dim(1), offsets);
  quantize(config, x, offsets, q.view(), Stream::cpu(pool));
  return q;
}

inline Tensor dequantized(const Quantized& q, std::int64_t S, std::int64_t C, const TensorView& offsets = {}, DType dtype = DType::kF32) {
  Tensor y = Tensor::zeros(dtype, {S, C});
  dequantize(q.config, q.view(), offsets, y);
  return y;
}

inline bool bit_equal(const Tensor& a, const Tensor& b) {
  return a.size() == b.size() && a.view().dtype == b.view().dtype &&
         (a.size() == 0 || std::memcmp(a.view().data, b.view().data, static_cast<std::size_t>(a.size()) * size_bytes(a.view().dtype)) == 0);
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace waybill::testing
