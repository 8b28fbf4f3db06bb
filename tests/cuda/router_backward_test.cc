// SPDX-License-Identifier: Apache-2.0
// Router backward and losses on the GPU against the CPU reference (double): random upstream gradients, every score, losses on and off.
#include "cuda/router_harness.h"

namespace waybill::cuda {
namespace {

struct LossProblem {
  RouterLossConfig losses;
  RouterLossInputs inputs;
  bool give_counts = false;
};

// Gradients agree to fp32 rounding: relative to the largest entry of the row plus the entry itself.
// kept_factors: the route is the GPU's own and the backward pass gets what its forward pass kept (RouterInputs::weight_factors).
// portable: the kernels of sm_80.
void check_backward(const RouterProblem& p, const LossProblem& l, const std::string& what, bool kept_factors = false, bool portable = false) {
  RouterProblem copy = p;
  const GpuRouter gpu(p, DType::kI32);
  const DeviceBuffer factors(static_cast<std::size_t>(p.T) * 4 + 4);
  const auto forward_with_factors = [&] {
    factors.fill(0xcd, gpu.cuda_stream());
    return gpu.run_with_factors(factors.as<float>());
  };
  const RouterResult forward = kept_factors ? forward_with_factors() : run_reference(p);
  std::vector<std::byte> stored = stored_logits(p);
  const RouterInputs in = inputs_of(p, stored.data(), copy.bias.data(), copy.mask.data(), copy.padding.data(), copy.replay.data(), Device{});
  std::vector<std::int32_t> ids = forward.ids;
  std::vector<float> weights = forward.weights;
  RouteView route;
  route.T = p.T, route.K = p.config.K, route.E = p.config.E, route.id_dtype = DType::kI32, route.ids = ids.data(), route.weights = weights.data();
  std::mt19937 random(77);
  std::normal_distribution<float> normal;
  std::vector<float> g(ids.size());
  for (float& v : g) v = normal(random);
  RouterLossInputs loss_inputs = l.inputs;
  std::vector<std::int32_t> counts = forward.counts;
  if (l.give_counts) loss_inputs.aux_counts = counts.data();
  const std::size_t elements = static_cast<std::size_t>(p.T * p.config.E);
  std::vector<float> expected(elements);
  const TensorView d_expected(expected.data(), DType::kF32, {p.T, p.config.E});
  router_impl::backward_ref(router_impl::BackwardCall{p.config, l.losses, in, route, g.data(), loss_inputs, 3.0f, d_expected, Stream{}});
  const RouterLosses loss_expected = router_impl::losses_ref(router_impl::LossesCall{p.config, l.losses, in, route, loss_inputs, Stream{}});

  RouterOutputs out = gpu.outputs();
  const DeviceBuffer d_logits(elements * 4 + 4), d_weights(g.size() * 4 + 4), d_counts(counts.size() * 4), d_ids(ids.size() * 4 + 4), d_w(ids.size() * 4 + 4),
      d_loss(24);
  d_weights.upload(g.data(), g.size() * 4), d_counts.upload(counts.data(), counts.size() * 4);
  d_ids.upload(ids.data(), ids.size() * 4), d_w.upload(weights.data(), weights.size() * 4);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  RouteView device_route = out.route;
  device_route.ids = d_ids.data(), device_route.weights = d_w.as<float>();
  if (l.give_counts) loss_inputs.aux_counts = d_counts.as<std::int32_t>();
  const TensorView d_view(d_logits.data(), DType::kF32, {p.T, p.config.E}, d_logits.device());
  RouterInputs gpu_in = gpu.inputs();
  if (kept_factors) gpu_in.weight_factors = TensorView(factors.data(), DType::kF32, {p.T}, factors.device());
  const auto launch = [&] {
    router_backward(router_impl::BackwardCall{p.config, l.losses, gpu_in, device_route, d_weights.as<float>(), loss_inputs, 3.0f, d_view, gpu.stream()},
                    portable);
    router_losses_device(router_impl::LossesCall{p.config, l.losses, gpu_in, device_route, loss_inputs, gpu.stream()}, d_loss.as<double>(), portable);
  };
  std::vector<float> got(elements), again(elements);
  double loss_got[3] = {}, loss_again[3] = {};
  d_logits.fill(0xcd, gpu.cuda_stream()), d_loss.fill(0xcd, gpu.cuda_stream());
  launch();
  d_logits.download(got.data(), elements * 4, gpu.cuda_stream());
  d_loss.download(loss_got, 24, gpu.cuda_stream());
  gpu.cuda_stream().synchronize();
  d_logits.fill(0xcd, gpu.cuda_stream());
  const GraphExec graph = GraphExec::capture(gpu.cuda_stream(), [&](cudaStream_t) { launch(); });
  graph.launch(gpu.cuda_stream());
  d_logits.download(again.data(), elements * 4, gpu.cuda_stream());
  d_loss.download(loss_again, 24, gpu.cuda_stream());
  gpu.cuda_stream().synchronize();
  ASSERT_EQ(0, std::memcmp(got.data(), again.data(), elements * 4)) << what << ": captured differs from eager";
  ASSERT_EQ(0, std::memcmp(loss_got, loss_again, 24)) << what << ": losses differ between runs";
  const auto E = static_cast<std::size_t>(p.config.E);
  double batch_largest = 0;  // a row whose terms cancel keeps the rounding of its terms
  for (const float v : expected) batch_largest = std::max(batch_largest, std::abs(static_cast<double>(v)));
  // Terms a_e - sum_e a_e P_e cancel where one expert holds the row: their rounding is relative to a_e.
  double valid = 0;
  for (std::int64_t t = 0; t < p.T; ++t) valid += p.padding.empty() || p.padding[static_cast<std::size_t>(t)] == 0;
  const double tokens = std::max(valid, 1.0), per_route = static_cast<double>(p.config.E) / static_cast<double>(p.config.K);
  const double largest_count = *std::max_element(forward.counts.begin(), forward.counts.end());
  double a_scale = l.losses.aux_coefficient * per_route * largest_count /
                   ((l.inputs.aux_tokens > 0 ? l.inputs.aux_tokens : tokens) * (l.inputs.loss_tokens > 0 ? l.inputs.loss_tokens : tokens));
  if (l.losses.sequence_coefficient != 0) a_scale += l.losses.sequence_coefficient * per_route;
  for (std::int64_t t = 0; t < p.T; ++t) {
    double largest = 0, route_scale = 0;  // as for a: g_k w_k minus the mean of all
    for (std::int64_t k = 0; k < p.config.K; ++k) {
      const auto i = static_cast<std::size_t>(t * p.config.K + k);
      route_scale = std::max(route_scale, std::abs(static_cast<double>(g[i]) * weights[i]));
    }
    for (std::size_t e = 0; e < E; ++e) largest = std::max(largest, std::abs(static_cast<double>(expected[static_cast<std::size_t>(t) * E + e])));
    for (std::size_t e = 0; e < E; ++e) {
      const std::size_t i = static_cast<std::size_t>(t) * E + e;
      ASSERT_TRUE(std::isfinite(got[i])) << what << " row " << t << " expert " << e;
      ASSERT_NEAR(got[i], expected[i], 4e-6 * largest + 3e-7 * batch_largest + 3.0 * 2e-7 * a_scale + 3e-7 * route_scale + 1e-30)
          << what << " row " << t << " expert " << e;
    }
  }
  const double wanted[3] = {loss_expected.aux, loss_expected.sequence, loss_expected.z};
  for (int i = 0; i < 3; ++i) ASSERT_NEAR(loss_got[i], wanted[i], 3e-6 * std::abs(wanted[i]) + 1e-12) << what << " loss " << i;
}

constexpr ScoreFunction kScores[] = {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus};

TEST(RouterBackwardCuda, EveryScoreShapeAndLossMatchesTheReference) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t E : {4, 31, 60, 128, 256, 512, 1025, 2304, 8192}) {
    for (const std::int64_t K : {1, 4, 10, 36, 70}) {
      if (K > E) continue;
      for (const char* kind : {"normal", "special", "deep", "wide", "saturated"}) {
        for (const ScoreFunction score : kScores) {
          ++turn;
          RouterProblem p;
          p.T = E > 2000 ? 8 : 24;
          p.config.E = E, p.config.K = K, p.config.score = score, p.config.renormalise = turn % 3 != 0, p.config.scaling_factor = 1.5f;
          p.dtype = turn % 4 == 0 ? DType::kBF16 : (turn % 13 == 0 ? DType::kF16 : DType::kF32);
          fill_logits(p, kind, turn);
          std::mt19937 random(turn);
          if (turn % 4 == 1) {
            for (std::int64_t t = 0; t < p.T; ++t) p.padding.push_back(random() % 4 == 0);
          }
          if (turn % 7 == 1) {
            for (std::int64_t e = 0; e < E; ++e) p.mask.push_back(random() % 4 == 0);
          }
          LossProblem l;
          if (turn % 2 == 0) l.losses.aux_coefficient = 0.5f;
          if (turn % 3 == 0) l.losses.z_coefficient = 0.25f;
          if (turn % 5 == 0) l.losses.sequence_coefficient = 0.75f, l.losses.sequence_length = p.T / 4;
          l.give_counts = turn % 4 == 2;
          if (turn % 8 == 0) l.inputs.aux_tokens = 100, l.inputs.loss_tokens = 50;
          const std::string name = fmt::format("E {} K {} {} score {} {} turn {}", E, K, kind, static_cast<int>(score), to_string(p.dtype), turn);
          check_backward(p, l, name);
          if (HasFatalFailure()) return;
          if (turn % 3 == 1) check_backward(p, l, name + " portable", false, true);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

void check_losses(std::initializer_list<std::int64_t> experts, std::int64_t K) {
  unsigned turn = 0;
  for (const std::int64_t E : experts) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid}) {
      for (const bool is_padded : {false, true}) {
        ++turn;
        RouterProblem p;
        p.T = 9;
        p.config.E = E, p.config.K = K, p.config.score = score, p.config.scaling_factor = 1.5f;
        fill_logits(p, "normal", turn);
        for (std::int64_t t = 0; is_padded && t < p.T; ++t) p.padding.push_back(t % 3 == 1);
        LossProblem l;
        l.losses.aux_coefficient = 0.5f, l.losses.z_coefficient = 0.25f, l.give_counts = turn % 2 == 0;
        check_backward(p, l, fmt::format("E {} score {} padded {}", E, static_cast<int>(score), is_padded));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// Counts that are asked for ahead of the rows, all at once or (E = 8192) in turns; tokens that the kernel before has counted.
TEST(RouterBackwardCuda, LossesOfLongRowsMatchTheReference) {
  WB_NEEDS_GPU();
  check_losses({1280, 2304, 8192}, 36);
}

TEST(RouterBackwardCuda, LossesOfShortRowsMatchTheReference) {
  WB_NEEDS_GPU();
  check_losses({31, 128, 512}, 8);
}

TEST(RouterBackwardCuda, ParityEpsilonGradients) {
  WB_NEEDS_GPU();
  for (const char* kind : {"normal", "deep"}) {
    for (const ScoreFunction score : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      RouterProblem p;
      p.T = 16;
      p.config.E = 64, p.config.K = 8, p.config.score = score, p.config.normalise_epsilon = 1e-20f;
      fill_logits(p, kind, 4);
      check_backward(p, LossProblem{}, kind);
      if (HasFatalFailure()) return;
    }
  }
}

// 1 - score comes from the weight and the row's factor where that is exact enough, else from the logit; every kernel that writes factors.
TEST(RouterBackwardCuda, FactorsOfTheForwardPassReplaceTheLogits) {
  WB_NEEDS_GPU();
  unsigned turn = 100;
  for (const std::int64_t E : {60, 128, 256, 384, 512, 1024, 2304}) {
    for (const std::int64_t K : {1, 4, 8, 16, 36}) {
      for (const char* kind : {"normal", "special", "deep", "wide", "saturated", "constant"}) {
        ++turn;
        RouterProblem p;
        p.T = 22;
        p.config.E = E, p.config.K = K, p.config.score = ScoreFunction::kSigmoid, p.config.renormalise = turn % 4 != 0, p.config.scaling_factor = 2.5f;
        if (E == 256 && K == 8) p.config.num_groups = 8, p.config.num_kept_groups = 4;
        p.dtype = turn % 3 == 0 ? DType::kBF16 : DType::kF32;
        fill_logits(p, kind, turn);
        if (turn % 2 == 0) {
          for (std::int64_t e = 0; e < E; ++e) p.bias.push_back(0.01f * static_cast<float>(e % 7));
        }
        if (turn % 5 == 0) {
          for (std::int64_t t = 0; t < p.T; ++t) p.padding.push_back(t % 3 == 0);
        }
        check_backward(p, LossProblem{}, fmt::format("E {} K {} {} turn {}", E, K, kind, turn), true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Where a score is close to 1 its gradient is proportional to 1 - score, which weight and factor cannot tell: the bound is relative to it.
TEST(RouterBackwardCuda, GradientsOfScoresCloseToOneAreExactRelativeToOneMinusTheScore) {
  WB_NEEDS_GPU();
  for (const std::int64_t E : {128, 256, 512, 2304}) {
    for (const bool renormalise : {false, true}) {
      RouterProblem p;
      p.T = 50;
      p.config.E = E, p.config.K = E > 2000 ? 36 : 8, p.config.score = ScoreFunction::kSigmoid, p.config.renormalise = renormalise;
      p.config.scaling_factor = 2.5f;
      std::mt19937 random(static_cast<unsigned>(E));
      std::uniform_real_distribution<float> uniform;
      // 1 - score from 0.1 to 1e-6 for a tenth of the experts, the others far below.
      for (std::int64_t i = 0; i < p.T * E; ++i) p.logits.push_back(i % 7 == 0 ? 2.2f + 11.6f * uniform(random) : -3.0f * uniform(random));
      const GpuRouter gpu(p, DType::kI32);
      const std::size_t routes = static_cast<std::size_t>(p.T * p.config.K), elements = static_cast<std::size_t>(p.T * E);
      const DeviceBuffer factors(static_cast<std::size_t>(p.T) * 4), d_weights(routes * 4), d_logits(elements * 4);
      const RouterResult forward = gpu.run_with_factors(factors.as<float>());
      std::vector<float> g(routes), got(elements);
      std::normal_distribution<float> normal;
      for (float& v : g) v = normal(random);
      d_weights.upload(g.data(), routes * 4);
      WB_TRY_CUDA(cudaDeviceSynchronize());
      RouterInputs in = gpu.inputs();
      in.weight_factors = TensorView(factors.data(), DType::kF32, {p.T}, factors.device());
      const TensorView d_view(d_logits.data(), DType::kF32, {p.T, E}, d_logits.device());
      router_backward(router_impl::BackwardCall{p.config, {}, in, gpu.outputs().route, d_weights.as<float>(), {}, 1.0f, d_view, gpu.stream()});
      d_logits.download(got.data(), elements * 4, gpu.cuda_stream());
      gpu.cuda_stream().synchronize();
      for (std::int64_t t = 0; t < p.T; ++t) {
        const auto at = [&](std::int64_t k) { return static_cast<std::size_t>(t * p.config.K + k); };
        double centre = 0;
        for (std::int64_t k = 0; k < p.config.K && renormalise; ++k) centre += static_cast<double>(g[at(k)]) * forward.weights[at(k)] / 2.5;
        for (std::int64_t k = 0; k < p.config.K; ++k) {
          const std::size_t i = static_cast<std::size_t>(t * E + forward.ids[at(k)]);
          const double rest = 1 / (1 + std::exp(static_cast<double>(p.logits[i]))), w = forward.weights[at(k)];
          ASSERT_NEAR(got[i], rest * w * (g[at(k)] - centre), 1e-5 * rest * w * (std::abs(g[at(k)]) + std::abs(centre)))
              << "E " << E << " row " << t << ", 1 - score " << rest << (renormalise ? ", renormalised" : "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace waybill::cuda
