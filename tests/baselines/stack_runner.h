// SPDX-License-Identifier: Apache-2.0
// Runs one stack on P ranks over a batch that is split by tokens, forward and backward, and collects the results as if there were one.
#pragma once

#include "moe/harness.h"
#include "waybill/baselines.h"

namespace waybill::test {

struct StackResult {
  std::vector<float> out, dx;
  Weights<float> gradients;
  std::vector<std::int32_t> ids, kept;  // [T, K]
  MoeStackCounters counters;            // summed over ranks
};

inline void add_counters(MoeStackCounters& sum, const MoeStackCounters& part) {
  sum.bytes += part.bytes;
  sum.slots_visited += part.slots_visited;
  sum.scores_visited += part.scores_visited;
  sum.real_rows += part.real_rows;
  sum.computed_rows += part.computed_rows;
  sum.dropped_routes += part.dropped_routes;
}

inline void collect_stack(const MoeConfig& c, int P, RankRun& rank, int turn, const MoeStack& stack, StackResult& r) {
  std::copy(rank.out.begin(), rank.out.end(), r.out.begin() + rank.first * c.H);
  std::copy(rank.dx.begin(), rank.dx.end(), r.dx.begin() + rank.first * c.H);
  for (std::int64_t i = 0; i < rank.T * c.K; ++i) {
    r.ids[static_cast<std::size_t>(rank.first * c.K + i)] = stack.route().view().id(i / c.K, i % c.K);
    r.kept[static_cast<std::size_t>(rank.first * c.K + i)] = stack.kept_route().view().id(i / c.K, i % c.K);
  }
  exchange_slice(c, P, turn, r.gradients, rank.gradients.w, /*add=*/true);
  detail::add_to(r.gradients.gate, rank.gradients.w.gate);
  add_counters(r.counters, stack.counters());
}

inline StackResult run_stack(const MoeStackConfig& config, const Weights<float>& w, const Batch& batch, int threads = 1, int repeats = 1) {
  const MoeConfig& c = config.moe;
  const int P = static_cast<int>(batch.tokens.size());
  StackResult result;
  result.out.assign(static_cast<std::size_t>(batch.T() * c.H), 0.0f), result.dx = result.out;
  result.ids.assign(static_cast<std::size_t>(batch.T() * c.K), -9), result.kept = result.ids;
  result.gradients = w;
  result.gradients.for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
  run_ranks(P, [&](Fabric& fabric) {
    ThreadPool pool(threads);
    const std::unique_ptr<MoeStack> stack = make_moe_stack(config, fabric, &pool);
    RankRun rank(c, P, fabric.rank(), w, batch);
    const std::int64_t L = c.L(P);
    const MoeTensors parameters = views(c, L, rank.weights.w), gradients = views(c, L, rank.gradients.w);
    const TensorView x = TensorView::of(rank.x.data(), {rank.T, c.H}), out = TensorView::of(rank.out.data(), {rank.T, c.H});
    const Route* replay = batch.replay.empty() ? nullptr : &rank.replay;
    for (int i = 0; i < repeats; ++i) {
      rank.gradients.w.for_each([](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), 0.0f); });
      std::fill(rank.out.begin(), rank.out.end(), -77.0f), std::fill(rank.dx.begin(), rank.dx.end(), -77.0f);
      stack->reset_counters();
      stack->forward(parameters, x, out, replay);
      stack->backward(parameters, gradients, x, TensorView::of(rank.d_out.data(), {rank.T, c.H}), TensorView::of(rank.dx.data(), {rank.T, c.H}));
    }
    for (int turn = 0; turn < P; ++turn) {
      if (turn == fabric.rank()) collect_stack(c, P, rank, turn, *stack, result);
      fabric.barrier("test turn");
    }
  });
  return result;
}

inline MoeStackConfig stack_config(MoeStackKind kind, const MoeConfig& moe) {
  MoeStackConfig config;
  config.kind = kind;
  config.moe = moe;
  config.moe.debug_checks = false;
  config.moe.router.E = moe.E;
  config.moe.router.K = moe.K;
  config.capacity_factor = static_cast<double>(moe.E);  // nothing is dropped
  config.block = 4;
  return config;
}

inline void expect_equal(const StackResult& seen, const StackResult& wanted, double tolerance = 2e-5) {
  EXPECT_EQ(seen.ids, wanted.ids);
  EXPECT_LE(relative_error(seen.out, wanted.out), tolerance);
  EXPECT_LE(relative_error(seen.dx, wanted.dx), tolerance);
  EXPECT_LE(relative_error(seen.gradients.gate, wanted.gradients.gate), tolerance);
  EXPECT_LE(relative_error(seen.gradients.w1, wanted.gradients.w1), tolerance);
  EXPECT_LE(relative_error(seen.gradients.w2, wanted.gradients.w2), tolerance);
}

}  // namespace waybill::test
