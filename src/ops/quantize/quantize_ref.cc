// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/quantize_ref.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "waybill/random.h"

namespace waybill {
namespace {

float load(const TensorView& view, std::int64_t index) {
  return view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[index] : static_cast<float>(static_cast<const bf16*>(view.data)[index]);
}

// One row of blocks: its rows [begin, end) of the tensor and its row in `scales`.
struct BlockRow {
  std::int64_t group, begin, end, scale_row;
};

std::vector<BlockRow> block_rows_of(const QuantConfig& config, std::int64_t S, const TensorView& offsets) {
  const std::int64_t L = offsets ? offsets.shape[0] - 1 : 1;
  std::vector<BlockRow> rows;
  for (std::int64_t g = 0; g < L; ++g) {
    const std::int64_t first = offsets ? offsets.as<std::int32_t>()[g] : 0, last = offsets ? offsets.as<std::int32_t>()[g + 1] : S;
    for (std::int64_t begin = first; begin < last; begin += config.block_rows) {
      rows.push_back({g, begin, std::min(begin + config.block_rows, last), static_cast<std::int64_t>(rows.size())});
    }
  }
  return rows;
}

// NaN beats every number.
float larger_magnitude(float amax, float value) {
  const float magnitude = std::fabs(value);
  return magnitude > amax || magnitude != magnitude ? magnitude : amax;
}

float largest_magnitude(const TensorView& x, std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end) {
  float amax = 0;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (std::int64_t c = begin; c < end && amax == amax; ++c) amax = larger_magnitude(amax, load(x, row * x.stride[0] + c));
  }
  return amax;
}

// The largest magnitude of whole rows; a NaN spoils its block only, not the group. (Not fmax: a signalling NaN would restart it.)
float largest_number(const TensorView& x, std::int64_t row_begin, std::int64_t row_end) {
  float amax = 0;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    for (std::int64_t c = 0; c < x.shape[1]; ++c) {
      const float magnitude = std::fabs(load(x, row * x.stride[0] + c));
      if (magnitude > amax) amax = magnitude;
    }
  }
  return amax;
}

// The fp32 scale of one group of an NVFP4 tensor.
float group_scale(float amax) {
  if (amax == 0) return 1.0f;
  return std::min(448.0f * 6.0f / std::min(amax, std::numeric_limits<float>::max()), std::numeric_limits<float>::max());
}

// A block's scale as stored, and how a value is brought into the range of the elements.
class BlockScale {
 public:
  BlockScale(const QuantConfig& config, float amax, float group) : config_(config), group_(group) {
    const float finite = std::min(amax, std::numeric_limits<float>::max());  // keeps NaN
    switch (config.scale) {
      case ScaleFormat::kE8M0:
      case ScaleFormat::kPowerOfTwo:
        byte_ = encode_e8m0(amax, config.element, config.rule);
        scale_ = decode_e8m0(byte_);
        break;
      case ScaleFormat::kF32:
        scale_ = amax == 0 ? 1.0f : amax != amax ? amax : std::max(finite / largest_value(config.element), std::numeric_limits<float>::min());
        break;
      case ScaleFormat::kE4M3:
        byte_ = encode_element(ElementFormat::kE4M3, amax != amax ? amax : finite / largest_value(config.element) * group);
        scale_ = decode_element(ElementFormat::kE4M3, byte_);
        break;
    }
  }

  float to_element(float value) const {
    if (scale_ != scale_) return scale_;
    switch (config_.scale) {
      case ScaleFormat::kE8M0:
      case ScaleFormat::kPowerOfTwo:
        return static_cast<float>(static_cast<double>(value) / scale_);  // exact: a power of two
      case ScaleFormat::kF32:
        return value / scale_;
      case ScaleFormat::kE4M3:
        break;
    }
    return scale_ == 0 ? 0.0f : value * group_ / scale_;
  }

  void store(const TensorView& scales, std::int64_t index) const {
    if (scales.dtype == DType::kF32) {
      static_cast<float*>(scales.data)[index] = scale_;
    } else {
      static_cast<std::uint8_t*>(scales.data)[index] = byte_;
    }
  }

 private:
  const QuantConfig& config_;
  float group_, scale_ = 0;
  std::uint8_t byte_ = 0;
};

void store_code(const QuantConfig& config, const TensorView& codes, std::int64_t row, std::int64_t column, std::uint8_t code) {
  std::uint8_t* out = static_cast<std::uint8_t*>(codes.data) + row * codes.stride[0];
  if (config.element != ElementFormat::kE2M1) {
    out[column] = code;
  } else if (column % 2 == 0) {
    out[column / 2] = static_cast<std::uint8_t>((out[column / 2] & 0xf0u) | code);
  } else {
    out[column / 2] = static_cast<std::uint8_t>((out[column / 2] & 0x0fu) | (code << 4));
  }
}

std::uint8_t load_code(const QuantConfig& config, const TensorView& codes, std::int64_t row, std::int64_t column) {
  const std::uint8_t* in = static_cast<const std::uint8_t*>(codes.data) + row * codes.stride[0];
  if (config.element != ElementFormat::kE2M1) return in[column];
  return static_cast<std::uint8_t>(column % 2 == 0 ? in[column / 2] & 0xfu : in[column / 2] >> 4);
}

float load_scale(const QuantConfig& config, const TensorView& scales, std::int64_t index) {
  switch (config.scale) {
    case ScaleFormat::kE8M0:
      return decode_e8m0(static_cast<const std::uint8_t*>(scales.data)[index]);
    case ScaleFormat::kE4M3:
      return decode_element(ElementFormat::kE4M3, static_cast<const std::uint8_t*>(scales.data)[index]);
    case ScaleFormat::kPowerOfTwo:
    case ScaleFormat::kF32:
      break;
  }
  return static_cast<const float*>(scales.data)[index];
}

void quantize_block(const QuantConfig& config, const TensorView& x, const QuantizedView& out, const BlockRow& block, std::int64_t begin, std::int64_t end,
                    float group) {
  const BlockScale scale(config, largest_magnitude(x, block.begin, block.end, begin, end), group);
  scale.store(out.scales, block.scale_row * out.scales.stride[0] + begin / config.block_columns * out.scales.stride[1]);
  for (std::int64_t row = block.begin; row < block.end; ++row) {
    for (std::int64_t c = begin; c < end; ++c) {
      const float value = scale.to_element(load(x, row * x.stride[0] + c));
      const std::uint64_t counter = static_cast<std::uint64_t>(row * x.shape[1] + c);
      store_code(config, out.codes, row, c,
                 config.stochastic ? encode_element_stochastic(config.element, value, static_cast<std::uint32_t>(random_u64(config.seed, counter) >> 32))
                                   : encode_element(config.element, value));
    }
  }
}

}  // namespace

void quantize_ref(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, ThreadPool* pool) {
  const std::int64_t C = x.shape[1];
  const std::vector<BlockRow> rows = block_rows_of(config, x.shape[0], offsets);
  std::vector<float> groups(static_cast<std::size_t>(offsets ? offsets.shape[0] - 1 : 1), 0.0f);
  if (config.scale == ScaleFormat::kE4M3) {
    for (const BlockRow& row : rows) {
      float& amax = groups[static_cast<std::size_t>(row.group)];
      amax = std::max(amax, largest_number(x, row.begin, row.end));
    }
    for (std::size_t g = 0; g < groups.size(); ++g) out.group_scales.as<float>()[g] = groups[g] = group_scale(groups[g]);
  }
  parallel_for(pool, static_cast<std::int64_t>(rows.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const BlockRow& row = rows[static_cast<std::size_t>(i)];
      for (std::int64_t c = 0; c < C; c += config.block_columns) {
        quantize_block(config, x, out, row, c, std::min(c + config.block_columns, C), groups[static_cast<std::size_t>(row.group)]);
      }
    }
  });
}

void dequantize_ref(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, ThreadPool* pool) {
  const std::int64_t C = y.shape[1];
  const std::vector<BlockRow> rows = block_rows_of(config, y.shape[0], offsets);
  parallel_for(pool, static_cast<std::int64_t>(rows.size()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const BlockRow& block = rows[static_cast<std::size_t>(i)];
      for (std::int64_t row = block.begin; row < block.end; ++row) {
        for (std::int64_t c = 0; c < C; ++c) {
          float value = decode_element(config.element, load_code(config, q.codes, row, c)) *
                        load_scale(config, q.scales, block.scale_row * q.scales.stride[0] + c / config.block_columns * q.scales.stride[1]);
          if (config.scale == ScaleFormat::kE4M3) value /= q.group_scales.as<float>()[block.group];
          const std::int64_t index = row * y.stride[0] + c;
          if (y.dtype == DType::kF32) {
            static_cast<float*>(y.data)[index] = value;
          } else {
            static_cast<bf16*>(y.data)[index] = bf16(value);
          }
        }
      }
    }
  });
}

}  // namespace waybill
