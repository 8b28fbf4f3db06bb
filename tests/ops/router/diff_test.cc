// SPDX-License-Identifier: Apache-2.0
// The fast router against the reference: ids, counts and counters exact, weights to 1e-6.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "ops/router/router_fixture.h"
#include "ops/router/router_impl.h"
#include "ops/router/row_kernels.h"

namespace waybill {
namespace {

using test::ForceRouter;
using test::RouterCase;
using test::RouterResult;

enum class Pattern { kNormal, kConstant, kPairs, kRamp, kFalling, kSaturated, kPoisoned, kFewValues, kHuge, kNumPatterns };

float pattern_value(Pattern pattern, std::int64_t t, std::int64_t e, std::uint64_t seed) {
  const auto at = static_cast<std::uint64_t>(t * 100003 + e);
  const float normal = random_normal(seed, at);
  switch (pattern) {
    case Pattern::kConstant:
      return 0.25f;
    case Pattern::kPairs:
      return random_normal(seed, static_cast<std::uint64_t>(t * 100003 + e / 2));
    case Pattern::kRamp:
      return static_cast<float>(e) / 64.0f - 8.0f;
    case Pattern::kFalling:
      return 8.0f - static_cast<float>(e) / 64.0f;
    case Pattern::kSaturated:
      return 20.0f + 10.0f * random_uniform(seed, at);  // every fp32 sigmoid is 1
    case Pattern::kPoisoned: {
      const float u = random_uniform(seed + 1, at);
      if (u < 0.1f) return std::numeric_limits<float>::quiet_NaN();
      if (u < 0.2f) return -std::numeric_limits<float>::infinity();
      return u < 0.3f ? std::numeric_limits<float>::infinity() : normal;
    }
    case Pattern::kFewValues:
      return std::floor(normal * 2.0f) / 2.0f;
    case Pattern::kHuge:
      return normal * 30.0f - 60.0f;
    default:
      return normal;
  }
}

void expect_equal(const RouterResult& fast, const RouterResult& ref) {
  EXPECT_EQ(fast.counts(), ref.counts());
  EXPECT_EQ(fast.counts_unbiased, ref.counts_unbiased);
  EXPECT_EQ(fast.offsets, ref.offsets);
  EXPECT_EQ(fast.aligned_offsets, ref.aligned_offsets);
  EXPECT_EQ(fast.status.num_nonfinite_rows, ref.status.num_nonfinite_rows);
  EXPECT_EQ(fast.status.num_short_rows, ref.status.num_short_rows);
  EXPECT_EQ(fast.status.num_bad_ids, ref.status.num_bad_ids);
  EXPECT_EQ(fast.status.flags, ref.status.flags);
  for (std::int64_t t = 0; t < ref.route.T(); ++t) {
    ASSERT_EQ(fast.ids(t), ref.ids(t)) << "row " << t;
    const std::vector<float> a = fast.weights(t), b = ref.weights(t);
    for (std::size_t k = 0; k < a.size(); ++k) ASSERT_NEAR(a[k], b[k], 1e-6 * std::abs(b[k]) + 1e-12) << "row " << t << " slot " << k;
  }
  validate(fast.route.view());
}

RouterResult run_both(const RouterCase& c) {
  RouterResult ref, fast;
  {
    const ForceRouter force("ref");
    ref = test::forward(c);
  }
  {
    const ForceRouter force("fast");
    fast = test::forward(c);
  }
  expect_equal(fast, ref);
  return fast;
}

constexpr ScoreFunction kScores[] = {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Options follow from the bits of `mix`.
RouterCase make_case(std::int64_t T, std::int64_t E, std::int64_t K, std::uint64_t mix) {
  const auto pattern = static_cast<Pattern>(mix % static_cast<std::uint64_t>(Pattern::kNumPatterns));
  std::vector<float> x(static_cast<std::size_t>(T * E));
  for (std::int64_t i = 0; i < T * E; ++i) x[static_cast<std::size_t>(i)] = pattern_value(pattern, i / E, i % E, mix);
  RouterCase c(E, K, kScores[(mix >> 8) % 4], std::move(x));
  c.T = T;
  c.dtype = kDTypes[(mix >> 12) % 3];
  c.stride = (mix >> 16) % 2 == 0 ? 0 : E + 5;
  c.config.renormalise = (mix >> 17) % 2 == 0;
  c.config.scaling_factor = (mix >> 18) % 2 == 0 ? 1.0f : 2.5f;
  c.config.offset_alignment = (mix >> 19) % 2 == 0 ? 8 : 1;
  if (c.config.renormalise && c.config.score >= ScoreFunction::kSigmoid && (mix >> 20) % 4 == 0) c.config.normalise_epsilon = 1e-20f;
  if ((mix >> 22) % 2 == 0) {
    for (std::int64_t e = 0; e < E; ++e) {
      const float u = random_uniform(mix + 2, static_cast<std::uint64_t>(e));
      c.bias.push_back(u < 0.05f ? -std::numeric_limits<float>::infinity() : 4.0f * u - 2.0f);
    }
  }
  if ((mix >> 23) % 4 == 0) {
    for (std::int64_t e = 0; e < E; ++e) c.expert_mask.push_back(random_uniform(mix + 3, static_cast<std::uint64_t>(e)) < 0.2f ? 1 : 0);
  }
  if ((mix >> 25) % 4 == 0) {
    for (std::int64_t t = 0; t < T; ++t) c.padding_mask.push_back(random_uniform(mix + 4, static_cast<std::uint64_t>(t)) < 0.3f ? 1 : 0);
  }
  if ((mix >> 27) % 2 == 0) {
    for (const std::int64_t G : {2, 4, 8, 16, 32}) {
      const std::int64_t kept = std::max<std::int64_t>(1, G / 2);
      if (E % G != 0 || kept * (E / G) < K) continue;
      c.config.num_groups = G;
      c.config.num_kept_groups = kept;
      c.config.group_score = K >= kept && (mix >> 28) % 2 == 0 ? GroupScore::kTopKPerGroup : GroupScore::kTop2Sum;
      if ((mix >> 29) % 2 == 0) break;
    }
  }
  return c;
}

class RouterDiff : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Experts, RouterDiff, ::testing::Values(1, 2, 8, 16, 32, 48, 60, 64, 96, 128, 192, 256, 384, 512, 896, 1024, 1025, 2048, 2304, 8192));

TEST_P(RouterDiff, FastEqualsReferenceAtEveryKAndT) {
  const std::int64_t E = GetParam();
  std::vector<std::int64_t> ks{22, 32, 36, E};
  for (std::int64_t k = 1; k <= 16; ++k) ks.push_back(k);
  std::uint64_t trial = 0;
  for (const std::int64_t K : ks) {
    if (K > E) continue;
    // Long rows are slow in the reference: they take one T in turn, short rows take all.
    const std::int64_t all_t[] = {0, 1, 8, 9, 33};
    for (std::size_t i = 0; i < 5; ++i) {
      if (E > 512 && i != trial % 5 && E * all_t[i] > 20000) continue;
      const std::uint64_t mix = random_u64(17, ++trial + static_cast<std::uint64_t>(E) * 1000);
      SCOPED_TRACE(fmt::format("E {} K {} T {} mix {:#x}", E, K, all_t[i], mix));
      run_both(make_case(all_t[i], E, K, mix));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(RouterProperties, RandomShapesAndOptionsAgree) {
  const bool is_ok = rc::check("fast router equals the reference", [] {
    const auto E = *rc::gen::inRange<std::int64_t>(1, 90);
    const auto K = *rc::gen::inRange<std::int64_t>(1, E + 1);
    const auto T = *rc::gen::inRange<std::int64_t>(0, 20);
    const auto mix = *rc::gen::arbitrary<std::uint64_t>();
    run_both(make_case(T, E, K, mix));
    RC_ASSERT(!::testing::Test::HasFailure());
  });
  EXPECT_TRUE(is_ok);
}

TEST(RouterProperties, EveryBuildOfTheRowKernelsGivesTheSameBits) {
  const std::int64_t E = 1025, K = 48;
  const std::vector<float> x = [&] {
    std::vector<float> row;
    for (std::int64_t e = 0; e < E; ++e) row.push_back(pattern_value(e % 3 == 0 ? Pattern::kPoisoned : Pattern::kHuge, 0, e, 5));
    return row;
  }();
  std::vector<float> bias(static_cast<std::size_t>(E));
  for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = random_normal(6, e);
  std::vector<std::uint32_t> keep(static_cast<std::size_t>(E), 0xffffffffu);
  keep[3] = 0;
  const std::vector<std::uint8_t> valid(static_cast<std::size_t>(K), 1);
  std::vector<std::vector<std::uint32_t>> keys_by_build;
  std::vector<std::vector<float>> floats_by_build;
  for (const auto* build = router_impl::all_row_kernels(); *build != nullptr; ++build) {
    const router_impl::RowKernels& kernels = **build;
    std::vector<std::uint32_t>& keys = keys_by_build.emplace_back();
    std::vector<float>& floats = floats_by_build.emplace_back();
    for (const ScoreFunction score : kScores) {
      std::vector<std::uint32_t> k(static_cast<std::size_t>(E)), buckets(96);
      std::vector<std::uint64_t> found(static_cast<std::size_t>(E));
      EXPECT_TRUE(kernels.keys(score, x.data(), bias.data(), keep.data(), E, k.data()));
      const std::uint32_t bound = kernels.threshold(k.data(), E, K, 96, buckets.data());
      keys.push_back(bound);
      keys.push_back(static_cast<std::uint32_t>(kernels.collect(k.data(), E, bound, found.data())));
      keys.insert(keys.end(), k.begin(), k.end());
      std::vector<std::uint64_t> small(found.begin(), found.begin() + 60), sorted(60);
      small.resize(router_impl::kMaxSmallSort);
      kernels.sort_small(small.data(), 60, sorted.data());
      EXPECT_TRUE(std::is_sorted(sorted.begin(), sorted.end(), std::greater<>()));
      EXPECT_TRUE(std::is_permutation(sorted.begin(), sorted.end(), found.begin(), found.begin() + 60));
      std::vector<float> u(static_cast<std::size_t>(E)), d(u), scratch(static_cast<std::size_t>(K)), weights(scratch);
      const router_impl::RowSum row = kernels.full_scores(score, x.data(), keep.data(), E, u.data());
      floats.insert(floats.end(), {row.sum, kernels.log_sum_exp(row), kernels.dot(bias.data(), u.data(), E)});
      kernels.scale(u.data(), E, 1.0f / row.sum);
      kernels.loss_gradient(score, x.data(), u.data(), bias.data(), 0.1f, 0.7f, u.data(), 0.3f, E, d.data());
      floats.insert(floats.end(), u.begin(), u.end());
      floats.insert(floats.end(), d.begin(), d.end());
      for (const bool renormalise : {true, false}) {
        kernels.selected_weights(score, renormalise, nullptr, 2.5f, 0.0f, bias.data(), valid.data(), renormalise ? K : 16, scratch.data(), weights.data());
        floats.insert(floats.end(), weights.begin(), weights.begin() + 16);
        if (router_impl::is_softmax(score)) break;
      }
    }
  }
  for (std::size_t b = 1; b < keys_by_build.size(); ++b) {
    EXPECT_EQ(keys_by_build[b], keys_by_build[0]);
    ASSERT_EQ(floats_by_build[b].size(), floats_by_build[0].size());
    for (std::size_t i = 0; i < floats_by_build[b].size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(floats_by_build[b][i]), std::bit_cast<std::uint32_t>(floats_by_build[0][i])) << "build " << b << " value " << i;
    }
  }
}

TEST(RouterProperties, HalfConversionIsExactInEveryBuild) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> out(halves.size());
  for (const auto* build = router_impl::all_row_kernels(); *build != nullptr; ++build) {
    (*build)->widen_f16(halves.data(), 65536, out.data());
    for (std::size_t i = 0; i < halves.size(); ++i) {
      const float want = f16::to_float(halves[i]);
      if (std::isnan(want))
        ASSERT_TRUE(std::isnan(out[i]));
      else
        ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(want)) << i;
    }
  }
}

TEST(RouterProperties, AdversarialRowsDefeatTheThresholdButNotTheResult) {
  // All large keys in one bucket (columns that are equal modulo the number of buckets), and rows where every key ties.
  for (const std::int64_t K : {4, 8, 16, 36}) {
    const std::int64_t num_buckets = (2 * K + 15) / 16 * 16, E = num_buckets * 40;
    std::vector<float> x(static_cast<std::size_t>(3 * E), -1.0f);
    for (std::int64_t i = 0; i < 40; ++i) x[static_cast<std::size_t>(i * num_buckets + 5)] = static_cast<float>(i);
    for (std::int64_t e = 0; e < E; ++e) x[static_cast<std::size_t>(E + e)] = e < E - K ? 1.0f : 2.0f;
    for (std::int64_t e = 0; e < E; ++e) x[static_cast<std::size_t>(2 * E + e)] = -0.0f;
    run_both(RouterCase(E, K, ScoreFunction::kSoftmaxSelected, x));
  }
}

TEST(RouterProperties, WeightsSurviveALargeBias) {
  RouterCase c(64, 8, ScoreFunction::kSigmoid, {});
  for (std::int64_t e = 0; e < 64; ++e) c.logits.push_back(-20.7f + 0.25f * static_cast<float>(e % 9));  // s down to 1e-9
  c.T = 1;
  for (const float b : {30.0f, -30.0f}) {
    c.bias.assign(64, b);
    const RouterResult result = run_both(c);
    double sum = 0;
    for (const std::int32_t id : result.ids(0)) sum += 1 / (1 + std::exp(-static_cast<double>(c.logits[static_cast<std::size_t>(id)])));
    for (std::size_t k = 0; k < 8; ++k) {
      const double want = 1 / (1 + std::exp(-static_cast<double>(c.logits[static_cast<std::size_t>(result.ids(0)[k])]))) / sum;
      EXPECT_NEAR(result.weights(0)[k], want, 1e-6 * want);
    }
  }
}

TEST(RouterProperties, ForcedBalanceFollowsTheBitReversalAndIsTheSameAtAnySplit) {
  RouterCase c(256, 8, ScoreFunction::kSigmoid, test::normal_logits(8, 256, 2));
  c.config.forced_balance = ForcedBalance::kRoundRobin;
  const RouterResult whole = run_both(c);
  for (std::int64_t i = 0; i < 64; ++i) {
    std::int32_t reversed = 0;
    for (int bit = 0; bit < 8; ++bit) reversed |= ((static_cast<std::int32_t>(i) >> bit) & 1) << (7 - bit);
    EXPECT_EQ(whole.route.view().id(i / 8, i % 8), reversed);
  }
  RouterCase part = c;
  part.T = 3;
  part.token_offset = 5;
  part.logits.assign(c.logits.begin() + 5 * 256, c.logits.end());
  const RouterResult tail = run_both(part);
  for (std::int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(tail.ids(t), whole.ids(t + 5));
    EXPECT_EQ(tail.weights(t), whole.weights(t + 5));
  }
}

TEST(RouterProperties, ForcedBalanceIsEvenForAnyNumberOfExperts) {
  for (const std::int64_t E : {1, 6, 48, 60, 96, 384, 997, 1025}) {
    const std::int64_t K = std::min<std::int64_t>(E, 5), T = E;
    RouterCase c(E, K, ScoreFunction::kSoftmaxSelected, test::normal_logits(T, E, 4));
    c.config.forced_balance = ForcedBalance::kRoundRobin;
    const RouterResult result = run_both(c);  // run_both validates: the K ids of a token are distinct
    EXPECT_EQ(result.counts(), std::vector<std::int32_t>(static_cast<std::size_t>(E), static_cast<std::int32_t>(K))) << E;
  }
}

TEST(RouterProperties, ReplayKeepsOrderAndTakesWeightsFromTheLogits) {
  RouterCase c(8, 3, ScoreFunction::kSigmoid, test::normal_logits(4, 8, 8));
  c.bias.assign(8, 100.0f);
  c.replay = {7, 0, 3, 2, -1, 5, 8, 1, -2, 4, 6, 5};
  c.logits[3 * 8 + 6] = std::numeric_limits<float>::quiet_NaN();
  const RouterResult result = run_both(c);
  EXPECT_EQ(result.ids(0), (std::vector<std::int32_t>{7, 0, 3}));
  EXPECT_EQ(result.ids(1), (std::vector<std::int32_t>{2, -1, 5}));
  EXPECT_EQ(result.ids(2), (std::vector<std::int32_t>{-1, 1, -1}));
  EXPECT_EQ(result.ids(3), (std::vector<std::int32_t>{4, -1, 5}));
  EXPECT_EQ(result.status.num_bad_ids, 2);
  EXPECT_EQ(result.status.flags, static_cast<std::uint32_t>(kStatusBadId));
  EXPECT_EQ(result.status.num_short_rows, 3);
  EXPECT_EQ(result.status.num_nonfinite_rows, 1);
}

TEST(RouterProperties, ReplayOfARunGivesItsBits) {
  for (const ScoreFunction score : kScores) {
    RouterCase c(96, 6, score, test::normal_logits(40, 96, 12));
    c.config.num_groups = 8;
    c.config.num_kept_groups = 4;
    for (std::size_t e = 0; e < 96; ++e) c.bias.push_back(0.3f * random_normal(13, e));
    const RouterResult first = run_both(c);
    for (std::int64_t i = 0; i < 40 * 6; ++i) c.replay.push_back(first.route.view().id(i / 6, i % 6));
    const RouterResult again = run_both(c);
    for (std::int64_t t = 0; t < 40; ++t) {
      EXPECT_EQ(again.ids(t), first.ids(t));
      EXPECT_EQ(again.weights(t), first.weights(t));
    }
    EXPECT_EQ(again.counts_unbiased, first.counts_unbiased);
  }
}

TEST(RouterProperties, UnbiasedCountsAreThoseOfARouterWithoutBiasAndGroups) {
  RouterCase c(64, 6, ScoreFunction::kSigmoid, test::normal_logits(50, 64, 21));
  const RouterResult plain = run_both(c);
  EXPECT_EQ(plain.counts_unbiased, plain.counts());
  c.config.num_groups = 8;
  c.config.num_kept_groups = 2;
  for (std::size_t e = 0; e < 64; ++e) c.bias.push_back(random_normal(22, e));
  const RouterResult biased = run_both(c);
  EXPECT_EQ(biased.counts_unbiased, plain.counts());
  EXPECT_NE(biased.counts(), plain.counts());
}

}  // namespace
}  // namespace waybill
