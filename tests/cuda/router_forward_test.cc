// SPDX-License-Identifier: Apache-2.0
// Router forward on the GPU against the CPU reference: ids and their order bit for bit, weights to 2e-6, counts, offsets, counters;
// eager and captured, twice, with poisoned outputs; the warp kernel and the portable one.
#include <gmock/gmock.h>

#include <algorithm>
#include <string>

#include "core/cuda/launch.h"
#include "cuda/device_random.h"
#include "cuda/router_harness.h"

namespace waybill::cuda {
namespace {

const char* const kKinds[] = {"normal", "tied", "collided", "constant", "saturated", "deep", "wide", "ramp", "falling", "special"};

RouterProblem problem(std::int64_t T, std::int64_t E, std::int64_t K, ScoreFunction score, bool renormalise) {
  RouterProblem p;
  p.T = T;
  p.config.E = E, p.config.K = K, p.config.score = score, p.config.renormalise = renormalise, p.config.scaling_factor = 2.5f;
  p.config.offset_alignment = 16;
  return p;
}

constexpr ScoreFunction kScores[] = {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus};

TEST(RouterForwardCuda, EveryShapeScoreAndKindOfRowsMatchesTheReference) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t E : {1, 2, 8, 31, 48, 60, 64, 96, 128, 192, 256, 384, 512, 896, 1024, 1025, 2048, 2304, 8192}) {
    for (const std::int64_t K : {1, 2, 3, 8, 10, 16, 22, 32, 36, 40, 64, 65, 256}) {
      if (K > E || (K > 64 && E > 1100)) continue;
      for (const char* kind : kKinds) {
        ++turn;
        const ScoreFunction score = kScores[turn % 4];
        RouterProblem p = problem(E > 1100 ? 9 : 33, E, K, score, (turn / 4) % 3 != 0);
        p.dtype = turn % 3 == 0 ? DType::kF32 : (turn % 3 == 1 ? DType::kBF16 : DType::kF32);
        if (turn % 7 == 0) p.dtype = DType::kF16;
        fill_logits(p, kind, turn);
        std::mt19937 random(turn + 1);
        std::normal_distribution<float> normal;
        if (turn % 5 == 1) {
          for (std::int64_t e = 0; e < E; ++e) p.bias.push_back(turn % 2 == 0 ? normal(random) * 0.1f : 30.0f + normal(random));
          if (turn % 11 == 0) p.bias[static_cast<std::size_t>(E / 2)] = -INFINITY;
        }
        if (turn % 5 == 2) {
          for (std::int64_t e = 0; e < E; ++e) p.mask.push_back(random() % 4 == 0);
        }
        if (turn % 6 == 0) {
          for (std::int64_t t = 0; t < p.T; ++t) p.padding.push_back(random() % 3 == 0);
        }
        if (turn % 9 == 0) p.row_stride = E + 4 * (turn % 2) + 3 * (turn % 4 == 2);
        p.want_unbiased = turn % 4 == 0;
        check_forward(p, fmt::format("E {} K {} {} score {} {} bias {} mask {} turn {}", E, K, kind, static_cast<int>(score), to_string(p.dtype),
                                     !p.bias.empty(), !p.mask.empty(), turn));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RouterForwardCuda, GroupLimitedRowsMatchTheReference) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  struct Shape {
    std::int64_t E, K, G, M;
  };
  for (const Shape s : {Shape{256, 8, 8, 4},
                        {256, 8, 16, 4},
                        {256, 8, 8, 8},
                        {512, 10, 8, 2},
                        {64, 4, 16, 8},
                        {60, 4, 4, 2},
                        {128, 6, 4, 1},
                        {8, 2, 8, 4},
                        {1024, 16, 32, 8},
                        {1024, 8, 8, 3},
                        {2304, 36, 8, 4},
                        {384, 8, 3, 2},
                        {256, 16, 2, 1}}) {
    for (const char* kind : kKinds) {
      for (const GroupScore rule : {GroupScore::kTop2Sum, GroupScore::kTopKPerGroup}) {
        ++turn;
        if (rule == GroupScore::kTopKPerGroup && s.K / s.M < 1) continue;
        RouterProblem p = problem(17, s.E, s.K, kScores[turn % 4], turn % 3 != 0);
        p.config.num_groups = s.G, p.config.num_kept_groups = s.M, p.config.group_score = rule;
        fill_logits(p, kind, turn);
        std::mt19937 random(turn);
        std::normal_distribution<float> normal;
        if (turn % 2 == 0) {
          for (std::int64_t e = 0; e < s.E; ++e) p.bias.push_back(turn % 4 == 0 ? -5.0f + 0.1f * normal(random) : normal(random));
        }
        if (turn % 5 == 2) {
          for (std::int64_t e = 0; e < s.E; ++e) p.mask.push_back(random() % 3 == 0);
        }
        p.want_unbiased = turn % 3 == 0;
        check_forward(p, fmt::format("E {} K {} G {} M {} {} rule {} turn {}", s.E, s.K, s.G, s.M, kind, static_cast<int>(rule), turn));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Rows that four-tokens-a-warp kernels take: every mode and type, with group scores that differ by less than the approximate keys do.
TEST(RouterForwardCuda, ShortRowsMatchWhereGroupScoresAreNearlyEqual) {
  WB_NEEDS_GPU();
  for (const std::int64_t E : {128, 256, 512}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int mode : {0, 1, 2}) {  // plain, bias, groups
        if ((mode == 2 && E != 256) || (mode != 0 && E == 512)) continue;
        RouterProblem p = problem(43, E, 8, ScoreFunction::kSigmoid, true);
        p.dtype = dtype;
        fill_logits(p, "normal", static_cast<std::uint32_t>(E) + static_cast<std::uint32_t>(mode));
        if (mode == 2) {
          p.config.num_groups = 8, p.config.num_kept_groups = 4;
          // The best two of each group: 2 and 1.5, off by some 1e-7 in an order that differs from row to row.
          for (std::int64_t t = 0; t < p.T; ++t) {
            for (std::int64_t g = 0; g < 8; ++g) {
              for (std::int64_t i = 0; i < 32; ++i) {
                float& x = p.logits[static_cast<std::size_t>(t * E + g * 32 + i)];
                x = std::min(x, 1.0f);
                if (i == (t + 5 * g) % 32) x = 2.0f + 2.4e-7f * static_cast<float>((g * 3 + t) % 8);
                if (i == (t + 5 * g + 7) % 32) x = 1.5f;
              }
            }
          }
        }
        if (mode != 0) {
          for (std::int64_t e = 0; e < E; ++e) p.bias.push_back(mode == 2 ? 0.5f : 0.01f * static_cast<float>(e % 5));
        }
        check_forward(p, fmt::format("E {} {} mode {}", E, to_string(dtype), mode));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Groups at the boundary that only exact keys tell apart: two of them, tied or 1e-7 apart, or three; also groups without two candidates.
void make_groups_close(RouterProblem& p, std::int64_t M, std::mt19937& random) {
  for (std::int64_t t = 0; t < p.T; ++t) {
    std::int64_t order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(order, order + 8, random);
    for (std::int64_t g = 0; g < 8; ++g) {
      float* x = p.logits.data() + t * 256 + g * 32;
      for (int i = 0; i < 32; ++i) x[i] = std::min(x[i], 0.5f);
      float best = 2.5f - 0.1f * static_cast<float>(order[g]);
      if (order[g] == M || (t % 3 == 2 && order[g] == M + 1)) best = 2.5f - 0.1f * static_cast<float>(M - 1) + (t % 2 == 0 ? 0.0f : 2.4e-7f);
      x[random() % 16] = best, x[16 + random() % 16] = 1.0f;
      if (t % 5 == 4 && order[g] > 5) std::fill(x, x + 31, -INFINITY);
    }
  }
}

TEST(RouterForwardCuda, ShortGroupedRowsMatchForEveryNumberKept) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t M : {1, 2, 3, 4, 5, 6, 7}) {
    for (const std::int64_t K : {1, 5, 8}) {
      for (const char* kind : {"normal", "tied", "constant", "deep", "wide", "special", "close"}) {
        for (const GroupScore rule : {GroupScore::kTop2Sum, GroupScore::kTopKPerGroup}) {
          ++turn;
          const bool is_close = std::string(kind) == "close";
          if (rule == GroupScore::kTopKPerGroup && (K < M || K / M > 2)) continue;
          RouterProblem p =
              problem(turn % 2 == 0 ? 35 : 64, 256, K, turn % 4 == 0 && !is_close ? ScoreFunction::kSoftmaxSelected : ScoreFunction::kSigmoid, true);
          p.config.num_groups = 8, p.config.num_kept_groups = M, p.config.group_score = rule;
          p.dtype = turn % 5 == 1 ? DType::kBF16 : DType::kF32;
          fill_logits(p, kind, turn);
          std::mt19937 random(turn);
          std::normal_distribution<float> normal;
          if (is_close) make_groups_close(p, M, random);
          if (turn % 3 != 0) {
            for (std::int64_t e = 0; e < 256; ++e) p.bias.push_back(is_close ? 0.5f : 0.1f * normal(random));
          }
          if (turn % 7 == 3) {
            for (std::int64_t e = 0; e < 256; ++e) p.mask.push_back(e / 32 == 5 ? e != 170 : random() % 4 == 0);
          }
          check_forward(p, fmt::format("K {} M {} {} rule {} turn {}", K, M, kind, static_cast<int>(rule), turn));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(RouterForwardCuda, EveryKindOfShortRowsMatchesWithAndWithoutABias) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t E : {128, 256, 512}) {
    for (const std::int64_t K : {1, 8, 9, 12, 13}) {
      for (const char* kind : kKinds) {
        for (const bool has_bias : {false, true}) {
          ++turn;
          RouterProblem p = problem(turn % 3 == 0 ? 64 : 35, E, K, turn % 3 == 1 ? kScores[turn % 2] : ScoreFunction::kSigmoid, turn % 4 != 0);
          p.dtype = turn % 5 == 1 ? DType::kBF16 : (turn % 5 == 3 ? DType::kF16 : DType::kF32);
          fill_logits(p, kind, turn);
          std::mt19937 random(turn);
          std::normal_distribution<float> normal;
          for (std::int64_t e = 0; has_bias && e < E; ++e) p.bias.push_back(0.1f * normal(random));
          check_forward(p, fmt::format("E {} K {} {} bias {} {} turn {}", E, K, kind, has_bias, to_string(p.dtype), turn));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Launches that overlap (core/cuda/launch.h): each sees what the kernel before it wrote, plain kernels and copies included.
TEST(RouterForwardCuda, OverlappedLaunchesSeeWhatCameBefore) {
  WB_NEEDS_GPU();
  constexpr std::int64_t T = 700;
  for (const std::int64_t E : {128, 256, 512, 2304}) {
    RouterProblem p = problem(T, E, 8, ScoreFunction::kSigmoid, true);
    fill_logits(p, "normal", 3);
    const GpuRouter gpu(p);
    const RouterInputs in = gpu.inputs();
    const RouterOutputs out = gpu.outputs();
    const std::size_t elements = static_cast<std::size_t>(T * E);
    const DeviceBuffer d_logits(elements * 4), d_weights(static_cast<std::size_t>(T * 8) * 4);
    fill_normal(d_weights.data(), DType::kF32, static_cast<std::size_t>(T * 8), 9, 1.0f, gpu.cuda_stream());
    const TensorView d_view(d_logits.data(), DType::kF32, {T, E}, d_logits.device());
    RouterLossConfig losses;
    losses.aux_coefficient = 0.5f;
    RouterLossInputs given;
    given.aux_counts = out.route.counts;  // of the forward pass just before
    const auto round = [&](unsigned seed) {
      fill_normal(in.logits.data, DType::kF32, elements, seed, 1.0f, gpu.cuda_stream());
      router_forward(router_impl::ForwardCall{p.config, in, out, gpu.stream()}, false);
      router_backward(router_impl::BackwardCall{p.config, losses, in, out.route, d_weights.as<float>(), given, 1.0f, d_view, gpu.stream()});
    };
    const auto result = [&] {
      std::vector<float> d(elements);
      d_logits.download(d.data(), elements * 4, gpu.cuda_stream());
      gpu.cuda_stream().synchronize();
      return d;
    };
    round(1);
    for (unsigned seed = 10; seed < 22; seed += 4) {
      dependent_launches() = false;
      round(seed + 3);
      const std::vector<float> in_turn = result();
      dependent_launches() = true;
      const GraphExec graph = GraphExec::capture(gpu.cuda_stream(), [&](cudaStream_t) {
        for (unsigned i = 0; i < 4; ++i) round(seed + i);
      });
      for (unsigned i = 0; i < 4; ++i) round(seed + 3 - i);  // other values in between
      for (int replay = 0; replay < 3; ++replay) graph.launch(gpu.cuda_stream());
      ASSERT_EQ(in_turn, result()) << "E " << E << ", seed " << seed;
    }
  }
}

TEST(RouterForwardCuda, TokenCountsFromZeroToManyMatch) {
  WB_NEEDS_GPU();
  for (const std::int64_t T : {0, 1, 2, 7, 8, 9, 33, 1000, 4097}) {
    RouterProblem p = problem(T, 256, 8, ScoreFunction::kSigmoid, true);
    fill_logits(p, "normal", static_cast<std::uint32_t>(T));
    check_forward(p, fmt::format("T {}", T));
    RouterProblem wide = problem(std::min<std::int64_t>(T, 1000), 2304, 36, ScoreFunction::kSoftmax, false);
    fill_logits(wide, "normal", static_cast<std::uint32_t>(T));
    check_forward(wide, fmt::format("wide T {}", wide.T));
    if (HasFatalFailure()) return;
  }
}

// Counts that each CTA's last warp hands over: warps without rows, of several rounds, and with rows that take the exact path first or last; rows without
// routes; offsets of any alignment.
TEST(RouterForwardCuda, CountsAreCompleteWhicheverWarpEndsLast) {
  WB_NEEDS_GPU();
  unsigned turn = 0;
  for (const std::int64_t E : {128, 256, 512}) {
    for (const std::int64_t T : {1, 5, 700, 9000}) {
      for (const std::int64_t alignment : {1, 12, 128}) {
        ++turn;
        RouterProblem p = problem(T, E, 8, turn % 2 == 0 ? ScoreFunction::kSoftmax : ScoreFunction::kSigmoid, turn % 2 != 0);
        p.config.offset_alignment = alignment;
        fill_logits(p, "normal", turn);
        for (std::int64_t t = turn % 3; t < T; t += 5 + turn % 4) {  // ties, or scores that underflow
          for (std::int64_t e = 0; e < E; ++e) p.logits[static_cast<std::size_t>(t * E + e)] = t % 2 == 0 ? 0.5f : -200.0f - static_cast<float>(e % 3);
        }
        for (std::int64_t t = 0; t < T; ++t) p.padding.push_back(t % 11 == 3);
        check_forward(p, fmt::format("E {} T {} alignment {}", E, T, alignment));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RouterForwardCuda, WeightsIgnoreABiasOf30) {
  WB_NEEDS_GPU();
  for (const std::int64_t E : {256, 2304}) {
    RouterProblem p = problem(64, E, 8, ScoreFunction::kSigmoid, true);
    fill_logits(p, "normal", 5);
    for (float& x : p.logits) x = x * 4 - 12;  // scores down to 1e-9
    for (std::int64_t e = 0; e < E; ++e) p.bias.push_back(30.0f);
    check_forward(p, fmt::format("E {} bias 30", E));
    for (float& b : p.bias) b = -30.0f;
    check_forward(p, fmt::format("E {} bias -30", E));
  }
}

TEST(RouterForwardCuda, ReplayAndForcedBalanceMatchTheReference) {
  WB_NEEDS_GPU();
  for (const ScoreFunction score : kScores) {
    for (const bool renormalise : {false, true}) {
      RouterProblem p = problem(50, 96, 6, score, renormalise);
      fill_logits(p, "special", 3);
      p.config.forced_balance = ForcedBalance::kRoundRobin;
      p.token_offset = 12345;
      p.want_unbiased = true;
      check_forward(p, "forced");
      p.config.forced_balance = ForcedBalance::kOff;
      std::mt19937 random(9);
      for (std::int64_t t = 0; t < p.T; ++t) {
        std::vector<std::int32_t> ids(96);
        for (int e = 0; e < 96; ++e) ids[static_cast<std::size_t>(e)] = e;
        std::shuffle(ids.begin(), ids.end(), random);
        for (int k = 0; k < 6; ++k) p.replay.push_back(random() % 8 == 0 ? -1 : (random() % 16 == 0 ? 96 + k : ids[static_cast<std::size_t>(k)]));
      }
      for (std::int64_t t = 0; t < p.T; ++t) p.padding.push_back(t % 5 == 0);
      check_forward(p, "replay");
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RouterForwardCuda, ParityEpsilonMatchesTheReference) {
  WB_NEEDS_GPU();
  for (const char* kind : {"normal", "deep", "falling"}) {
    for (const ScoreFunction score : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      RouterProblem p = problem(20, 64, 8, score, true);
      fill_logits(p, kind, 1);
      if (kind == std::string("falling")) {
        for (float& x : p.logits) x -= 50;
      }
      p.config.normalise_epsilon = 1e-20f;
      check_forward(p, kind);
    }
  }
}

TEST(RouterForwardCuda, ARowDoesNotDependOnOthersAndGraphsSeeNewInputs) {
  WB_NEEDS_GPU();
  RouterProblem p = problem(513, 512, 10, ScoreFunction::kSigmoid, true);
  fill_logits(p, "collided", 1);
  GpuRouter gpu(p);
  const RouterResult all = gpu.run(false);
  const GraphExec graph = GraphExec::capture(gpu.cuda_stream(), [&](cudaStream_t) { gpu.launch(false); });
  for (std::uint32_t round = 2; round < 6; ++round) {
    fill_logits(p, round % 2 == 0 ? "normal" : "tied", round);
    gpu.upload(p);
    gpu.poison();
    graph.launch(gpu.cuda_stream());
    gpu.cuda_stream().synchronize();
    expect_same(run_reference(p), gpu.download(), p, fmt::format("replay {}", round));
    if (HasFatalFailure()) return;
  }
  fill_logits(p, "collided", 1);
  RouterProblem one = p;
  one.T = 1;
  for (const std::int64_t t : {0, 7, 511, 512}) {
    one.logits.assign(p.logits.begin() + t * 512, p.logits.begin() + (t + 1) * 512);
    const RouterResult alone = GpuRouter(one).run(false);
    for (std::size_t k = 0; k < 10; ++k) {
      EXPECT_EQ(alone.ids[k], all.ids[static_cast<std::size_t>(t) * 10 + k]);
      EXPECT_EQ(alone.weights[k], all.weights[static_cast<std::size_t>(t) * 10 + k]);
    }
  }
}

TEST(RouterForwardCuda, RepeatsAreByteIdentical) {
  WB_NEEDS_GPU();
  RouterProblem p = problem(2000, 2304, 36, ScoreFunction::kSoftmax, false);
  fill_logits(p, "tied", 11);
  const GpuRouter gpu(p);
  const RouterResult first = gpu.run(false);
  for (int i = 0; i < 20; ++i) expect_identical(first, gpu.run(false), fmt::format("repeat {}", i));
}

TEST(RouterCasesCuda, F13_OffsetsBeyond2To31) {
  WB_NEEDS_GPU();
  std::size_t free_bytes = 0, total_bytes = 0;
  WB_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  const std::int64_t T = 8388736, E = 256, K = 8;
  if (free_bytes < std::size_t{12} << 30) GTEST_SKIP() << "needs 12 GiB of free GPU memory, got " << free_bytes;
  const DeviceBuffer logits(static_cast<std::size_t>(T * E) * 4), ids(static_cast<std::size_t>(T * K) * 2), weights(static_cast<std::size_t>(T * K) * 4),
      counts(E * 4);
  ids.fill(0xcd), weights.fill(0xcd);
  fill_normal(logits.data(), DType::kF32, static_cast<std::size_t>(T * E), 13, 1.0f, nullptr);
  const CudaStream stream;
  WB_TRY_CUDA(cudaDeviceSynchronize());
  RouterProblem p = problem(T, E, K, ScoreFunction::kSigmoid, true);
  RouterInputs in;
  in.logits = TensorView(logits.data(), DType::kF32, {T, E}, logits.device());
  RouterOutputs out;
  out.route.T = T, out.route.K = K, out.route.E = E, out.route.ids = ids.data(), out.route.weights = weights.as<float>(), out.route.device = logits.device();
  out.route.counts = counts.as<std::int32_t>();
  router_forward(router_impl::ForwardCall{p.config, in, out, Stream{logits.device(), stream.get(), nullptr}}, false);
  stream.synchronize();
  std::vector<std::int32_t> host_counts(E);
  counts.download(host_counts.data(), E * 4);
  std::int64_t total = 0;
  for (const std::int32_t n : host_counts) total += n;
  EXPECT_EQ(total, T * K);
  for (const std::int64_t t : {std::int64_t{0}, std::int64_t{8388607}, std::int64_t{8388608}, std::int64_t{8388735}}) {
    RouterProblem one = problem(1, E, K, ScoreFunction::kSigmoid, true);
    one.logits.resize(E);
    WB_TRY_CUDA(cudaMemcpy(one.logits.data(), logits.as<float>() + t * E, E * 4, cudaMemcpyDeviceToHost));
    const RouterResult expected = run_reference(one);
    std::vector<std::int16_t> got_ids(K);
    std::vector<float> got_weights(K);
    WB_TRY_CUDA(cudaMemcpy(got_ids.data(), ids.as<std::int16_t>() + t * K, K * 2, cudaMemcpyDeviceToHost));
    WB_TRY_CUDA(cudaMemcpy(got_weights.data(), weights.as<float>() + t * K, K * 4, cudaMemcpyDeviceToHost));
    for (std::size_t k = 0; k < K; ++k) {
      EXPECT_EQ(got_ids[k], expected.ids[k]) << "row " << t;
      EXPECT_NEAR(got_weights[k], expected.weights[k], 2e-6 * expected.weights[k]) << "row " << t;
    }
  }
}

}  // namespace
}  // namespace waybill::cuda
