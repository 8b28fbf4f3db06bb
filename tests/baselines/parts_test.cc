// SPDX-License-Identifier: Apache-2.0
// The repeated-max router against the library's, and the slot exchange's worked example.
#include <gtest/gtest.h>

#include "baselines/repeated_max.h"
#include "baselines/slot_exchange.h"
#include "moe/harness.h"

namespace waybill::baselines {
namespace {

using test::random_values;
using test::relative_error;

TEST(RepeatedMax, ChoosesWhatTheRouterChoosesUnderEveryOption) {
  const std::int64_t T = 37, E = 24;
  std::vector<float> logits = random_values(static_cast<std::size_t>(T * E), 21, 2.0f), bias = random_values(static_cast<std::size_t>(E), 22, 1.0f);
  for (std::size_t i = 0; i < 5 * 24; ++i) logits[i] = static_cast<float>(static_cast<int>(logits[i]));  // ties
  for (std::size_t e = 0; e < 22; ++e) logits[6 * 24 + e] = e % 2 == 0 ? NAN : -INFINITY;                // a row with two candidates
  const TensorView view = TensorView::of(logits.data(), {T, E});
  for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSoftmaxSelected, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus}) {
    for (int option = 0; option < 16; ++option) {
      RouterConfig config;
      config.E = E;
      config.K = 4;
      config.score = score;
      config.renormalise = (option & 1) != 0;
      config.scaling_factor = 2.5f;
      if ((option & 2) != 0) config.num_groups = 6, config.num_kept_groups = 2;
      if ((option & 4) != 0) config.group_score = GroupScore::kTopKPerGroup;
      const bool with_bias = (option & 8) != 0;
      SCOPED_TRACE(testing::Message() << "score " << static_cast<int>(score) << ", option " << option);
      Route wanted(T, 4, E), seen(T, 4, E);
      RouterInputs inputs;
      inputs.logits = view;
      if (with_bias) inputs.expert_bias = TensorView::of(bias.data(), {E});
      RouterOutputs outputs;
      outputs.route = wanted.view();
      router_forward(config, inputs, outputs);
      std::int64_t visited = 0;
      repeated_max_route(config, view, with_bias ? bias.data() : nullptr, seen.view(), visited, {});
      std::vector<float> seen_weights, wanted_weights;
      for (std::int64_t i = 0; i < T * 4; ++i) {
        ASSERT_EQ(seen.view().id(i / 4, i % 4), wanted.view().id(i / 4, i % 4)) << "row " << i / 4;
        EXPECT_NEAR(seen.view().weights[i], wanted.view().weights[i], 2e-6f * std::abs(wanted.view().weights[i])) << "row " << i / 4;
      }
      for (std::int64_t e = 0; e < E; ++e) EXPECT_EQ(seen.view().counts[e], wanted.view().counts[e]);
      EXPECT_GE(visited, T * E * 5);  // the scores, then K passes
    }
  }
}

TEST(SlotExchange, WorkedExample) {
  const Route rank0 = Route::from_ids(2, 2, 4, std::vector<std::int32_t>{2, 0, 3, 2}), rank1(0, 2, 4);
  run_ranks(2, [&](Fabric& fabric) {
    SlotExchange exchange(block_placement(4, 2), fabric, {});
    ExchangeBytes bytes;
    std::int64_t visited = 0;
    exchange.plan(fabric.rank() == 0 ? rank0 : rank1, -1, bytes, visited, nullptr);
    const bool first = fabric.rank() == 0;
    EXPECT_EQ(exchange.send_slot(), first ? (std::vector<std::int64_t>{1, 0, 3, 2}) : std::vector<std::int64_t>{});
    EXPECT_EQ(exchange.expert_counts(), first ? (std::vector<std::int64_t>{1, 0}) : (std::vector<std::int64_t>{2, 1}));
    std::vector<float> sent{10, 20, 30, 40}, rows(5, -1.0f), back(4, 0.0f);
    const std::vector<std::int64_t> starts{0, 3};  // a gap after the first expert's rows
    const std::int64_t n = exchange.num_sent();
    exchange.dispatch(TensorView::of(sent.data(), {n, 1}), starts, TensorView::of(rows.data(), {5, 1}), bytes, nullptr);
    EXPECT_EQ(rows, first ? (std::vector<float>{10, -1, -1, -1, -1}) : (std::vector<float>{20, 30, -1, 40, -1}));
    exchange.collect(TensorView::of(rows.data(), {5, 1}), starts, TensorView::of(back.data(), {n, 1}), bytes, nullptr);
    if (first) {
      EXPECT_EQ(back, sent);
    }
    EXPECT_EQ(bytes.payload, first ? 12 : 0);
    EXPECT_EQ(bytes.combined, first ? 0 : 12);
  });
}

TEST(SlotExchange, PaddedExpertsGetTheSameNumberOfRowsFromEverySource) {
  const Route kept = Route::from_ids(2, 2, 4, std::vector<std::int32_t>{2, 0, 3, -1});
  const std::unique_ptr<Fabric> fabric = make_single_fabric();
  SlotExchange exchange(block_placement(4, 1), *fabric, {});
  ExchangeBytes bytes;
  std::int64_t visited = 0;
  exchange.plan(kept, 1, bytes, visited, nullptr);
  EXPECT_EQ(exchange.send_slot(), (std::vector<std::int64_t>{1, -1, 0, 2}));
  EXPECT_EQ(exchange.expert_counts(), (std::vector<std::int64_t>{1, 1, 1, 1}));
}

}  // namespace
}  // namespace waybill::baselines
