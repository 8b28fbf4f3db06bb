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
}

}  // namespace
}  // namespace waybill::test
