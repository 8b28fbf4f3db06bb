// SPDX-License-Identifier: Apache-2.0
// Fused activation and quantiser against the activation kernel and the CPU's quantiser, one after the other, to the bit: every kind, format and direction on
// ragged groups with hard values; the gradient of the weights; the unfused way.
#include "waybill/quantize_activated.h"

#include <cmath>
#include <limits>

#include "core/cuda/graph.h"
#include "cuda/quantize_harness.h"
#include "ops/activation/cuda/activation_cuda.h"

namespace waybill::cuda {
namespace {

Stream stream_of(const CudaStream& s) { return {kGpu, s.get(), nullptr}; }

struct Inputs {
  ActivationConfig activation;
  Pair h, da, weight, offsets;
  std::int64_t S, F;
};

class QuantizeActivatedCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    WB_NEEDS_GPU();
    register_quantize(), register_activation();
  }

  static Pair wild(DType dtype, std::initializer_list<std::int64_t> shape, unsigned seed) {
    Pair x(dtype, shape, false);
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < x.host.size(); ++i) {
      const float v = wild_value(random, i);
      dtype == DType::kF32 ? void(x.host.as<float>()[i] = v) : void(x.host.as<bf16>()[i] = bf16(v));
    }
    x.upload();
    return x;
  }
  static Inputs inputs(Activation kind, const std::vector<int>& counts, std::int64_t F, DType dtype = DType::kBF16, int spare = 37) {
    const std::vector<std::int32_t> values = offsets_of(counts);
    Inputs in;
    in.activation.kind = kind, in.S = values.back() + spare, in.F = F;
    in.h = wild(dtype, {in.S, activation_input_width(in.activation, F)}, 3), in.da = wild(dtype, {in.S, F}, 5), in.weight = Pair(DType::kF32, {in.S}, false);
    std::mt19937 random(9);
    for (std::int64_t s = 0; s < in.S; ++s) {
      in.weight.host.as<float>()[s] =
          s % 61 == 7 ? 0.0f : (s % 97 == 11 ? std::numeric_limits<float>::infinity() : static_cast<float>(random() % 1000) * 1e-3f);
    }
    in.weight.upload();
    in.offsets = Pair(DType::kI32, {static_cast<std::int64_t>(values.size())}, false);
    std::copy(values.begin(), values.end(), in.offsets.host.as<std::int32_t>());
    in.offsets.upload();
    return in;
  }
  // The activation kernel's result or gradient in `values` (device), then on the host.
  static void compose(const Inputs& in, bool is_gradient, const TensorView& weight, const Pair& values, const Pair& d_weight) {
    const Stream stream{kGpu, nullptr, nullptr};
    const std::int32_t* num_rows = in.offsets.gpu().as<std::int32_t>() + in.offsets.host.size() - 1;
    const auto* w = static_cast<const float*>(weight ? weight.data : nullptr);
    if (is_gradient) {
      activation_backward(in.activation, in.h.gpu(), w, in.da.gpu(), values.gpu(), d_weight.gpu().as<float>(), stream, num_rows);
    } else {
      activation_forward(in.activation, in.h.gpu(), w, values.gpu(), stream, num_rows);
    }
    const std::vector<unsigned char> bytes = values.downloaded();
    std::memcpy(values.host.view().data, bytes.data(), bytes.size());
    const std::vector<unsigned char> sums = d_weight.downloaded();
    std::memcpy(d_weight.host.view().data, sums.data(), sums.size());
  }
  static ActivatedRows rows_of(const Inputs& in, bool is_gradient, const TensorView& weight, const Pair& d_weight, const Pair& partial_sums) {
    ActivatedRows x;
    x.activation = in.activation, x.h = in.h.gpu(), x.weight = weight;
    if (is_gradient) x.da = in.da.gpu(), x.d_weight = d_weight.gpu(), x.partial_sums = partial_sums.gpu();
    return x;
  }
};

const std::vector<int> kRagged = {0, 1, 15, 16, 17, 127, 128, 129, 130, 0, 31, 32, 33, 300, 0};
constexpr Activation kKinds[] = {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared};

std::vector<QuantConfig> formats() {
  std::vector<QuantConfig> all = {nvfp4_rows()};
  for (const ElementFormat element : {ElementFormat::kE4M3, ElementFormat::kE5M2}) {
    for (const ScaleRule rule : {ScaleRule::kRoundUp, ScaleRule::kFloor}) {
      for (const auto& [rows, columns] : {std::pair(1, 32), std::pair(32, 1)}) all.push_back({element, ScaleFormat::kE8M0, rule, rows, columns});
      for (const auto& [rows, columns] : {std::pair(1, 128), std::pair(128, 1)}) {
        all.push_back({element, ScaleFormat::kPowerOfTwo, rule, rows, columns});
        if (rule == ScaleRule::kRoundUp) all.push_back({element, ScaleFormat::kF32, rule, rows, columns});
      }
    }
  }
  return all;
}

TEST_F(QuantizeActivatedCuda, EveryFormatHasTheBitsOfTheTwoOps) {
  int refused = 0;
  for (const Activation kind : kKinds) {
    for (const std::int64_t F : {std::int64_t{128}, std::int64_t{416}, std::int64_t{768}}) {
      const Inputs in = inputs(kind, kRagged, F);
      for (const bool is_gradient : {false, true}) {
        for (const bool weighted : {false, true}) {
          const TensorView weight = weighted ? in.weight.gpu() : TensorView();
          const std::int64_t C = is_gradient ? in.h.host.dim(1) : F;
          Pair values(DType::kBF16, {in.S, C}), want_weight(DType::kF32, {in.S}), d_weight(DType::kF32, {in.S}), sums(DType::kF32, {in.S, (F + 63) / 64});
          compose(in, is_gradient, weight, values, want_weight);
          std::memcpy(d_weight.host.view().data, want_weight.host.view().data, d_weight.size());
          for (const QuantConfig& config : formats()) {
            const bool turns = config.block_rows == 128, swizzles = config.block_rows == 1 && config.block_columns < 128;
            const CodedPair q(config, in.S, C, in.offsets.cpu(), turns, swizzles);
            quantize(config, values.cpu(), in.offsets.cpu(), q.cpu());
            d_weight.memory.fill(kPoison), sums.memory.fill(kPoison);
            DeviceStatus status;
            WB_TRY_CUDA(cudaDeviceSynchronize());
            const CudaStream s;
            const ActivatedRows x = rows_of(in, is_gradient, weight, d_weight, sums);
            const std::string name = name_of(config) + ", kind " + std::to_string(static_cast<int>(kind)) + (is_gradient ? " gradient" : "") +
                                     (weighted ? " weighted" : "") + ", F " + std::to_string(F);
            if (is_gradient && kind != Activation::kReluSquared && config.block_columns == 128 && F % 128 != 0) {
              EXPECT_THROW(quantize_activated(config, x, in.offsets.gpu(), q.gpu(), stream_of(s)), Error) << name;
              ++refused;
              continue;
            }
            quantize_activated(config, x, in.offsets.gpu(), q.gpu(), stream_of(s), status.device_ptr());
            s.synchronize();
            EXPECT_EQ(q.difference(), "") << name;
            EXPECT_EQ(status.read(s).flags, kStatusOk);
            if (is_gradient) {
              EXPECT_EQ(d_weight.difference("d_weight"), "") << name;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(refused, 2 * 2 * 6);
}

TEST_F(QuantizeActivatedCuda, BothDirectionsAreTwoCalls) {
  for (const Activation kind : kKinds) {
    const Inputs in = inputs(kind, kRagged, 384);
    for (const bool is_gradient : {false, true}) {
      const std::int64_t C = is_gradient ? in.h.host.dim(1) : in.F;
      Pair values(DType::kBF16, {in.S, C}), want_weight(DType::kF32, {in.S}), d_weight(DType::kF32, {in.S}), sums(DType::kF32, {in.S, in.F / 64});
      compose(in, is_gradient, in.weight.gpu(), values, want_weight);
      std::memcpy(d_weight.host.view().data, want_weight.host.view().data, d_weight.size());
      for (const auto& [block, scale] : {std::pair(32, ScaleFormat::kE8M0), std::pair(128, ScaleFormat::kPowerOfTwo), std::pair(128, ScaleFormat::kF32)}) {
        for (const bool swizzle : {false, true}) {
          if (swizzle && scale != ScaleFormat::kE8M0) continue;
          const CodedPair rows({ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 1, block}, in.S, C, in.offsets.cpu(), false, swizzle);
          const CodedPair columns({ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, block, 1}, in.S, C, in.offsets.cpu(), true, false);
          quantize_both(rows.config, columns.config, values.cpu(), in.offsets.cpu(), rows.cpu(), columns.cpu());
          d_weight.memory.fill(kPoison), sums.memory.fill(kPoison);
          WB_TRY_CUDA(cudaDeviceSynchronize());
          const CudaStream s;
          quantize_both_activated(rows.config, columns.config, rows_of(in, is_gradient, in.weight.gpu(), d_weight, sums), in.offsets.gpu(), rows.gpu(),
                                  columns.gpu(), stream_of(s));
          s.synchronize();
          EXPECT_EQ(rows.difference(), "") << name_of(rows.config) << (is_gradient ? " gradient" : "");
          EXPECT_EQ(columns.difference(), "") << name_of(columns.config) << (is_gradient ? " gradient" : "");
          if (is_gradient) {
            EXPECT_EQ(d_weight.difference("d_weight"), "") << name_of(rows.config);
          }
        }
      }
    }
  }
}

TEST_F(QuantizeActivatedCuda, ManyGroupsAndNone) {
  std::mt19937 random(3);
  std::vector<int> many(4096);
  for (int& c : many) c = random() % 3 == 0 ? 0 : static_cast<int>(random() % 5);
  many[77] = 700;
  for (const std::vector<int>& counts : {many, std::vector<int>{0, 0, 0}, std::vector<int>{0}}) {
    const Inputs in = inputs(Activation::kSwiGLU, counts, 128, DType::kBF16, counts.size() == 1 ? 0 : 3);
    for (const bool is_gradient : {false, true}) {
      const std::int64_t C = is_gradient ? 256 : 128;
      Pair values(DType::kBF16, {in.S, C}), d_weight(DType::kF32, {in.S}), sums(DType::kF32, {in.S, 2});
      compose(in, is_gradient, {}, values, d_weight);
      for (const QuantConfig& config :
           {mxfp8_rows(), mxfp8_columns(), nvfp4_rows(), QuantConfig{ElementFormat::kE4M3, ScaleFormat::kF32, ScaleRule::kRoundUp, 128, 1}}) {
        const CodedPair q(config, in.S, C, in.offsets.cpu(), config.block_rows == 128, false);
        quantize(config, values.cpu(), in.offsets.cpu(), q.cpu());
        WB_TRY_CUDA(cudaDeviceSynchronize());
        quantize_activated(config, rows_of(in, is_gradient, {}, d_weight, sums), in.offsets.gpu(), q.gpu(), {kGpu, nullptr, nullptr});
        EXPECT_EQ(q.difference(), "") << name_of(config) << (is_gradient ? " gradient" : "") << ", " << counts.size() << " groups";
      }
    }
  }
}

// One after the other in the caller's memory: fp32 values are the CPU's bits, whatever the format.
TEST_F(QuantizeActivatedCuda, TheUnfusedWayTakesWhatTheKernelsRefuse) {
  const Inputs in = inputs(Activation::kClampedSwiGLU, {5, 0, 200, 1}, 80, DType::kF32);
  for (const bool is_gradient : {false, true}) {
    const std::int64_t C = is_gradient ? 160 : 80;
    for (const QuantConfig& config :
         {fp8_rows(), nvfp4_rows(), fp8_tiles(), QuantConfig{ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 16, 16}}) {
      const CodedPair q(config, in.S, C, in.offsets.cpu(), config.block_rows == 128, false);
      Pair wide(DType::kF32, {in.S, C});
      ActivatedRows host, device;
      host.activation = device.activation = in.activation;
      host.h = in.h.cpu(), host.weight = in.weight.cpu(), device.h = in.h.gpu(), device.weight = in.weight.gpu();
      if (is_gradient) host.da = in.da.cpu(), device.da = in.da.gpu();
      quantize_activated(config, host, in.offsets.cpu(), q.cpu());
      WB_TRY_CUDA(cudaDeviceSynchronize());
      EXPECT_THROW(quantize_activated(config, device, in.offsets.gpu(), q.gpu(), {kGpu, nullptr, nullptr}), Error);
      device.wide = wide.gpu();
      quantize_activated(config, device, in.offsets.gpu(), q.gpu(), {kGpu, nullptr, nullptr});
      EXPECT_EQ(q.difference(), "") << name_of(config) << (is_gradient ? " gradient" : "");
    }
  }
}

TEST_F(QuantizeActivatedCuda, RefusesWhatTheActivationDoesAndMemoryOfAnotherDevice) {
  Inputs in = inputs(Activation::kClampedSwiGLU, {70, 58}, 128);
  const Pair d_weight(DType::kF32, {in.S}), sums(DType::kF32, {in.S, 2});
  const CodedPair q(fp8_rows(), in.S, 256, in.offsets.cpu(), false, false);
  ActivatedRows x = rows_of(in, true, in.weight.gpu(), d_weight, sums);
  const auto call = [&] { quantize_activated(fp8_rows(), x, in.offsets.gpu(), q.gpu(), {kGpu, nullptr, nullptr}); };
  EXPECT_NO_THROW(call());
  x.partial_sums = sums.cpu();
  EXPECT_THROW(call(), Error);
  x.partial_sums = sums.gpu(), x.activation.limit = 0;
  EXPECT_THROW(call(), Error);
}

TEST_F(QuantizeActivatedCuda, RowsWithStridesAndReplays) {
  const Inputs in = inputs(Activation::kSwiGLU, {70, 58}, 256, DType::kBF16, 0);
  const Inputs other = inputs(Activation::kSwiGLU, {3, 125}, 256, DType::kBF16, 0);
  Pair padded(DType::kBF16, {128, 640}, false);
  for (std::int64_t s = 0; s < 128; ++s) std::memcpy(padded.host.as<bf16>() + s * 640 + 64, in.h.host.as<bf16>() + s * 512, 1024);
  padded.upload();
  const QuantConfig rows_config = fp8_rows(), columns_config{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1};
  Pair values(DType::kBF16, {128, 256}), unused(DType::kF32, {128});
  compose(in, false, in.weight.gpu(), values, unused);
  const CodedPair rows(rows_config, 128, 256, in.offsets.cpu(), false, false);
  CodedPair columns(columns_config, 128, 256, in.offsets.cpu(), true, false);
  ActivatedRows x;
  x.activation = in.activation, x.weight = in.weight.gpu(), x.h = padded.gpu();
  x.h.data = static_cast<std::uint16_t*>(x.h.data) + 64, x.h.shape[1] = 512;
  const CudaStream s;
  const auto call = [&](cudaStream_t) { quantize_both_activated(rows_config, columns_config, x, in.offsets.gpu(), rows.gpu(), columns.gpu(), stream_of(s)); };
  call(s.get());
  s.synchronize();
  const GraphExec graph = GraphExec::capture(s, call);
  for (const Inputs* which : {&in, &other}) {
    in.offsets.memory.upload(which->offsets.host.view().data, which->offsets.size());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    quantize_both(rows_config, columns_config, values.cpu(), which->offsets.cpu(), rows.cpu(), columns.cpu());
    graph.launch(s);
    s.synchronize();
    EXPECT_EQ(rows.difference(), "");
    EXPECT_EQ(columns.difference(), "");
  }
}

}  // namespace
}  // namespace waybill::cuda
