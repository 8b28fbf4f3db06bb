// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs against the dense loop in double precision (tests/moe/oracle.h), whose gradients are central differences: no layer on the CPU lies
// between. Bounds on the norm of the difference over the norm: out, dx, dW1, dW2, db1, db2 kNormBound (2^-7), d_gate kGateBound (2^-6).
#include <future>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

void expect_near_oracle(const std::vector<float>& got, const std::vector<double>& want, double bound, const std::string& what) {
  expect_close(got, std::vector<float>(want.begin(), want.end()), bound, what);
}

void compare_with_oracle(const MoeConfig& c, int P, std::int64_t T, bool masked, const std::string& what) {
  const mt::Weights<float> w = bf16_weights(c, 400);
  mt::Batch batch = bf16_batch(c, even(P, T / P), 401);
  for (std::int64_t t = 0; masked && t < batch.T(); ++t) batch.mask.push_back(t % 7 == 3 ? 1 : 0);
  GpuMoe gpu(c, P, w, {});
  gpu.upload(batch), gpu.step();
  ASSERT_EQ(gpu.first_error(), "") << what;
  mt::Result got = gpu.result();
  const mt::Oracle oracle(c);
  mt::Weights<double> wd = mt::to_double(w);
  mt::OracleInputs in = mt::oracle_inputs(c, batch, got.ids);
  const mt::OracleResult want = oracle.forward(wd, in);
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    const std::vector<std::int32_t> ids(got.ids.begin() + t * c.K, got.ids.begin() + (t + 1) * c.K);
    const bool is_padding = masked && batch.mask[static_cast<std::size_t>(t)] != 0;
    const std::vector<std::int32_t> chosen =
        is_padding ? std::vector<std::int32_t>(static_cast<std::size_t>(c.K), -1)
                   : oracle.choose(wd, std::span<const double>(in.x).subspan(static_cast<std::size_t>(t * c.H), static_cast<std::size_t>(c.H)));
    EXPECT_EQ(ids, chosen) << what << ": token " << t;
  }
  expect_near_oracle(got.out, want.out, kNormBound, what + ": out");
  expect_near_oracle(got.weights, want.weights, 1e-5, what + ": routing weights");
  EXPECT_NEAR(got.losses.aux, want.aux, 1e-5);
  EXPECT_NEAR(got.losses.z, want.z, 1e-4);
  EXPECT_NEAR(got.global_loss, want.global, 1e-5);
  // Differences element by element: a thread a tensor, with copies of its own.
  const auto gradient = [&](int which) {
    return std::async(std::launch::async, [&, which] {
      mt::Weights<double> own = wd;
      mt::OracleInputs inputs = in;
      std::vector<double>* values = &inputs.x;
      int next = 0;
      own.for_each([&](const char*, std::vector<double>& v) { values = next++ == which ? &v : values; });
      return oracle.gradient(own, inputs, *values, batch.d_out, 1.0);
    });
  };
  std::future<std::vector<double>> dx = gradient(-1);
  std::vector<std::future<std::vector<double>>> wanted;
  std::vector<std::string> names;
  wd.for_each([&](const char* name, std::vector<double>&) { wanted.push_back(gradient(static_cast<int>(names.size()))), names.emplace_back(name); });
  expect_near_oracle(got.dx, dx.get(), kNormBound, what + ": dx");
  std::size_t next = 0;
  got.gradients.for_each([&](const char*, std::vector<float>& v) {
    expect_near_oracle(v, wanted[next].get(), names[next] == "gate" ? kGateBound : kNormBound, what + ": d_" + names[next]);
    ++next;
  });
}

class MoeCudaOracle : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MoeCudaOracle, ::testing::Values(1, 2, 4, 8), ::testing::PrintToStringParamName());

TEST_P(MoeCudaOracle, ValuesAndGradientsOfEveryScore) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    MoeConfig c = gpu_config(8, 2, 16, 16, 8);
    c.router.score = score;
    c.activation.kind = score == ScoreFunction::kSigmoid ? Activation::kClampedSwiGLU : Activation::kSwiGLU;
    compare_with_oracle(c, P, 16, score == ScoreFunction::kSigmoid, fmt::format("score {}", static_cast<int>(score)));
  }
}

TEST_P(MoeCudaOracle, BiasesLossesSharedExpertAndLatentWidth) {
  WB_NEEDS_GPU();
  const int P = GetParam();
  MoeConfig c = gpu_config(8, 3, 16, 16, 8);
  c.expert_bias = true, c.aux_coefficient = 0.5f, c.global_coefficient = 0.25f, c.z_coefficient = 0.01f;
  compare_with_oracle(c, P, 16, false, "biases and losses");
  c.shared_F = 8, c.latent = 8;
  compare_with_oracle(c, P, 16, false, "biases, losses, shared expert, latent width");
  if (P == 1) return;
  c.F = 16, c.expert_tensor_parallel = 2;
  compare_with_oracle(c, P, 16, false, "the same in two slices of F");
}

}  // namespace
}  // namespace waybill::cuda
