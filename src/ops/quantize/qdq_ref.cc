// SPDX-License-Identifier: Apache-2.0
// quantize() and then dequantize(), group by group, on a gathered copy.
#include "ops/quantize/qdq_ref.h"

#include <algorithm>
#include <cstring>

#include "ops/quantize/quantize_ref.h"

namespace waybill {
namespace {

// Rows [begin, end) as the op sees them.
Tensor gathered(const TensorView& x, const TensorView& rows, std::int64_t begin, std::int64_t end) {
  Tensor copy = Tensor::zeros(DType::kF32, {end - begin, x.shape[1]});
  for (std::int64_t s = begin; s < end; ++s) {
    const std::int64_t row = rows ? rows.as<std::int32_t>()[s] : s;
    if (row < 0 || x.shape[1] == 0) continue;
    std::memcpy(copy.as<float>() + (s - begin) * x.shape[1], x.as<float>() + row * x.stride[0], static_cast<std::size_t>(x.shape[1]) * sizeof(float));
  }
  return copy;
}

// Groups one at a time, so that each may have its own seed; without seeds rows count from the tensor's first.
void group_ref(const QuantConfig& config, const Tensor& x, const TensorView& offsets, const TensorView& y) {
  const std::int64_t S = x.dim(0), C = x.dim(1), L = offsets ? offsets.shape[0] - 1 : 1;
  const std::int64_t block_rows = offsets ? block_row_offsets(offsets, config.block_rows).back() : (S + config.block_rows - 1) / config.block_rows;
  const bool is_f32 = config.scale == ScaleFormat::kPowerOfTwo || config.scale == ScaleFormat::kF32;
  Tensor codes(DType::kU8, {S, config.element == ElementFormat::kE2M1 ? C / 2 : C});
  Tensor scales(is_f32 ? DType::kF32 : DType::kU8, {block_rows, (C + config.block_columns - 1) / config.block_columns});
  Tensor group_scales(DType::kF32, {L});
  quantize_ref(config, x, offsets, {codes, scales, group_scales}, nullptr);
  dequantize_ref(config, {codes, scales, group_scales}, offsets, y, nullptr);
}

}  // namespace

void quantize_dequantize_ref(const QuantConfig& config, const QuantizeDequantizeArgs& args) {
  const std::int64_t S = args.offsets ? args.offsets.as<std::int32_t>()[args.offsets.shape[0] - 1] : args.y.shape[0];
  if (args.group_seeds == nullptr) return group_ref(config, gathered(args.x, args.rows, 0, S), args.offsets, args.y.rows(0, S));
  const std::int64_t L = args.offsets ? args.offsets.shape[0] - 1 : 1;
  for (std::int64_t g = 0; g < L; ++g) {
    const std::int64_t begin = args.offsets ? args.offsets.as<std::int32_t>()[g] : 0, end = args.offsets ? args.offsets.as<std::int32_t>()[g + 1] : S;
    QuantConfig seeded = config;
    seeded.seed = args.group_seeds[g];
    group_ref(seeded, gathered(args.x, args.rows, begin, end), {}, args.y.rows(begin, end));
  }
}

void hadamard_rows_ref(const TensorView& x, const TensorView& rows, const TensorView& offsets, std::uint16_t signs, const TensorView& y) {
  const std::vector<std::int32_t> first = hadamard_offsets(offsets);
  const std::int64_t C = x.shape[1];
  for (std::size_t g = 0; g + 1 < first.size(); ++g) {
    const std::int64_t begin = offsets.as<std::int32_t>()[g], end = offsets.as<std::int32_t>()[g + 1];
    for (std::int64_t block = 0; begin + block * kHadamardRows < end; ++block) {
      Tensor v = Tensor::zeros(DType::kF32, {kHadamardRows, C});
      const std::int64_t from = begin + block * kHadamardRows;
      const Tensor copy = gathered(x, rows, from, std::min(from + kHadamardRows, end));
      for (std::int64_t i = 0; i < copy.size(); ++i)
        v.as<float>()[i] = (signs >> (i / C) & 1) != 0 ? -0.25f * copy.as<float>()[i] : 0.25f * copy.as<float>()[i];
      // Sums and differences over row bits 0 to 3: the order of the additions, which every implementation keeps.
      for (std::int64_t half = 1; half < kHadamardRows; half *= 2) {
        for (std::int64_t i = 0; i < v.size(); ++i) {
          if ((i / C & half) != 0) continue;
          float &a = v.as<float>()[i], &b = v.as<float>()[i + half * C];
          const float sum = a + b, difference = a - b;
          a = sum, b = difference;
        }
      }
      if (v.size() > 0) std::memcpy(y.as<float>() + (first[g] + block * kHadamardRows) * C, v.as<float>(), static_cast<std::size_t>(v.size()) * sizeof(float));
    }
  }
}

void round_to_bf16_ref(const TensorView& x, const TensorView& y) {
  for (std::int64_t i = 0; i < x.size(); ++i) y.as<bf16>()[i] = bf16(x.as<float>()[i]);
}

}  // namespace waybill
