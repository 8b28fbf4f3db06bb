// SPDX-License-Identifier: Apache-2.0
// Score sums of the forward pass on the GPU, and the losses made from them, against the CPU reference (double).
#include "cuda/router_harness.h"
#include "ops/router/cuda/tuning.h"

namespace waybill::cuda {
namespace {

struct Sums {
  RouterResult route;
  std::vector<double> sums;  // [E + 1]
  double losses[3] = {};
};

RouterLossConfig both_losses() {
  RouterLossConfig losses;
  losses.aux_coefficient = 0.5f, losses.z_coefficient = 0.25f;
  return losses;
}

Sums reference_sums(const RouterProblem& p, const RouterResult& route) {
  RouterProblem copy = p;
  std::vector<std::byte> stored = stored_logits(p);
  const RouterInputs in = inputs_of(p, stored.data(), copy.bias.data(), copy.mask.data(), copy.padding.data(), copy.replay.data(), Device{});
  Sums want;
  want.sums.assign(static_cast<std::size_t>(p.config.E) + 1, NAN);
  RouterOutputs out;
  out.score_sums = want.sums.data();
  out.route.T = p.T;
  router_impl::write_score_sums_ref(router_impl::ForwardCall{p.config, in, out, Stream{}});
  std::vector<std::int32_t> ids = route.ids, counts = route.counts;
  std::vector<float> weights = route.weights;
  RouteView view;
  view.T = p.T, view.K = p.config.K, view.E = p.config.E, view.id_dtype = DType::kI32, view.ids = ids.data(), view.weights = weights.data();
  RouterLossInputs given;
  given.aux_counts = counts.data();
  const RouterLosses losses = router_impl::losses_ref(router_impl::LossesCall{p.config, both_losses(), in, view, given, Stream{}});
  want.losses[0] = losses.aux, want.losses[2] = losses.z;
  return want;
}

Sums gpu_sums(const GpuRouter& gpu, const RouterProblem& p, bool captured, bool portable) {
  const std::size_t E = static_cast<std::size_t>(p.config.E);
  const DeviceBuffer sums((E + 1) * 8), losses(24);
  const RouterInputs in = gpu.inputs();
  RouterOutputs out = gpu.outputs();
  out.score_sums = sums.as<double>();
  RouterLossInputs given;
  given.aux_counts = out.route.counts, given.score_sums = out.score_sums;
  const auto launch = [&] {
    router_forward(router_impl::ForwardCall{p.config, in, out, gpu.stream()}, portable);
    router_losses_device(router_impl::LossesCall{p.config, both_losses(), in, out.route, given, gpu.stream()}, losses.as<double>());
  };
  const auto spoil = [&] { gpu.poison(), sums.fill(0xcd, gpu.cuda_stream()), losses.fill(0xcd, gpu.cuda_stream()); };
  spoil();
  launch();
  if (captured) {
    spoil();
    const GraphExec graph = GraphExec::capture(gpu.cuda_stream(), [&](cudaStream_t) { launch(); });
    graph.launch(gpu.cuda_stream());
  }
  Sums got;
  got.route = gpu.download();
  got.sums.resize(E + 1);
  sums.download(got.sums.data(), (E + 1) * 8, gpu.cuda_stream());
  losses.download(got.losses, 24, gpu.cuda_stream());
  gpu.cuda_stream().synchronize();
  return got;
}

void check_sums(const RouterProblem& p, const std::string& what) {
  const GpuRouter gpu(p, DType::kI32);
  const bool portable = !gpu.refusal(false).empty();
  const RouterResult expected = run_reference(p);
  const Sums want = reference_sums(p, expected), got = gpu_sums(gpu, p, false, portable), again = gpu_sums(gpu, p, true, portable);
  expect_same(expected, got.route, p, what);
  if (::testing::Test::HasFatalFailure()) return;
  expect_identical(got.route, again.route, what + " captured");
  ASSERT_EQ(0, std::memcmp(got.sums.data(), again.sums.data(), got.sums.size() * 8)) << what << ": sums differ between runs";
  ASSERT_EQ(0, std::memcmp(got.losses, again.losses, 24)) << what << ": losses differ between runs";
  // P is exact to fp32 rounding of itself; a sum of T of them to that of the largest addend times their number.
  for (std::size_t e = 0; e + 1 < want.sums.size(); ++e) ASSERT_NEAR(got.sums[e], want.sums[e], 4e-6 * want.sums[e] + 1e-12) << what << ": sum of expert " << e;
  ASSERT_NEAR(got.sums.back(), want.sums.back(), 2e-6 * want.sums.back() + 1e-6) << what << ": squared logsumexps";
  for (const int i : {0, 1, 2}) ASSERT_NEAR(got.losses[i], want.losses[i], 3e-6 * std::abs(want.losses[i]) + 1e-9) << what << ": loss " << i;
}

TEST(RouterSumsCuda, SumsAndLossesMatchTheReferenceForEveryKernelAndKind) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t E : {4, 60, 128, 256, 512, 1024, 1028, 2300, 2304, 3000, 8192}) {
    for (const char* kind : {"normal", "special", "saturated", "deep", "wide", "constant"}) {
      for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
        ++turn;
        RouterProblem p;
        p.T = E > 4000 ? 12 : 45;
        p.config.E = E, p.config.K = std::min<std::int64_t>(E, turn % 3 == 0 ? 36 : 4), p.config.score = score, p.config.renormalise = turn % 2 != 0;
        p.dtype = turn % 5 == 0 ? DType::kBF16 : DType::kF32;
        fill_logits(p, kind, turn);
        std::mt19937 random(turn);
        if (turn % 3 == 1) {
          for (std::int64_t e = 0; e < E; ++e) p.bias.push_back(0.01f * static_cast<float>(e % 7));
        }
        if (turn % 4 == 1) {
          for (std::int64_t t = 0; t < p.T; ++t) p.padding.push_back(random() % 4 == 0);
        }
        if (turn % 7 == 1) {
          for (std::int64_t e = 0; e < E; ++e) p.mask.push_back(random() % 4 == 0);
        }
        check_sums(p, fmt::format("E {} {} score {} {} turn {}", E, kind, static_cast<int>(score), to_string(p.dtype), turn));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The sums of T rows by the forward kernel, by the kernel of its own, and what they must add up to.
void check_batches(std::initializer_list<std::int64_t> sizes) {
  for (const std::int64_t T : sizes) {
    RouterProblem p;
    p.T = T;
    p.config.E = 2304, p.config.K = 36, p.config.score = T % 2 == 0 ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax, p.config.renormalise = T % 2 == 0;
    fill_logits(p, "normal", static_cast<unsigned>(T) + 1);
    const GpuRouter gpu(p, DType::kI32);
    const Sums got = gpu_sums(gpu, p, false, false);
    double sum = 0;
    for (std::size_t e = 0; e + 1 < got.sums.size(); ++e) sum += got.sums[e];
    ASSERT_NEAR(sum, static_cast<double>(T), 1e-6 * static_cast<double>(T)) << "the probabilities of a row sum to 1";
    router_tuning::policy().sums_in_forward = false;
    const Sums apart = gpu_sums(gpu, p, false, false);
    router_tuning::policy() = {};
    for (std::size_t e = 0; e < got.sums.size(); ++e) ASSERT_NEAR(got.sums[e], apart.sums[e], 3e-6 * std::abs(apart.sums[e])) << "T " << T << " expert " << e;
    ASSERT_EQ(got.route.ids, apart.route.ids);
    ASSERT_EQ(got.route.counts, apart.route.counts);
  }
}

TEST(RouterSumsCuda, AFewRowsAddUp) {
  WB_NEEDS_GPU();
  check_batches({0, 1, 7, 22});
}

// As many rows as give every warp of the grid several, and groups a last round that not all of their warps have.
TEST(RouterSumsCuda, WholeBatchesAddUp) {
  WB_NEEDS_GPU();
  check_batches({3000, 8192});
}

}  // namespace
}  // namespace waybill::cuda
