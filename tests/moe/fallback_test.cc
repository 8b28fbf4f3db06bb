// SPDX-License-Identifier: Apache-2.0
// Every trigger of the dense-map path: the batch takes it on every rank, says why once, and is counted. Expert tensor parallelism on
// both paths.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/harness.h"
#include "moe/warning_log.h"

namespace waybill::test {
namespace {

// One warning that names the reason, and one count per rank and training forward.
void expect_fallback(const Result& r, const WarningLog& log, const std::string& reason, std::int64_t forwards) {
  ASSERT_EQ(log.lines().size(), 1u);
  EXPECT_THAT(log.lines()[0], testing::HasSubstr(reason));
  EXPECT_EQ(r.dense_forwards, forwards);
}

void expect_same(const Result& seen, const Result& wanted) {
  EXPECT_EQ(seen.ids, wanted.ids);
  EXPECT_LE(relative_error(seen.out, wanted.out), 2e-6);
  EXPECT_LE(relative_error(seen.dx, wanted.dx), 4e-6);
  EXPECT_LE(relative_error(seen.gradients.gate, wanted.gradients.gate), 4e-6);
  EXPECT_LE(relative_error(seen.gradients.w1, wanted.gradients.w1), 4e-6);
  EXPECT_LE(relative_error(seen.gradients.w2, wanted.gradients.w2), 4e-6);
}

TEST(MoeFallback, CompactRoutesAreNeitherLoggedNorCounted) {
  const MoeConfig c = small_config(8, 2);
  const WarningLog log;
  const Result r = run_layer(c, random_weights(c, 700), random_batch(c, {4, 3}, 701));
  EXPECT_EQ(r.dense_forwards, 0);
  EXPECT_TRUE(log.lines().empty());
}

TEST(MoeFallback, DuplicateIdsOnOneRankTakeEveryRankThere) {
  const MoeConfig c = small_config(4, 2);
  Batch batch = random_batch(c, {2, 2}, 711);
  batch.replay = {0, 1, 2, 3, 1, 1, 0, 2};
  const WarningLog log;
  const Result r = run_layer(c, random_weights(c, 710), batch);
  expect_fallback(r, log, "names an expert twice", 2);
}

TEST(MoeFallback, ForcedAndPadToCapacity) {
  MoeConfig c = small_config(8, 2);
  const Weights<float> w = random_weights(c, 720);
  const Batch batch = random_batch(c, {5, 4}, 721);
  const Result compact = run_layer(c, w, batch);
  c.force_dense_map = true;
  {
    const WarningLog log;
    const Result r = run_layer(c, w, batch);
    expect_fallback(r, log, "force_dense_map", 2);
    expect_same(r, compact);
  }
  c.force_dense_map = false;
  c.capacity_factor = 8;
  c.pad_to_capacity = true;
  const WarningLog log;
  const Result r = run_layer(c, w, batch);
  expect_fallback(r, log, "padded to their capacity", 2);
  expect_same(r, compact);
}

TEST(MoeFallback, KAboveWhatCompactPlansNumber) {
  MoeConfig c = small_config(32770, 32768, 2, 1);
  c.debug_checks = false;
  const Weights<float> w = random_weights(c, 730);
  const Batch batch = random_batch(c, {1}, 731);
  const WarningLog log;
  const Result r = run_layer(c, w, batch);
  expect_fallback(r, log, "K is above the limit", 1);
  EXPECT_EQ(r.slots[0], 32768);
  const Oracle oracle(c);
  OracleInputs in = oracle_inputs(c, batch, r.ids);
  EXPECT_LE(relative_error(r.out, oracle.forward(to_double(w), in).out), 1e-4);
}

TEST(MoeFallback, ACallersMapIsLoggedAndCounted) {
  const MoeConfig c = small_config(4, 2);
  const Weights<float> w = random_weights(c, 740);
  const Batch batch = random_batch(c, {2, 1}, 741);
  std::vector<float> map(8, 0.25f);
  std::int64_t forwards[2] = {0, 0};
  const WarningLog log;
  run_ranks(2, [&](Fabric& fabric) {
    MoeLayer layer(c, fabric, fabric);
    RankRun rank(c, 2, fabric.rank(), w, batch);
    RunOptions options;
    options.forward.dense_map = TensorView::of(map.data(), {rank.T, 4});
    rank.run(layer, c, batch, options);
    forwards[fabric.rank()] = layer.num_dense_map_forwards();
  });
  ASSERT_EQ(log.lines().size(), 1u);
  EXPECT_THAT(log.lines()[0], testing::HasSubstr("caller gave a dense map"));
  EXPECT_EQ(forwards[0] + forwards[1], 2);
}

// An engine that is not on the list of those with a compact exchange.
class OtherEngine final : public Fabric {
 public:
  explicit OtherEngine(Fabric& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const char* engine() const override { return "other"; }
  const Topology& topology() const override { return inner_.topology(); }
  std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  void barrier(std::string_view phase) override { inner_.barrier(phase); }
  void all_gather(const void* send, void* receive, std::size_t bytes, std::string_view phase) override { inner_.all_gather(send, receive, bytes, phase); }
  std::unique_ptr<ExchangeRequest> all_to_all_start(std::span<const Span> send, std::span<const Span> receive, std::string_view phase) override {
    return inner_.all_to_all_start(send, receive, phase);
  }
  void all_reduce(std::span<float> values, ReduceOp op, std::string_view phase) override { inner_.all_reduce(values, op, phase); }
  void all_reduce(std::span<double> values, ReduceOp op, std::string_view phase) override { inner_.all_reduce(values, op, phase); }
  void all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view phase) override { inner_.all_reduce(values, op, phase); }
  void broadcast(void* data, std::size_t bytes, int root, std::string_view phase) override { inner_.broadcast(data, bytes, root, phase); }
  std::unique_ptr<Fabric> split(int colour, int key, std::string_view name) override { return inner_.split(colour, key, name); }
  void abort(const std::string& reason) noexcept override { inner_.abort(reason); }

 private:
  Fabric& inner_;
};

TEST(MoeFallback, AFabricWithoutCompactExchange) {
  const MoeConfig c = small_config(8, 2);
  const Weights<float> w = random_weights(c, 750);
  const Batch batch = random_batch(c, {5, 4}, 751);
  const Result compact = run_layer(c, w, batch);
  Result r = empty_result(c, 2, w, batch);
  const WarningLog log;
  run_ranks(2, [&](Fabric& fabric) {
    OtherEngine other(fabric);
    MoeLayer layer(c, other, other);
    RankRun rank(c, 2, fabric.rank(), w, batch);
    rank.run(layer, c, batch, {});
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == fabric.rank()) rank.collect(c, 2, turn, layer, r);
      fabric.barrier("test turn");
    }
  });
  expect_fallback(r, log, "fabric engine has no compact exchange", 2);
  expect_same(r, compact);
}

// E = 8 experts on P = 2 ranks: each rank holds half of every expert (t = 2), or 4 whole experts (t = 1).
TEST(MoeFallback, ExpertTensorParallelExpansionIsEqualOnBothPaths) {
  MoeConfig c = small_config(8, 3, 6, 4);
  c.expert_bias = true;
  const Weights<float> w = random_weights(c, 760);
  const Batch batch = random_batch(c, {7, 4}, 761);
  const Result whole = run_layer(c, w, batch);
  for (const bool dense : {false, true}) {
    SCOPED_TRACE(dense ? "dense-map path" : "compact path");
    c.force_dense_map = dense;
    c.expert_tensor_parallel = 1;
    expect_same(run_layer(c, w, batch), whole);
    c.expert_tensor_parallel = 2;
    const Result split = run_layer(c, w, batch);
    expect_same(split, whole);
    EXPECT_LE(relative_error(split.gradients.b1, whole.gradients.b1), 4e-6);
    EXPECT_LE(relative_error(split.gradients.b2, whole.gradients.b2), 4e-6);
    EXPECT_EQ(split.dense_forwards, dense ? 2 : 0);
    EXPECT_EQ(split.slots[0], 11 * 3);  // every route reaches every slice
    EXPECT_EQ(split.slots[1], 11 * 3);
  }
}

}  // namespace
}  // namespace waybill::test
