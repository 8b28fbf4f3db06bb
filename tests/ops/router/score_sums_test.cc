// SPDX-License-Identifier: Apache-2.0
// RouterOutputs::score_sums and the losses made from them.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ops/router/router_fixture.h"

namespace waybill {
namespace {

using test::RouterCase;

class RouterScoreSums : public ::testing::TestWithParam<const char*> {
 protected:
  test::ForceRouter force_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Implementations, RouterScoreSums, ::testing::Values("ref", "fast"), [](const auto& suite) { return std::string(suite.param); });

// The sums of the forward pass give the losses that the logits give: every score, padding, masks and rows without a logit.
TEST_P(RouterScoreSums, ScoreSumsGiveTheLossesThatTheLogitsGive) {
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    constexpr std::int64_t T = 600, E = 12;
    RouterCase c(E, 3, score, test::normal_logits(T, E, 9, 3.0f));
    for (std::int64_t e = 0; e < E; ++e) c.logits[static_cast<std::size_t>(5 * E + e)] = NAN;
    c.logits[7 * E + 1] = INFINITY;
    c.padding_mask.assign(T, 0);
    c.padding_mask[9] = 1;
    c.expert_mask.assign(E, 0);
    c.expert_mask[2] = 1;
    const test::StoredInputs stored(c);
    Route route(T, 3, E);
    std::vector<double> sums(E + 1, NAN);
    RouterOutputs outputs;
    outputs.route = route.view(), outputs.score_sums = sums.data();
    router_forward(c.config, stored.inputs, outputs);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end() - 1, 0.0), T - 2, 1e-4) << "the probabilities of a valid row with a logit sum to 1";
    EXPECT_EQ(sums[2], 0.0);
    RouterLossConfig config;
    config.aux_coefficient = 0.5f, config.z_coefficient = 0.25f;
    const std::vector<std::int32_t> counts(route.view().counts, route.view().counts + E);
    RouterLossInputs given;
    given.aux_counts = counts.data();
    const RouterLosses read = test::losses(c, config, route, given);
    given.score_sums = sums.data();
    const RouterLosses made = test::losses(c, config, route, given);
    EXPECT_NEAR(made.aux, read.aux, 1e-6 * read.aux);
    EXPECT_NEAR(made.z, read.z, 1e-6 * read.z);
    // With a sequence loss the logits are read.
    config.sequence_coefficient = 0.5f, config.sequence_length = 100;
    given.score_sums = nullptr;
    const RouterLosses all = test::losses(c, config, route, given);
    given.score_sums = sums.data();
    EXPECT_EQ(test::losses(c, config, route, given).sequence, all.sequence);
    EXPECT_GT(all.sequence, 0.0);
  }
}

}  // namespace
}  // namespace waybill
