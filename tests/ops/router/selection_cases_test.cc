// SPDX-License-Identifier: Apache-2.0
// Field cases F01 to F06 of the router, on every implementation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "ops/router/router_fixture.h"
#include "ops/router/router_impl.h"
#include "waybill/log.h"

namespace waybill {
namespace {

using test::RouterCase;
using test::RouterResult;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using Ids = std::vector<std::int32_t>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class RouterCases : public ::testing::TestWithParam<const char*> {
 protected:
  test::ForceRouter force_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Implementations, RouterCases, ::testing::Values("ref", "fast"), [](const auto& suite) { return std::string(suite.param); });

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << "element " << i;
}

std::string refusal(const RouterConfig& config) {
  try {
    validate(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "accepted";
}

RouterConfig grouped(std::int64_t E, std::int64_t K, std::int64_t G, std::int64_t kept, GroupScore rule = GroupScore::kTop2Sum) {
  RouterConfig config;
  config.E = E;
  config.K = K;
  config.score = ScoreFunction::kSigmoid;
  config.num_groups = G;
  config.num_kept_groups = kept;
  config.group_score = rule;
  return config;
}

RouterCase grouped_case(const RouterConfig& config, std::vector<float> x) {
  RouterCase c(config.E, config.K, config.score, std::move(x));
  c.config = config;
  return c;
}

TEST_P(RouterCases, F01_GroupMaskSurvivesABiasThatMakesEveryKeyNegative) {
  RouterCase c = grouped_case(grouped(8, 2, 4, 1), {2, 1, 0, 0, 0, 0, 0, 0});
  c.bias.assign(8, -5.0f);
  RouterResult result = test::forward(c);
  EXPECT_EQ(result.ids(0), (Ids{0, 1}));
  expect_near(result.weights(0), {0.546449, 0.453551}, 1e-6);
  c.config.scaling_factor = 2.5f;
  expect_near(test::forward(c).weights(0), {1.366123, 1.133877}, 2e-6);
  c.config.scaling_factor = 1.0f;
  c.bias.assign(8, 1048576.0f);
  result = test::forward(c);
  EXPECT_EQ(result.ids(0), (Ids{0, 1}));
  expect_near(result.weights(0), {0.546449, 0.453551}, 1e-6);
}

TEST_P(RouterCases, F01_RandomBiasesChooseInKeptGroupsAndLeaveTheWeightsAlone) {
  RouterCase c = grouped_case(grouped(8, 2, 4, 1), {2, 1, 0.25f, 0, -0.5f, 0.75f, 0, -1});
  c.bias.assign(8, 0.0f);
  for (std::uint64_t trial = 0; trial < 1000; ++trial) {
    std::vector<double> group(4);
    for (std::size_t e = 0; e < 8; ++e) {
      c.bias[e] = 2000.0f * random_uniform(11, trial * 8 + e) - 1000.0f;
      group[e / 2] += 1 / (1 + std::exp(-static_cast<double>(c.logits[e]))) + static_cast<double>(c.bias[e]);
    }
    const auto best = static_cast<std::int32_t>(std::max_element(group.begin(), group.end()) - group.begin());
    const RouterResult result = test::forward(c);
    EXPECT_EQ(result.ids(0)[0] / 2, best) << "trial " << trial;
    EXPECT_EQ(result.ids(0)[1] / 2, best) << "trial " << trial;
    RouterCase replayed = c;  // the same ids without any bias
    replayed.bias.clear();
    replayed.replay = result.ids(0);
    EXPECT_EQ(test::forward(replayed).weights(0), result.weights(0)) << "trial " << trial;
  }
}

TEST(RouterConfigCases, F02_GroupSettingsThatCannotSupplyKExpertsAreRefused) {
  EXPECT_THAT(refusal(grouped(8, 2, 8, 1)), HasSubstr("kept_groups*E/G = 1 < K = 2"));
  EXPECT_THAT(refusal(grouped(10, 2, 4, 2)), HasSubstr("G = 4 does not divide E = 10"));
  EXPECT_THAT(refusal(grouped(8, 2, 4, 5)), HasSubstr("kept_groups = 5, G = 4"));
  EXPECT_THAT(refusal(grouped(8, 3, 4, 4, GroupScore::kTopKPerGroup)), HasSubstr("K = 3, kept_groups = 4 give 0"));
  EXPECT_EQ(refusal(grouped(8, 2, 8, 4)), "accepted");
}

TEST_P(RouterCases, F02_AllGroupsKeptIsAPlainTopK) {
  EXPECT_EQ(test::forward(grouped_case(grouped(8, 3, 4, 4), {0, 3, 1, 2, -1, 0, 0, 0})).ids(0), (Ids{1, 3, 2}));
}

TEST_P(RouterCases, F02_SixteenGroupsAndBothRules) {
  std::vector<float> x(256);
  for (std::size_t e = 0; e < 256; ++e) x[e] = static_cast<float>((37 * e + 11) % 256) / 64.0f - 2.0f;
  for (const GroupScore rule : {GroupScore::kTop2Sum, GroupScore::kTopKPerGroup}) {
    const RouterResult result = test::forward(grouped_case(grouped(256, 8, 16, 4, rule), x));
    EXPECT_EQ(result.ids(0), (Ids{55, 138, 221, 48, 131, 214, 41, 34}));
    expect_near(result.weights(0), {0.125935, 0.125693, 0.125447, 0.125199, 0.124948, 0.124694, 0.124437, 0.123648}, 1e-6);
  }
  EXPECT_EQ(std::max_element(x.begin(), x.end()) - x.begin(), 228);  // the best expert of all stands in a group that is not kept
}

std::vector<router_impl::GroupRank> ranked_groups(const RouterCase& c) {
  const test::StoredInputs stored(c);
  return router_impl::rank_groups_ref(c.config, stored.inputs, 0);
}

TEST(RouterGroupCases, F01_GroupScoresWithANegativeBias) {
  RouterCase c = grouped_case(grouped(8, 2, 4, 1), {2, 1, 0, 0, 0, 0, 0, 0});
  c.bias.assign(8, -5.0f);
  const std::vector<router_impl::GroupRank> groups = ranked_groups(c);
  const double want[] = {-8.388144, -9.0, -9.0, -9.0};
  for (std::size_t g = 0; g < 4; ++g) {
    EXPECT_EQ(groups[g].id, static_cast<std::int64_t>(g));
    EXPECT_NEAR(groups[g].score, want[g], 1e-5);
  }
}

TEST(RouterGroupCases, F02_KeptGroupsAndTheirScores) {
  std::vector<float> x(256);
  for (std::size_t e = 0; e < 256; ++e) x[e] = static_cast<float>((37 * e + 11) % 256) / 64.0f - 2.0f;
  const std::vector<router_impl::GroupRank> groups = ranked_groups(grouped_case(grouped(256, 8, 16, 4), x));
  const std::int64_t ids[] = {3, 8, 13, 2};
  const double scores[] = {1.749824, 1.746384, 1.742904, 1.728574, 1.724888};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(groups[i].id, ids[i]);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(groups[i].score, scores[i], 2e-6);
}

TEST(RouterGroupCases, F06_TiedGroupsRankByTheLowerId) {
  const std::vector<router_impl::GroupRank> groups = ranked_groups(grouped_case(grouped(8, 2, 4, 2), std::vector<float>(8, 0.0f)));
  EXPECT_EQ(groups[0].id, 0);
  EXPECT_EQ(groups[1].id, 1);
}

TEST_P(RouterCases, GroupsShortOfCandidatesComeAfterCompleteOnes) {
  // Group 0 has one candidate (key -1 > the sum -4 of a complete group), group 1 two, group 2 none.
  RouterCase c = grouped_case(grouped(6, 2, 3, 1), {-1, kNaN, -2, -2, kNaN, kNaN});
  c.config.score = ScoreFunction::kSoftmaxSelected;
  EXPECT_EQ(test::forward(c).ids(0), (Ids{2, 3}));
  c.config.num_kept_groups = 2;
  c.config.K = 4;
  EXPECT_EQ(test::forward(c).ids(0), (Ids{0, 2, 3, -1}));
}

TEST_P(RouterCases, F02_TheTwoGroupRulesDiffer) {
  const std::vector<float> x{2, -2, 0.5f, 0.5f, 1, -0.5f, -1, -1};
  RouterResult result = test::forward(grouped_case(grouped(8, 2, 4, 2), x));
  EXPECT_EQ(result.ids(0), (Ids{4, 2}));
  expect_near(result.weights(0), {0.540117, 0.459883}, 1e-6);
  result = test::forward(grouped_case(grouped(8, 2, 4, 2, GroupScore::kTopKPerGroup), x));
  EXPECT_EQ(result.ids(0), (Ids{0, 4}));
  expect_near(result.weights(0), {0.546449, 0.453551}, 1e-6);
}

TEST_P(RouterCases, F02_OneExpertPerGroupTakesTheOneThereIs) {
  EXPECT_EQ(test::forward(grouped_case(grouped(8, 2, 8, 4), {0, 3, 1, 2, -1, 0, 0, 5})).ids(0), (Ids{7, 1}));
}

RouterCase poisoned_batch() {
  std::vector<float> x(5 * 128);
  for (std::size_t t = 0; t < 5; ++t) {
    for (std::size_t e = 0; e < 128; ++e) x[t * 128 + e] = -static_cast<float>(e) / 8.0f;
  }
  std::fill_n(x.begin() + 128, 128, kNaN);
  std::fill_n(x.begin() + 256, 128, kInf);
  x[3 * 128 + 5] = kNaN;
  x[4 * 128 + 5] = kInf;
  return RouterCase(128, 8, ScoreFunction::kSoftmaxSelected, x);
}

TEST_P(RouterCases, F03_APoisonedRowCostsThatRowOnly) {
  const RouterCase c = poisoned_batch();
  const RouterResult result = test::forward(c);
  EXPECT_EQ(result.ids(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7}));
  for (const std::int64_t t : {1, 2}) {
    EXPECT_EQ(result.ids(t), Ids(8, -1));
    EXPECT_EQ(result.weights(t), std::vector<float>(8, 0.0f));
  }
  for (const std::int64_t t : {3, 4}) {
    EXPECT_EQ(result.ids(t), (Ids{0, 1, 2, 3, 4, 6, 7, 8}));
    expect_near(result.weights(t), {0.191857, 0.169313, 0.149418, 0.131861, 0.116367, 0.090627, 0.079978, 0.07058}, 1e-6);
  }
  EXPECT_EQ(result.status.num_nonfinite_rows, 4);
  EXPECT_EQ(result.status.num_short_rows, 2);
  const RouterCase alone(128, 8, ScoreFunction::kSoftmaxSelected, {c.logits.begin(), c.logits.begin() + 128});
  EXPECT_EQ(test::forward(alone).ids(0), result.ids(0));
  EXPECT_EQ(test::forward(alone).weights(0), result.weights(0));
}

TEST_P(RouterCases, F03_GradientsOfPoisonedRowsAreFiniteAndZeroWhereNothingWasChosen) {
  const RouterCase c = poisoned_batch();
  const RouterResult result = test::forward(c);
  std::vector<float> g(5 * 8);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = random_normal(3, i);
  RouterLossConfig losses;
  losses.aux_coefficient = losses.z_coefficient = losses.sequence_coefficient = 1;
  losses.sequence_length = 5;
  const std::vector<float> d = test::backward(c, losses, result.route, g);
  for (std::size_t i = 0; i < d.size(); ++i) {
    ASSERT_TRUE(std::isfinite(d[i])) << "element " << i;
    if (i / 128 == 1 || i / 128 == 2 || !std::isfinite(c.logits[i])) {
      ASSERT_EQ(d[i], 0.0f) << "element " << i;
    }
  }
  EXPECT_NE(d[0], 0.0f);
  EXPECT_NE(d[3 * 128], 0.0f);
}

TEST_P(RouterCases, F03_FewerCandidatesThanSlots) {
  const std::vector<float> x{kNaN, 1, kNaN, kNaN, 0, kNaN, kNaN, kNaN};
  RouterResult result = test::forward(RouterCase(8, 3, ScoreFunction::kSoftmaxSelected, x));
  EXPECT_EQ(result.ids(0), (Ids{1, 4, -1}));
  expect_near(result.weights(0), {0.731059, 0.268941, 0}, 1e-6);
  EXPECT_EQ(result.weights(0)[2], 0.0f);
  result = test::forward(RouterCase(8, 3, ScoreFunction::kSigmoid, x));
  EXPECT_EQ(result.ids(0), (Ids{1, 4, -1}));
  expect_near(result.weights(0), {0.593845, 0.406155, 0}, 1e-6);
  EXPECT_EQ(result.status.num_nonfinite_rows, 1);
  EXPECT_EQ(result.status.num_short_rows, 1);
}

TEST_P(RouterCases, F03_ABiasOfMinusInfinityExcludes) {
  RouterCase c(8, 3, ScoreFunction::kSigmoid, std::vector<float>(8, 0.0f));
  c.bias.assign(8, -kInf);
  c.bias[2] = 0;
  for (const bool renormalise : {true, false}) {
    c.config.renormalise = renormalise;
    const RouterResult result = test::forward(c);
    EXPECT_EQ(result.ids(0), (Ids{2, -1, -1}));
    if (renormalise)
      EXPECT_EQ(result.weights(0), (std::vector<float>{1, 0, 0}));
    else
      expect_near(result.weights(0), {0.5, 0, 0}, 1e-7);
    EXPECT_EQ(result.status.num_nonfinite_rows, 0);
    EXPECT_EQ(result.status.num_short_rows, 1);
  }
}

TEST_P(RouterCases, F03_MinusInfinityLogitsAreNoCandidates) {
  const RouterResult result = test::forward(RouterCase(4, 3, ScoreFunction::kSoftmaxSelected, {1, -kInf, 0, -kInf, -kInf, -kInf, -kInf, -kInf}));
  EXPECT_EQ(result.ids(0), (Ids{0, 2, -1}));
  EXPECT_EQ(result.ids(1), (Ids{-1, -1, -1}));
  expect_near(result.weights(0), {0.731059, 0.268941, 0}, 1e-6);
  EXPECT_EQ(result.status.num_nonfinite_rows, 2);
  EXPECT_EQ(result.status.num_short_rows, 2);
}

TEST_P(RouterCases, F03_IdsAreDistinctAndWeightsFiniteInAnyPoison) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    RouterCase c(24, 6, score, test::normal_logits(300, 24, 5));
    for (std::size_t i = 0; i < c.logits.size(); ++i) {
      const float u = random_uniform(6 + i / (24 * 30), i);  // poison of a tenth to all of the entries
      const float rate = static_cast<float>(i / (24 * 30)) / 9.0f;
      if (u < rate) c.logits[i] = u < rate / 3 ? kNaN : (u < rate / 2 ? kInf : -kInf);
    }
    const RouterResult result = test::forward(c);
    for (std::int64_t t = 0; t < c.T; ++t) {
      std::set<std::int32_t> seen;
      for (const std::int32_t id : result.ids(t)) {
        EXPECT_TRUE(id == -1 || (id >= 0 && id < 24 && seen.insert(id).second)) << "row " << t << " id " << id;
      }
      for (const float w : result.weights(t)) EXPECT_TRUE(std::isfinite(w)) << "row " << t;
    }
    validate(result.route.view());
  }
}

TEST_P(RouterCases, F04_K1RenormalisedHasWeightOneAndNoTaskGradient) {
  for (const std::int64_t T : {1, 7, 64}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
      std::vector<float> x;
      for (std::int64_t t = 0; t < T; ++t) x.insert(x.end(), {1, 0, 0, 0});
      RouterCase c(4, 1, score, x);
      c.config.scaling_factor = T == 7 ? 2.5f : 1.0f;
      const RouterResult result = test::forward(c);
      const std::vector<float> d = test::backward(c, {}, result.route, std::vector<float>(static_cast<std::size_t>(T), 1.0f));
      for (std::int64_t t = 0; t < T; ++t) EXPECT_EQ(result.weights(t)[0], c.config.scaling_factor);
      EXPECT_EQ(d, std::vector<float>(d.size(), 0.0f));
    }
  }
}

TEST_P(RouterCases, F04_K1WithoutRenormalisationHasARealGradient) {
  RouterCase c(4, 1, ScoreFunction::kSoftmax, {1, 0, 0, 0});
  c.config.renormalise = false;
  RouterResult result = test::forward(c);
  expect_near(result.weights(0), {0.475367}, 1e-6);
  expect_near(test::backward(c, {}, result.route, {1.0f}), {0.249393, -0.083131, -0.083131, -0.083131}, 1e-6);
  c.config.score = ScoreFunction::kSigmoid;
  result = test::forward(c);
  expect_near(result.weights(0), {0.731059}, 1e-6);
  expect_near(test::backward(c, {}, result.route, {1.0f}), {0.196612, 0, 0, 0}, 1e-6);
}

TEST_P(RouterCases, F04_K1WithRenormalisationWarnsOncePerProcess) {
  std::vector<std::string> warnings;
  forget_warnings();
  set_log_callback([&](LogLevel level, const std::string& text) {
    if (level == LogLevel::kWarning) warnings.push_back(text);
  });
  RouterCase c(4, 1, ScoreFunction::kSoftmax, {1, 0, 0, 0});
  c.config.renormalise = false;
  test::forward(c);
  EXPECT_TRUE(warnings.empty());
  c.config.renormalise = true;
  for (int call = 0; call < 3; ++call) test::forward(c);
  set_log_callback({});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("the task loss cannot train the router"));
}

TEST_P(RouterCases, F05_WeightsSumToOneAtAnyLogits) {
  for (const float x : {-50.0f, -88.0f, -89.0f, -100.0f, -104.0f, -10000.0f}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const ScoreFunction score : {ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
        RouterCase c(8, 8, score, std::vector<float>(8, x));
        c.dtype = dtype;
        c.bias.assign(8, 200.0f);
        const RouterResult result = test::forward(c);
        EXPECT_EQ(result.ids(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7})) << x;
        expect_near(result.weights(0), std::vector<double>(8, 0.125), 1e-6);
        const std::vector<float> w = result.weights(0);
        EXPECT_NEAR(std::accumulate(w.begin(), w.end(), 0.0), 1.0, 1e-6);
        for (const float d : test::backward(c, {}, result.route, {1, 2, 3, 4, 5, 6, 7, 8})) EXPECT_TRUE(std::isfinite(d)) << x;
      }
    }
  }
}

TEST_P(RouterCases, F05_RatiosSurviveUnderflow) {
  RouterCase c(8, 2, ScoreFunction::kSigmoid, {-100, -101, -10000, -10000, -10000, -10000, -10000, -10000});
  c.bias.assign(8, 200.0f);
  const RouterResult result = test::forward(c);
  EXPECT_EQ(result.ids(0), (Ids{0, 1}));
  expect_near(result.weights(0), {0.731059, 0.268941}, 1e-6);
  expect_near(test::backward(c, {}, result.route, {1, 0}), {0.196612, -0.196612, 0, 0, 0, 0, 0, 0}, 1e-6);
}

TEST_P(RouterCases, F05_OrdinaryLogitsStayOrdinary) {
  RouterCase c(4, 4, ScoreFunction::kSigmoid, {2, -1, -1, -3});
  c.bias.assign(4, 0.0f);
  const RouterResult result = test::forward(c);
  EXPECT_EQ(result.ids(0), (Ids{0, 1, 2, 3}));
  expect_near(result.weights(0), {0.600773, 0.183439, 0.183439, 0.032348}, 1e-6);
}

TEST_P(RouterCases, F05_ParityModeFadesAsItsOriginalDoesAndIsUniformAtZero) {
  RouterCase c(8, 8, ScoreFunction::kSigmoid, std::vector<float>(8, -50.0f));
  c.config.normalise_epsilon = 1e-20f;
  std::vector<float> w = test::forward(c).weights(0);
  EXPECT_NEAR(std::accumulate(w.begin(), w.end(), 0.0), 0.133674, 1e-6);
  c.logits.assign(8, -10000.0f);
  const RouterResult result = test::forward(c);
  expect_near(result.weights(0), std::vector<double>(8, 0.125), 1e-7);
  EXPECT_EQ(test::backward(c, {}, result.route, {1, 2, 3, 4, 5, 6, 7, 8}), std::vector<float>(8, 0.0f));
}

TEST_P(RouterCases, F06_TheLowerIdWins) {
  RouterCase c(8, 2, ScoreFunction::kSoftmaxSelected, std::vector<float>(8, 0.0f));
  EXPECT_EQ(test::forward(c).ids(0), (Ids{0, 1}));
  expect_near(test::forward(c).weights(0), {0.5, 0.5}, 1e-7);
  c.config.score = ScoreFunction::kSoftmax;
  c.config.renormalise = false;
  EXPECT_EQ(test::forward(c).ids(0), (Ids{0, 1}));
  expect_near(test::forward(c).weights(0), {0.125, 0.125}, 1e-7);
  c.config.score = ScoreFunction::kSigmoid;
  c.config.renormalise = true;
  EXPECT_EQ(test::forward(c).ids(0), (Ids{0, 1}));
  expect_near(test::forward(c).weights(0), {0.5, 0.5}, 1e-7);
  const RouterCase cut(8, 2, ScoreFunction::kSoftmaxSelected, {0, 1, 3, 1, 0, 0, 0, 0});
  EXPECT_EQ(test::forward(cut).ids(0), (Ids{2, 1}));
  expect_near(test::forward(cut).weights(0), {0.880797, 0.119203}, 1e-6);
  EXPECT_EQ(test::forward(grouped_case(grouped(8, 2, 4, 2), std::vector<float>(8, 0.0f))).ids(0), (Ids{0, 1}));
  EXPECT_EQ(test::forward(RouterCase(4, 1, ScoreFunction::kSoftmaxSelected, {-0.0f, 0.0f, -1, -1})).ids(0), (Ids{0}));
}

TEST_P(RouterCases, F06_TiedRowsAreTheSameBytesInEveryCallBatchAndPool) {
  RouterCase c(384, 8, ScoreFunction::kSigmoid, test::normal_logits(130, 384, 9));
  c.dtype = DType::kBF16;
  const RouterResult first = test::forward(c);
  ThreadPool pool(3);
  const auto bytes = static_cast<std::size_t>(c.T * c.config.K) * sizeof(float);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const RouterResult again = test::forward(c, Stream::cpu(repeat % 2 == 0 ? nullptr : &pool));
    ASSERT_EQ(std::memcmp(again.route.view().ids, first.route.view().ids, bytes / 2), 0);
    ASSERT_EQ(std::memcmp(again.route.view().weights, first.route.view().weights, bytes), 0);
  }
  for (std::int64_t t = 0; t < c.T; t += 13) {
    RouterCase alone = c;
    alone.T = 1;
    alone.logits.assign(c.logits.begin() + t * 384, c.logits.begin() + (t + 1) * 384);
    EXPECT_EQ(test::forward(alone).ids(0), first.ids(t));
    EXPECT_EQ(test::forward(alone).weights(0), first.weights(t));
  }
}

}  // namespace
}  // namespace waybill
