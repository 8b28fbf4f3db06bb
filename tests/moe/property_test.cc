// SPDX-License-Identifier: Apache-2.0
// Random layers on random routes: any rank count, any split, holes in the routes, padding, alignment, recompute, ETP.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "moe/harness.h"

namespace waybill::test {
namespace {

struct Draw {
  MoeConfig c;
  Batch batch;
  std::uint64_t seed = 0;
};

std::vector<std::int64_t> random_split(std::int64_t T, int P) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(P), 0);
  for (std::int64_t t = 0; t < T; ++t) ++tokens[static_cast<std::size_t>(*rc::gen::inRange(0, P))];
  return tokens;
}

// K distinct experts a token, some of them dropped to -1, in any order.
std::vector<std::int32_t> random_routes(const MoeConfig& c, std::int64_t T) {
  std::vector<std::int32_t> ids;
  const int holes = *rc::gen::inRange(0, 3);
  for (std::int64_t t = 0; t < T; ++t) {
    std::vector<std::int32_t> experts(static_cast<std::size_t>(c.E));
    std::iota(experts.begin(), experts.end(), 0);
    for (std::int64_t k = 0; k < c.K; ++k) {
      std::swap(experts[static_cast<std::size_t>(k)], experts[static_cast<std::size_t>(*rc::gen::inRange<std::int64_t>(k, c.E))]);
      ids.push_back(*rc::gen::inRange(0, 4) < holes ? -1 : experts[static_cast<std::size_t>(k)]);
    }
  }
  return ids;
}

Draw draw(int P) {
  Draw d;
  const int t = P % 2 == 0 && *rc::gen::inRange(0, 4) == 0 ? 2 : 1;
  d.c = small_config(P * *rc::gen::inRange<std::int64_t>(1, 4), 1, *rc::gen::inRange<std::int64_t>(1, 9), 2 * *rc::gen::inRange<std::int64_t>(1, 4));
  d.c.K = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(d.c.E, 5) + 1);
  d.c.expert_tensor_parallel = t;
  d.c.alignment = *rc::gen::element<std::int64_t>(1, 4, 16);
  d.c.recompute = *rc::gen::element(Recompute::kNone, Recompute::kActivation, Recompute::kLayer);
  d.c.router.score = *rc::gen::element(ScoreFunction::kSoftmax, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus);
  d.c.expert_bias = *rc::gen::arbitrary<bool>();
  d.c.latent = *rc::gen::element<std::int64_t>(0, 3);
  d.c.aux_coefficient = 0.1f;
  d.seed = *rc::gen::inRange<std::uint64_t>(0, 1u << 20);
  d.batch = random_batch(d.c, random_split(*rc::gen::inRange<std::int64_t>(0, 20), P), d.seed);
  if (*rc::gen::arbitrary<bool>()) d.batch.replay = random_routes(d.c, d.batch.T());
  if (*rc::gen::arbitrary<bool>()) {
    for (std::int64_t i = 0; i < d.batch.T(); ++i) d.batch.mask.push_back(*rc::gen::inRange(0, 4) == 0 ? 1 : 0);
  }
  return d;
}

TEST(MoeProperties, AnyLayoutEqualsOneRank) {
  const bool ok = rc::check("any layout equals one rank", [] {
    const int P = *rc::gen::element(1, 2, 4, 8);
    const Draw d = draw(P);
    const Weights<float> w = random_weights(d.c, d.seed + 1000);
    const Result r = run_layer(d.c, w, d.batch);
    MoeConfig plain = d.c;
    plain.alignment = 1, plain.recompute = Recompute::kNone, plain.expert_tensor_parallel = 1;
    Batch one = d.batch;
    one.tokens = {d.batch.T()};
    const Result expected = run_layer(plain, w, one);
    RC_ASSERT(r.ids == expected.ids);
    RC_ASSERT(r.counts == expected.counts);
    std::int64_t routes = 0;  // the dropless invariant
    for (const std::int32_t id : r.ids) routes += id >= 0 ? 1 : 0;
    RC_ASSERT(std::accumulate(r.counts.begin(), r.counts.end(), std::int64_t{0}) == routes);
    RC_ASSERT(std::accumulate(r.slots.begin(), r.slots.end(), std::int64_t{0}) == routes * d.c.expert_tensor_parallel);
    RC_ASSERT(relative_error(r.out, expected.out) <= 5e-6);
    RC_ASSERT(relative_error(r.dx, expected.dx) <= 1e-5);
    RC_ASSERT(relative_error(r.gradients.gate, expected.gradients.gate) <= 1e-5);
    RC_ASSERT(relative_error(r.gradients.w1, expected.gradients.w1) <= 1e-5);
    RC_ASSERT(relative_error(r.gradients.w2, expected.gradients.w2) <= 1e-5);
    RC_ASSERT(relative_error(r.gradients.b2, expected.gradients.b2) <= 1e-5);
  });
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace waybill::test
