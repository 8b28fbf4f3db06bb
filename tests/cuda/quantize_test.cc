// SPDX-License-Identifier: Apache-2.0
// The GPU quantisers against the CPU's loops, to the bit: every format on ragged groups with hard values, exhaustive inputs, both directions,
// turned codes, swizzled scales, back to wide values.
#include <cmath>
#include <limits>

#include "core/cuda/graph.h"
#include "cuda/quantize_harness.h"
#include "waybill/quantize_gathered.h"

namespace waybill::cuda {
namespace {

Stream stream_of(const CudaStream& s) { return {kGpu, s.get(), nullptr}; }

class QuantizeCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    WB_NEEDS_GPU();
    register_quantize();
  }
  Pair wild(DType dtype, std::int64_t rows, std::int64_t columns, unsigned seed) {
    Pair x(dtype, {rows, columns}, false);
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < x.host.size(); ++i) {
      const float v = wild_value(random, i);
      dtype == DType::kF32 ? void(x.host.as<float>()[i] = v) : void(x.host.as<bf16>()[i] = bf16(v));
    }
    x.upload();
    return x;
  }
  Pair offsets(const std::vector<int>& counts) {
    const std::vector<std::int32_t> values = offsets_of(counts);
    Pair o(DType::kI32, {static_cast<std::int64_t>(values.size())}, false);
    std::copy(values.begin(), values.end(), o.host.as<std::int32_t>());
    o.upload();
    return o;
  }
  void expect_equal(const QuantConfig& config, const Pair& x, const Pair& offs, bool with_turned, bool with_swizzled) {
    const std::int64_t S = x.host.dim(0), C = x.host.dim(1);
    const CodedPair q(config, S, C, offs.cpu(), with_turned, with_swizzled);
    quantize(config, x.cpu(), offs.cpu(), q.cpu());
    DeviceStatus status;
    WB_TRY_CUDA(cudaDeviceSynchronize());
    const CudaStream s;
    quantize(config, x.gpu(), offs.gpu(), q.gpu(), stream_of(s), status.device_ptr());
    s.synchronize();
    EXPECT_EQ(q.difference(), "") << name_of(config) << " [" << S << ", " << C << "] " << to_string(x.cpu().dtype);
    EXPECT_EQ(status.read(s).flags, kStatusOk);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Pair y(dtype, {S, C});
      dequantize(config, q.cpu(), offs.cpu(), y.cpu());
      WB_TRY_CUDA(cudaDeviceSynchronize());
      dequantize(config, q.gpu(), offs.gpu(), y.gpu(), stream_of(s));
      s.synchronize();
      EXPECT_EQ(y.difference("values"), "") << name_of(config) << " back to " << to_string(dtype);
    }
  }
};

std::vector<QuantConfig> formats() {
  std::vector<QuantConfig> all;
  for (const ElementFormat element : {ElementFormat::kE4M3, ElementFormat::kE5M2}) {
    for (const ScaleRule rule : {ScaleRule::kRoundUp, ScaleRule::kFloor}) {
      for (const ScaleFormat scale : {ScaleFormat::kE8M0, ScaleFormat::kPowerOfTwo, ScaleFormat::kF32}) {
        if (scale == ScaleFormat::kF32 && rule == ScaleRule::kFloor) continue;
        for (const auto& [rows, columns] : {std::pair(1, 32), std::pair(1, 128), std::pair(32, 1), std::pair(128, 1), std::pair(128, 128)}) {
          all.push_back({element, scale, rule, rows, columns});
        }
      }
    }
  }
  all.push_back(nvfp4_rows());
  for (const auto& [rows, columns] : {std::pair(16, 1), std::pair(16, 16)})
    all.push_back({ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, rows, columns});
  all.push_back({ElementFormat::kE2M1, ScaleFormat::kE8M0, ScaleRule::kRoundUp, 1, 32});
  all.push_back({ElementFormat::kE2M1, ScaleFormat::kE8M0, ScaleRule::kFloor, 32, 1});
  all.push_back({ElementFormat::kE4M3, ScaleFormat::kE8M0, ScaleRule::kRoundUp, 32, 32});
  return all;
}

const std::vector<int> kRagged = {0, 1, 15, 16, 17, 127, 128, 129, 130, 0, 31, 32, 33, 300, 0};

TEST_F(QuantizeCuda, EveryFormatMatchesTheCpuOnRaggedGroups) {
  const Pair offs = offsets(kRagged);
  const std::int64_t S = offsets_of(kRagged).back() + 37;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const std::int64_t C : {std::int64_t{128}, std::int64_t{416}, std::int64_t{768}}) {
      const Pair x = wild(dtype, S, C, static_cast<unsigned>(C));
      for (const QuantConfig& config : formats()) {
        if (config.scale == ScaleFormat::kE8M0 && C % config.block_columns != 0) continue;  // refused: MX blocks are whole
        const bool turns = config.element != ElementFormat::kE2M1 && (config.block_rows == 128 || C == 128);
        const bool swizzles = config.block_rows == 1 && (config.scale == ScaleFormat::kE8M0 || config.scale == ScaleFormat::kE4M3);
        expect_equal(config, x, offs, turns, swizzles);
      }
    }
  }
}

TEST_F(QuantizeCuda, WidthsThatFitNoVectorMatch) {
  const Pair offs = offsets({5, 0, 200, 1});
  for (const std::int64_t C : {std::int64_t{1}, std::int64_t{37}, std::int64_t{130}, std::int64_t{328}}) {
    const Pair x = wild(DType::kBF16, 210, C, 9);
    for (const ScaleFormat scale : {ScaleFormat::kPowerOfTwo, ScaleFormat::kF32}) {
      expect_equal(fp8_rows(scale), x, offs, false, false);
      expect_equal(fp8_tiles(scale), x, offs, true, false);
      expect_equal({ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 128, 1}, x, offs, true, false);
    }
  }
}

// Every bf16, as the value beside a block maximum of every exponent: all codes, ties and subnormals of each format occur.
TEST_F(QuantizeCuda, EveryBf16UnderScalesOfManyExponents) {
  Pair x(DType::kBF16, {2048, 4096}, false);
  for (std::int64_t row = 0; row < 2048; ++row) {
    for (std::int64_t c = 0; c < 4096; ++c) {
      // 16 rows hold all 65,536 values in order, so that a block spans few exponents; later rows mix in one large value per 16.
      const auto value = static_cast<std::uint16_t>(row % 16 * 4096 + c);
      const auto top = static_cast<std::uint16_t>((row / 16 * 2 + 1) << 7 | (c >> 4 & 0x7f));
      x.host.as<bf16>()[row * 4096 + c].bits = row >= 16 && c % 16 == 0 ? top : value;
    }
  }
  x.upload();
  for (const QuantConfig& config : {mxfp8_rows(), mxfp8_rows(ElementFormat::kE5M2), mxfp8_rows(ElementFormat::kE4M3, ScaleRule::kFloor), mxfp8_columns(),
                                    fp8_rows(), fp8_rows(ScaleFormat::kF32), fp8_tiles(), nvfp4_rows()}) {
    expect_equal(config, x, {}, false, false);
  }
}

TEST_F(QuantizeCuda, EveryCodeUnderEveryScaleComesBack) {
  for (const ElementFormat element : {ElementFormat::kE4M3, ElementFormat::kE5M2, ElementFormat::kE2M1}) {
    for (const ScaleFormat scale : {ScaleFormat::kE8M0, ScaleFormat::kE4M3}) {
      const std::int64_t C = 512, block = element == ElementFormat::kE2M1 ? 16 : 32;
      CodedPair q({element, scale, ScaleRule::kRoundUp, 1, block}, 256, C, {}, false, false);
      auto *codes = static_cast<std::uint8_t*>(q.codes.host.view().data), *scales = static_cast<std::uint8_t*>(q.scales.host.view().data);
      for (std::int64_t i = 0; i < q.codes.host.size(); ++i) codes[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
      for (std::int64_t i = 0; i < q.scales.host.size(); ++i) scales[i] = static_cast<std::uint8_t>(i / (C / block));
      q.group_scales.host.as<float>()[0] = 37.25f;
      q.codes.upload(), q.scales.upload(), q.group_scales.upload();
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Pair y(dtype, {256, C});
        dequantize(q.config, q.cpu(), {}, y.cpu());
        WB_TRY_CUDA(cudaDeviceSynchronize());
        dequantize(q.config, q.gpu(), {}, y.gpu(), {kGpu, nullptr, nullptr});
        EXPECT_EQ(y.difference("values"), "") << name_of(q.config);
      }
    }
  }
}

TEST_F(QuantizeCuda, BothDirectionsFromOneReadAreTwoCalls) {
  const Pair offs = offsets(kRagged);
  const Pair x = wild(DType::kBF16, offsets_of(kRagged).back() + 5, 392, 3), narrow = wild(DType::kF32, offsets_of(kRagged).back() + 5, 416, 4);
  for (const int block : {32, 128}) {
    for (const ElementFormat element : {ElementFormat::kE4M3, ElementFormat::kE5M2}) {
      for (const ScaleFormat scale : {ScaleFormat::kE8M0, ScaleFormat::kPowerOfTwo, ScaleFormat::kF32}) {
        for (const bool swizzle : {false, true}) {
          if (swizzle && scale != ScaleFormat::kE8M0) continue;
          const Pair& input = scale == ScaleFormat::kE8M0 ? narrow : x;
          if (scale == ScaleFormat::kE8M0 && block == 128) continue;
          const std::int64_t S = input.host.dim(0), C = input.host.dim(1);
          const CodedPair rows({element, scale, ScaleRule::kRoundUp, 1, block}, S, C, offs.cpu(), false, swizzle);
          const CodedPair columns({element, scale, ScaleRule::kRoundUp, block, 1}, S, C, offs.cpu(), true, false);
          quantize_both(rows.config, columns.config, input.cpu(), offs.cpu(), rows.cpu(), columns.cpu());
          WB_TRY_CUDA(cudaDeviceSynchronize());
          quantize_both(rows.config, columns.config, input.gpu(), offs.gpu(), rows.gpu(), columns.gpu(), {kGpu, nullptr, nullptr});
          EXPECT_EQ(rows.difference(), "") << name_of(rows.config);
          EXPECT_EQ(columns.difference(), "") << name_of(columns.config);
        }
      }
    }
  }
}

// Rows found through a list, -1 among them, are those of a copy in that order.
TEST_F(QuantizeCuda, RowsOfAListAreThoseOfACopy) {
  const Pair offs = offsets(kRagged);
  const std::int64_t S = offsets_of(kRagged).back() + 5, R = 61;
  for (const std::int64_t C : {std::int64_t{128}, std::int64_t{416}}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Pair x = wild(dtype, R, C, 21);
      Pair list(DType::kI32, {S}, false);
      for (std::int64_t s = 0; s < S; ++s) list.host.as<std::int32_t>()[s] = s % 7 == 3 ? -1 : static_cast<std::int32_t>(s * 29 % R);
      list.upload();
      for (const QuantConfig& config : {fp8_rows(), fp8_rows(ScaleFormat::kF32), mxfp8_rows(), mxfp8_columns(), nvfp4_rows(), fp8_tiles(),
                                        QuantConfig{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1},
                                        QuantConfig{ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 16, 16}}) {
        const CodedPair q(config, S, C, offs.cpu(), config.block_rows == 128, false);
        quantize_gathered(config, x.cpu(), list.cpu(), offs.cpu(), q.cpu());
        WB_TRY_CUDA(cudaDeviceSynchronize());
        quantize_gathered(config, x.gpu(), list.gpu(), offs.gpu(), q.gpu(), {kGpu, nullptr, nullptr});
        EXPECT_EQ(q.difference(), "") << name_of(config) << ", " << C << " columns of " << to_string(dtype);
      }
      const CodedPair rows(fp8_rows(), S, C, offs.cpu(), false, false);
      const CodedPair columns({ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1}, S, C, offs.cpu(), true, false);
      quantize_both_gathered(rows.config, columns.config, x.cpu(), list.cpu(), offs.cpu(), rows.cpu(), columns.cpu());
      WB_TRY_CUDA(cudaDeviceSynchronize());
      quantize_both_gathered(rows.config, columns.config, x.gpu(), list.gpu(), offs.gpu(), rows.gpu(), columns.gpu(), {kGpu, nullptr, nullptr});
      EXPECT_EQ(rows.difference(), "");
      EXPECT_EQ(columns.difference(), "");
    }
  }
}

TEST_F(QuantizeCuda, StochasticRoundingDrawsTheSameNumbers) {
  const Pair offs = offsets({100, 0, 57});
  const Pair x = wild(DType::kBF16, 160, 256, 5);
  for (QuantConfig config : {mxfp8_rows(), fp8_rows(ScaleFormat::kF32), nvfp4_rows(), mxfp8_columns(ElementFormat::kE5M2)}) {
    config.stochastic = true, config.seed = 77;
    expect_equal(config, x, offs, false, false);
  }
}

TEST_F(QuantizeCuda, ManyGroupsAndNone) {
  std::mt19937 random(3);
  std::vector<int> counts(4096);
  for (int& c : counts) c = random() % 3 == 0 ? 0 : static_cast<int>(random() % 5);
  counts[77] = 700;
  const Pair many = offsets(counts), none = offsets({0, 0, 0});
  const Pair x = wild(DType::kBF16, offsets_of(counts).back() + 3, 64, 6);
  for (const QuantConfig& config :
       {mxfp8_rows(), mxfp8_columns(), nvfp4_rows(), fp8_tiles(), QuantConfig{ElementFormat::kE4M3, ScaleFormat::kF32, ScaleRule::kRoundUp, 128, 1}}) {
    expect_equal(config, x, many, config.block_rows == 128, config.block_rows == 1);
    expect_equal(config, x, none, config.block_rows == 128, config.block_rows == 1);
  }
}

TEST_F(QuantizeCuda, RowsWithStrides) {
  const Pair offs = offsets({70, 58});
  const Pair x = wild(DType::kBF16, 128, 512, 8);
  for (const QuantConfig& config : {fp8_rows(), mxfp8_columns(), nvfp4_rows()}) {
    const CodedPair q(config, 128, 256, offs.cpu(), false, false);
    const auto middle = [](TensorView v) {
      v.data = static_cast<std::uint8_t*>(v.data) + 128 * 2, v.shape[1] = 256;
      return v;
    };
    quantize(config, middle(x.cpu()), offs.cpu(), q.cpu());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    quantize(config, middle(x.gpu()), offs.gpu(), q.gpu(), {kGpu, nullptr, nullptr});
    EXPECT_EQ(q.difference(), "") << name_of(config);
  }
}

TEST_F(QuantizeCuda, ScalesWithStrides) {
  const Pair offs = offsets({70, 58});
  const Pair x = wild(DType::kBF16, 128, 512, 12);
  for (const QuantConfig& config : {fp8_rows(), mxfp8_rows(), mxfp8_columns(), fp8_tiles(), nvfp4_rows(),
                                    QuantConfig{ElementFormat::kE4M3, ScaleFormat::kE8M0, ScaleRule::kRoundUp, 16, 16}}) {
    const CodedPair q(config, 128, 512, offs.cpu(), false, false);
    const auto turn = [](QuantizedView v) {
      v.scales.stride[0] = 1, v.scales.stride[1] = v.scales.shape[0];
      return v;
    };
    quantize(config, x.cpu(), offs.cpu(), turn(q.cpu()));
    WB_TRY_CUDA(cudaDeviceSynchronize());
    quantize(config, x.gpu(), offs.gpu(), turn(q.gpu()), {kGpu, nullptr, nullptr});
    EXPECT_EQ(q.difference(), "") << name_of(config);
    Pair y(DType::kBF16, {128, 512});
    dequantize(config, turn(q.cpu()), offs.cpu(), y.cpu());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    dequantize(config, turn(q.gpu()), offs.gpu(), y.gpu(), {kGpu, nullptr, nullptr});
    EXPECT_EQ(y.difference("values"), "") << name_of(config);
  }
}

TEST_F(QuantizeCuda, ACapturedCallFollowsNewOffsets) {
  const Pair x = wild(DType::kBF16, 300, 256, 10);
  for (const QuantConfig& config : {mxfp8_rows(), mxfp8_columns(), nvfp4_rows()}) {
    Pair offs = offsets({200, 100});
    const CudaStream s;
    const CodedPair large(config, 300, 256, offs.cpu(), false, false);
    const GraphExec graph = GraphExec::capture(s, [&](cudaStream_t) { quantize(config, x.gpu(), offs.gpu(), large.gpu(), stream_of(s)); });
    for (const std::vector<int>& counts : {std::vector<int>{1, 290}, std::vector<int>{0, 0}, std::vector<int>{64, 64}}) {
      const std::vector<std::int32_t> values = offsets_of(counts);
      std::copy(values.begin(), values.end(), offs.host.as<std::int32_t>());
      offs.upload();
      for (const Pair* p : {&large.codes, &large.scales}) std::memset(p->host.view().data, kPoison, p->size()), p->memory.fill(kPoison);
      quantize(config, x.cpu(), offs.cpu(), large.cpu());
      WB_TRY_CUDA(cudaDeviceSynchronize());
      graph.launch(s);
      s.synchronize();
      EXPECT_EQ(large.difference(), "") << name_of(config);
    }
  }
}

TEST_F(QuantizeCuda, TheComparisonSeesOneWrongCode) {
  const Pair x = wild(DType::kBF16, 64, 128, 11);
  const CodedPair q(mxfp8_rows(), 64, 128, {}, false, false);
  quantize(q.config, x.cpu(), {}, q.cpu());
  WB_TRY_CUDA(cudaDeviceSynchronize());
  quantize(q.config, x.gpu(), {}, q.gpu(), {kGpu, nullptr, nullptr});
  ASSERT_EQ(q.difference(), "");
  WB_TRY_CUDA(cudaMemset(q.codes.memory.as<std::uint8_t>() + 4097, 0x11, 1));
  EXPECT_NE(q.difference(), "");
}

}  // namespace
}  // namespace waybill::cuda
