// SPDX-License-Identifier: Apache-2.0
// Activations: closed forms, finite differences on the reference, every instruction set against the reference, bit equality.
#include "waybill/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ops/activation/activation_kernels.h"
#include "ops/activation/activation_ref.h"

namespace waybill {
namespace {

const Activation kKinds[] = {Activation::kSwiGLU, Activation::kClampedSwiGLU, Activation::kReluSquared};

Tensor random_tensor(DType dtype, std::int64_t rows, std::int64_t columns, std::uint32_t seed, float range) {
  Tensor tensor(dtype, {rows, columns});
  std::mt19937 random(seed);
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    const float value = (static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f) * range;
    if (dtype == DType::kF32) {
      tensor.as<float>()[i] = value;
    } else {
      tensor.as<bf16>()[i] = bf16(value);
    }
  }
  return tensor;
}

float at(const Tensor& tensor, std::int64_t i) { return tensor.view().dtype == DType::kF32 ? tensor.as<float>()[i] : static_cast<float>(tensor.as<bf16>()[i]); }

bool bit_equal(const Tensor& x, const Tensor& y) {
  return x.size() == y.size() && std::memcmp(x.view().data, y.view().data, static_cast<std::size_t>(x.size()) * size_bytes(x.view().dtype)) == 0;
}

struct Forced {
  explicit Forced(const char* name) { detail::force_activation(name); }
  ~Forced() { detail::force_activation(""); }
};

std::vector<std::string> implementations() {
  std::vector<std::string> names;
  for (int i = 0; i < detail::usable_activation_kernels().count; ++i) names.emplace_back(detail::usable_activation_kernels().sets[i]->name);
  names.emplace_back("ref");
  return names;
}

class ActivationOp : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::force_activation(GetParam().c_str()); }
  void TearDown() override { detail::force_activation(""); }
};
INSTANTIATE_TEST_SUITE_P(Implementations, ActivationOp, ::testing::ValuesIn(implementations()), [](const auto& param) { return param.param; });

TEST_P(ActivationOp, GivesTheWorkedExamples) {
  Tensor h(DType::kF32, {1, 4}), a(DType::kF32, {1, 2});
  const float values[] = {1.0f, -2.0f, 3.0f, 0.5f};  // gate = [1, -2], up = [3, 0.5]
  std::memcpy(h.as<float>(), values, sizeof(values));
  const float weight = 2.0f;
  activation_forward({}, h, &weight, a);
  EXPECT_NEAR(a.as<float>()[0], 2 * 0.7310585786 * 3, 1e-6);
  EXPECT_NEAR(a.as<float>()[1], 2 * -2 * 0.1192029220 * 0.5, 1e-6);
  const ActivationConfig clamped{Activation::kClampedSwiGLU, 0.75f, 1.702f};  // gate -> [0.75, -2], up -> [0.75, 0.5]
  activation_forward(clamped, h, nullptr, a);
  EXPECT_NEAR(a.as<float>()[0], 0.75 / (1 + std::exp(-1.702 * 0.75)) * 1.75, 1e-6);
  EXPECT_NEAR(a.as<float>()[1], -2 / (1 + std::exp(1.702 * 2)) * 1.5, 1e-6);
  Tensor wide(DType::kF32, {1, 4});
  activation_forward({Activation::kReluSquared}, h, &weight, wide);
  const float expected[] = {2, 0, 18, 0.5f};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(wide.as<float>()[i], expected[i]);
}

TEST_P(ActivationOp, ClampsCutTheGradientOnlyOutside) {
  const ActivationConfig config{Activation::kClampedSwiGLU, 1.0f, 1.702f};
  Tensor h(DType::kF32, {1, 6}), da(DType::kF32, {1, 3}), dh(DType::kF32, {1, 6});
  const float values[] = {1.5f, 1.0f, -9.0f, 0.5f, 1.0f, -1.5f};  // gate above, at and far below the limit; up inside, at and below
  std::memcpy(h.as<float>(), values, sizeof(values));
  for (int i = 0; i < 3; ++i) da.as<float>()[i] = 1;
  activation_backward(config, h, nullptr, da, dh, nullptr);
  EXPECT_EQ(dh.as<float>()[0], 0.0f);
  EXPECT_NE(dh.as<float>()[1], 0.0f);
  EXPECT_EQ(dh.as<float>()[2] * 0, 0.0f);  // up + 1 = 0 after the clamp; finite
  EXPECT_NE(dh.as<float>()[3], 0.0f);
  EXPECT_NE(dh.as<float>()[4], 0.0f);
  EXPECT_EQ(dh.as<float>()[5], 0.0f);
}

TEST(ActivationReference, BackwardMatchesFiniteDifferences) {
  const std::int64_t S = 3, F = 7;
  for (const Activation kind : kKinds) {
    const ActivationConfig config{kind, 1.3f, 1.702f};
    const std::int64_t width = activation_input_width(config, F);
    const Tensor h = random_tensor(DType::kF32, S, width, 1, 2), da = random_tensor(DType::kF32, S, F, 2, 1), dh(DType::kF32, {S, width}),
                 a(DType::kF32, {S, F});
    float weight[] = {0.5f, 1.25f, -0.75f}, d_weight[3];
    activation_backward_ref(config, h, weight, da, dh, d_weight);
    const auto loss = [&] {
      activation_forward_ref(config, h, weight, a);
      double sum = 0;
      for (std::int64_t i = 0; i < S * F; ++i) sum += static_cast<double>(a.as<float>()[i]) * da.as<float>()[i];
      return sum;
    };
    const auto slope = [&](float& x) {
      const float kept = x, step = 0x1p-9f;
      x = kept + step;
      const double above = loss();
      x = kept - step;
      const double below = loss();
      x = kept;
      return (above - below) / (2.0 * step);
    };
    for (std::int64_t i = 0; i < S * width; ++i) EXPECT_NEAR(dh.as<float>()[i], slope(h.as<float>()[i]), 2e-3) << "kind " << static_cast<int>(kind) << " " << i;
    for (int s = 0; s < 3; ++s) EXPECT_NEAR(d_weight[s], slope(weight[s]), 2e-3);
  }
}

// The maths is fp32 with a 3-ulp sigmoid whose argument alpha * gate (up to 15 in magnitude) is rounded; d_weight sums F terms.
TEST_P(ActivationOp, AgreesWithTheReference) {
  for (const Activation kind : kKinds) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t F : {1, 15, 16, 33, 512, 515, 1100}) {
        SCOPED_TRACE(fmt::format("kind {} {} F={}", static_cast<int>(kind), to_string(dtype), F));
        const ActivationConfig config{kind, 3.0f, 1.702f};
        const std::int64_t S = 5, width = activation_input_width(config, F);
        const Tensor h = random_tensor(dtype, S, width, 3, 9), da = random_tensor(dtype, S, F, 4, 2);
        const float weight[] = {1.0f, 0.25f, 0.0f, 2.5f, -1.5f};
        Tensor a(dtype, {S, F}), a_ref(DType::kF32, {S, F}), dh(dtype, {S, width}), dh_ref(DType::kF32, {S, width});
        float d_weight[5], d_weight_ref[5];
        activation_forward(config, h, weight, a);
        activation_forward_ref(config, h, weight, a_ref);
        activation_backward(config, h, weight, da, dh, d_weight);
        activation_backward_ref(config, h, weight, da, dh_ref, d_weight_ref);
        const double relative = dtype == DType::kF32 ? 24 * 0x1p-24 : 0x1.02p-8, range = 9 * 9 * 2 * 2.5;
        for (std::int64_t i = 0; i < a.size(); ++i) ASSERT_NEAR(at(a, i), at(a_ref, i), relative * std::abs(at(a_ref, i)) + 1e-37) << i;
        for (std::int64_t i = 0; i < dh.size(); ++i) ASSERT_NEAR(at(dh, i), at(dh_ref, i), relative * std::abs(at(dh_ref, i)) + range * 0x1p-22) << i;
        for (int s = 0; s < 5; ++s) ASSERT_NEAR(d_weight[s], d_weight_ref[s], static_cast<double>(F) * range * 0x1p-22) << s;
      }
    }
  }
}

TEST(ActivationBits, AreEqualForEveryInstructionSetThreadCountAndRepeat) {
  const std::int64_t S = 100, F = 517;
  for (const Activation kind : kKinds) {
    const ActivationConfig config{kind};
    const std::int64_t width = activation_input_width(config, F);
    const Tensor h = random_tensor(DType::kF32, S, width, 5, 12), da = random_tensor(DType::kBF16, S, F, 6, 1);
    std::vector<float> weight(static_cast<std::size_t>(S), 0.3f);
    Tensor a0(DType::kF32, {S, F}), dh0(DType::kF32, {S, width}), w0(DType::kF32, {S});
    activation_forward(config, h, weight.data(), a0);
    activation_backward(config, h, weight.data(), da, dh0, w0.as<float>());
    for (const std::string& name : implementations()) {
      if (name == "ref") continue;
      const Forced forced(name.c_str());
      for (const int threads : {1, 2, 3}) {
        SCOPED_TRACE(fmt::format("{} threads {}", name, threads));
        ThreadPool pool(threads);
        Tensor a(DType::kF32, {S, F}), dh(DType::kF32, {S, width}), w(DType::kF32, {S});
        activation_forward(config, h, weight.data(), a, Stream::cpu(&pool));
        activation_backward(config, h, weight.data(), da, dh, w.as<float>(), Stream::cpu(&pool));
        EXPECT_TRUE(bit_equal(a, a0));
        EXPECT_TRUE(bit_equal(dh, dh0));
        EXPECT_TRUE(bit_equal(w, w0));
      }
    }
  }
}

TEST_P(ActivationOp, KeepsExtremeInputsFinite) {
  Tensor h(DType::kF32, {1, 8}), a(DType::kF32, {1, 4}), dh(DType::kF32, {1, 8}), da(DType::kF32, {1, 4});
  const float gates[] = {-1e30f, 1e18f, -100.0f, 100.0f};
  for (int i = 0; i < 4; ++i) {
    h.as<float>()[i] = gates[i];
    h.as<float>()[4 + i] = 1.0f;
    da.as<float>()[i] = 1.0f;
  }
  float d_weight = 0;
  activation_forward({}, h, nullptr, a);
  activation_backward({}, h, nullptr, da, dh, &d_weight);
  EXPECT_EQ(a.as<float>()[0], 0.0f);
  EXPECT_EQ(a.as<float>()[1], 1e18f);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(std::isfinite(a.as<float>()[i]) && std::isfinite(dh.as<float>()[i]) && std::isfinite(dh.as<float>()[4 + i])) << i;
  EXPECT_TRUE(std::isfinite(d_weight));
}

TEST_P(ActivationOp, NoRowsAreLegal) {
  const Tensor h(DType::kF32, {0, 8}), a(DType::kF32, {0, 4});
  EXPECT_NO_THROW(activation_forward({}, h, nullptr, a));
  EXPECT_NO_THROW(activation_backward({}, h, nullptr, a, h, nullptr));
}

TEST(ActivationRefusals, NameTheValues) {
  const auto message = [](const ActivationConfig& config, const TensorView& h, const TensorView& a) -> std::string {
    try {
      activation_forward(config, h, nullptr, a);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const Tensor h(DType::kF32, {3, 8}), a(DType::kF32, {3, 4}), narrow(DType::kF32, {3, 7}), half(DType::kF16, {3, 8});
  EXPECT_EQ(message({}, narrow, a), "activation: h must be [3, 8], got f32 [3, 7] on cpu");
  EXPECT_EQ(message({Activation::kReluSquared}, h, a), "activation: h must be [3, 4], got f32 [3, 8] on cpu");
  EXPECT_EQ(message({}, half, a), "activation: h must be f32 or bf16, got f16 [3, 8] on cpu");
  EXPECT_EQ(message({Activation::kClampedSwiGLU, -1.0f}, h, a), "activation: the clamp limit must be > 0, got -1");
  EXPECT_EQ(message({static_cast<Activation>(9)}, h, a), "activation: unknown kind 9");
}

}  // namespace
}  // namespace waybill
