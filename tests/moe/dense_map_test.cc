// SPDX-License-Identifier: Apache-2.0
// The dense-map path: the same results where both paths are legal, every trigger with its reason, logged and counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/eligibility.h"
#include "moe/harness.h"
#include "waybill/log.h"

namespace waybill::test {
namespace {

MoeConfig rich_config() {
  MoeConfig c = small_config(8, 3, 8, 4);
  c.expert_bias = true, c.latent = 6, c.shared_F = 2, c.aux_coefficient = 0.1f;
  return c;
}

TEST(MoeDenseMap, EqualsTheCompactPathWhereBothAreLegal) {
  MoeConfig c = rich_config();
  const Weights<float> w = random_weights(c, 300);
  Batch batch = random_batch(c, {7, 0, 5, 4}, 301);
  batch.mask.assign(16, 0);
  batch.mask[3] = batch.mask[9] = 1;
  for (const std::int64_t alignment : {1, 8}) {
    c.alignment = alignment;
    c.force_dense_map = false;
    const Result compact = run_layer(c, w, batch);
    c.force_dense_map = true;
    const Result dense = run_layer(c, w, batch);
    EXPECT_EQ(compact.dense_forwards, 0);
    EXPECT_EQ(dense.dense_forwards, 4);
    EXPECT_EQ(dense.slots, compact.slots);
    EXPECT_LE(relative_error(dense.out, compact.out), 1e-6);
    EXPECT_LE(relative_error(dense.dx, compact.dx), 2e-6);
    EXPECT_LE(relative_error(dense.gradients.gate, compact.gradients.gate), 2e-6);
    EXPECT_LE(relative_error(dense.gradients.w1, compact.gradients.w1), 2e-6);
    EXPECT_LE(relative_error(dense.gradients.b2, compact.gradients.b2), 2e-6);
    EXPECT_GT(dense.bytes.ids + dense.bytes.weights, compact.bytes.ids + compact.bytes.weights);
  }
}

TEST(MoeDenseMap, ARowThatNamesAnExpertTwiceSumsBothWeights) {
  MoeConfig c = small_config(4, 3);
  const Weights<float> w = random_weights(c, 310);
  Batch batch = random_batch(c, {2, 2}, 311);
  batch.replay = {0, 1, 2, 3, 1, 0, 2, 2, 1, 3, -1, 3};  // rows 2 and 3 name an expert twice; both are on rank 1
  std::vector<std::string> lines;
  forget_warnings();
  set_log_callback([&](LogLevel level, const std::string& text) {
    if (level == LogLevel::kWarning) lines.push_back(text);
  });
  const Result r = run_layer(c, w, batch);
  set_log_callback({});
  EXPECT_EQ(r.dense_forwards, 2);  // every rank takes the same path
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines.front(), testing::HasSubstr("names an expert twice"));

  const Oracle oracle(c);  // its loop over k adds both slots
  Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, batch.replay);
  EXPECT_LE(relative_error(r.out, oracle.forward(wd, in).out), 3e-5);
  EXPECT_LE(relative_error(r.dx, oracle.gradient(wd, in, in.x, batch.d_out, 1.0)), 3e-5);
  EXPECT_LE(relative_error(r.gradients.gate, oracle.gradient(wd, in, wd.gate, batch.d_out, 1.0)), 3e-5);
  EXPECT_LE(relative_error(r.gradients.w2, oracle.gradient(wd, in, wd.w2, batch.d_out, 1.0)), 3e-5);

  c.allow_dense_map = false;
  try {
    run_layer(c, w, batch);
    FAIL() << "the batch was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_THAT(error.what(), testing::HasSubstr("names an expert twice"));
  }
}

// A caller's map with the router's own routes gives the router's output; its gradient is that of the weights; any number of experts
// a token is legal.
TEST(MoeDenseMap, ACallersMapReplacesTheRouter) {
  MoeConfig c = small_config(4, 2);
  c.shared_F = 2, c.aux_coefficient = 0.1f;
  const Weights<float> w = random_weights(c, 340);
  const Batch batch = random_batch(c, {3, 0}, 341);
  std::vector<float> map{0.5f, 0, 0, 0.25f, 0, 0, 0, 0, 0.1f, 0.2f, 0.3f, 0.4f};
  std::vector<float> d_map, out;
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 2, fabric.rank(), w, batch);
    RunOptions options;
    options.forward.dense_map = TensorView::of(map.data(), {rank.T, 4});
    rank.run(layer, c, batch, options);
    EXPECT_EQ(rank.step.counts, (std::vector<std::int64_t>{2, 1, 1, 2}));
    EXPECT_EQ(rank.step.dense_map_reasons, kDenseMapCallerMap);
    EXPECT_EQ(rank.step.losses.aux, 0.0);
    for (const float value : rank.gradients.w.gate) EXPECT_EQ(value, 0.0f);
    if (fabric.rank() == 0) {
      out = rank.out;
      d_map.assign(rank.step.d_dense_map.as<float>(), rank.step.d_dense_map.as<float>() + 12);
    }
  });
  // One expert at a time with weight 1 (K = 1, renormalised) plus the shared expert: out = shared + sum_e map[e] * f_e(x).
  MoeConfig single = c;
  single.K = 1, single.aux_coefficient = 0;
  MoeConfig routed = single;
  routed.shared_F = 0;
  const Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(single, batch, {-1, -1, -1});
  const std::vector<double> shared = Oracle(single).forward(wd, in).out;
  std::vector<double> expected = shared, expected_d_map(12, 0.0);
  for (std::int32_t e = 0; e < 4; ++e) {
    in.ids = {e, e, e};
    const std::vector<double> alone = Oracle(routed).forward(wd, in).out;
    for (std::size_t i = 0; i < 18; ++i) {
      const std::size_t at = i / 6 * 4 + static_cast<std::size_t>(e);
      expected[i] += static_cast<double>(map[at]) * alone[i];
      if (map[at] != 0.0f) expected_d_map[at] += static_cast<double>(batch.d_out[i]) * alone[i];
    }
  }
  EXPECT_LE(relative_error(out, expected), 1e-5);
  EXPECT_LE(relative_error(d_map, expected_d_map), 1e-5);
}

TEST(MoeDenseMap, ACallersMapOnSomeRanksOnlyIsRefused) {
  const MoeConfig c = small_config(4, 2);
  const Weights<float> w = random_weights(c, 350);
  const Batch batch = random_batch(c, {2, 2}, 351);
  std::vector<float> map(8, 0.5f);
  std::string message;
  try {
    run_ranks(2, [&](Fabric& fabric) {
      MoeLayer layer(c, fabric, fabric);
      RankRun rank(c, 2, fabric.rank(), w, batch);
      RunOptions options;
      if (fabric.rank() == 0) options.forward.dense_map = TensorView::of(map.data(), {2, 4});
      rank.run(layer, c, batch, options);
    });
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_THAT(message, testing::HasSubstr("1 of 2 ranks"));
}

// Capacity 1 of 8 routes: experts 0..3 take one route each from each rank; first choices go first, then earlier tokens.
TEST(MoeCapacity, RoutesBeyondCapacityAreDroppedFirstChoicesFirst) {
  MoeConfig c = small_config(4, 2);
  const Weights<float> w = random_weights(c, 320);
  Batch batch = random_batch(c, {4}, 321);
  batch.replay = {0, 1, 0, 2, 1, 0, 1, 3};
  c.capacity_factor = 0.5;  // ceil(0.5 * 4 * 2 / 4) = 1
  const Result dropped = run_layer(c, w, batch);
  EXPECT_EQ(dropped.slots[0], 4);
  EXPECT_EQ(dropped.dropped, 4);
  EXPECT_EQ(dropped.counts, (std::vector<std::int64_t>{3, 3, 1, 1}));  // the router's decision, before the drop
  // Weights are those of the full rows: dropping does not renormalise. Token 0 keeps {0}, 1 keeps {2}, 2 keeps {1}, 3 keeps {3}.
  const std::vector<std::int32_t> kept{0, -1, -1, 2, 1, -1, -1, 3};
  const Oracle oracle(c);
  const Weights<double> wd = to_double(w);
  OracleInputs in = oracle_inputs(c, batch, batch.replay);
  const OracleResult full = oracle.forward(wd, in);
  c.capacity_factor = 0;
  for (std::size_t t = 0; t < 4; ++t) {
    const std::size_t k = kept[2 * t] >= 0 ? 0 : 1;
    MoeConfig single = c;
    single.K = 1;
    OracleInputs one = in;
    one.ids = {kept[0] >= 0 ? kept[0] : kept[1], kept[2] >= 0 ? kept[2] : kept[3], kept[4] >= 0 ? kept[4] : kept[5], kept[6] >= 0 ? kept[6] : kept[7]};
    const OracleResult alone = Oracle(single).forward(wd, one);  // weight 1
    for (std::size_t h = 0; h < 6; ++h) EXPECT_NEAR(dropped.out[t * 6 + h], full.weights[2 * t + k] * alone.out[t * 6 + h], 1e-5);
  }
}

TEST(MoeCapacity, LargeCapacityIsDroplessAndPaddingToItChangesNothing) {
  MoeConfig c = rich_config();
  const Weights<float> w = random_weights(c, 330);
  const Batch batch = random_batch(c, {7, 0, 5, 4}, 331);
  const Result dropless = run_layer(c, w, batch);
  c.capacity_factor = 8;
  const Result large = run_layer(c, w, batch);
  EXPECT_EQ(large.dropped, 0);
  EXPECT_TRUE(same_bits(large.out, dropless.out));
  EXPECT_TRUE(same_bits(large.gradients, dropless.gradients));
  for (const double factor : {0.7, 1.0, 8.0, 1e300}) {
    SCOPED_TRACE(factor);
    c.capacity_factor = factor;
    c.pad_to_capacity = false;
    const Result drop = run_layer(c, w, batch);
    c.pad_to_capacity = true;
    const Result pad = run_layer(c, w, batch);
    EXPECT_EQ(pad.dense_forwards, 4);
    EXPECT_EQ(pad.dropped, drop.dropped);
    EXPECT_EQ(pad.slots, drop.slots);
    EXPECT_LE(relative_error(pad.out, drop.out), 1e-6);
    EXPECT_LE(relative_error(pad.dx, drop.dx), 2e-6);
    EXPECT_LE(relative_error(pad.gradients.gate, drop.gradients.gate), 2e-6);
    EXPECT_LE(relative_error(pad.gradients.w1, drop.gradients.w1), 2e-6);
    EXPECT_LE(relative_error(pad.gradients.b1, drop.gradients.b1), 2e-6);
  }
}

TEST(MoeDenseMap, EveryTriggerHasAReasonInWords) {
  EXPECT_EQ(describe_dense_map(kDenseMapNone), "compact routes are legal");
  const std::string all =
      describe_dense_map(kDenseMapDuplicateIds | kDenseMapForced | kDenseMapTopK | kDenseMapFabric | kDenseMapPadToCapacity | kDenseMapCallerMap);
  for (const char* word : {"twice", "force_dense_map", "K is above", "fabric", "capacity", "caller"}) EXPECT_THAT(all, testing::HasSubstr(word));
  const std::unique_ptr<Fabric> fabric = make_single_fabric();
  MoeConfig c = small_config(40000, 32768);
  EXPECT_EQ(moe::static_dense_reasons(c, *fabric), kDenseMapTopK);
  c = small_config();
  EXPECT_EQ(moe::static_dense_reasons(c, *fabric), kDenseMapNone);
  c.force_dense_map = true;
  EXPECT_EQ(moe::static_dense_reasons(c, *fabric), kDenseMapForced);
  c.pad_to_capacity = true;
  EXPECT_EQ(moe::static_dense_reasons(c, *fabric), kDenseMapForced | kDenseMapPadToCapacity);
}

}  // namespace
}  // namespace waybill::test
