// SPDX-License-Identifier: Apache-2.0
// The MoE layer over several (virtual) nodes of one process beside the same layer in one NVLink domain: to the bit where a node has one rank, within the
// bounds of another order of sums where it has more.
#include <gmock/gmock.h>

#include "cuda/moe_check.h"

namespace waybill::cuda {
namespace {

struct Layout {
  int nodes, per_node;
  int P() const { return nodes * per_node; }
};
class MoeNodesCuda : public ::testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Nodes, MoeNodesCuda, ::testing::Values(Layout{2, 1}, Layout{4, 1}, Layout{2, 2}, Layout{2, 4}),
                         [](const auto& test) { return fmt::format("{}x{}", test.param.nodes, test.param.per_node); });

MoeConfig node_layer(std::int64_t T_max) {
  MoeConfig c = gpu_config(32, 4, T_max);
  c.shared_F = 24, c.aux_coefficient = 1, c.z_coefficient = 0.1f;
  return c;
}

void expect_near(const mt::Result& got, const mt::Result& want, double bound, const std::string& what) {
  EXPECT_EQ(got.ids, want.ids) << what;
  EXPECT_TRUE(mt::same_bits(got.weights, want.weights)) << what << ": routing weights";
  EXPECT_LE(norm_error(got.out, want.out), bound) << what << ": out";
  EXPECT_LE(norm_error(got.dx, want.dx), bound) << what << ": dx";
  EXPECT_LE(norm_error(got.gradients.gate, want.gradients.gate), bound) << what << ": gate";
  EXPECT_LE(norm_error(got.gradients.w1, want.gradients.w1), bound) << what << ": w1";
  EXPECT_LE(norm_error(got.gradients.w2, want.gradients.w2), bound) << what << ": w2";
  EXPECT_LE(norm_error(got.gradients.shared_w1, want.gradients.shared_w1), bound) << what << ": shared_w1";
}

// One domain and nodes over two batches; the nodes twice.
void compare(const MoeConfig& c, Layout layout, const std::vector<std::int64_t>& tokens, const MoeGpuOptions& options, const std::string& what,
             const std::function<void(mt::Batch&)>& change = {}) {
  const mt::Weights<float> w = bf16_weights(c, 3);
  GpuMoe domain(c, layout.P(), w, options);
  MoeGpuOptions between = options;
  between.nodes = layout.nodes;
  GpuMoe nodes(c, layout.P(), w, between);
  for (std::uint64_t seed = 4; seed < 6; ++seed) {
    mt::Batch batch = bf16_batch(c, tokens, seed);
    if (change) change(batch);
    for (GpuMoe* gpu : {&domain, &nodes}) {
      gpu->upload(batch);
      if (options.accumulate) gpu->zero_gradients();
      gpu->step();
    }
    const mt::Result want = domain.result(), got = nodes.result();
    const std::string step = fmt::format("{}, {} nodes of {}, batch {}", what, layout.nodes, layout.per_node, seed);
    EXPECT_EQ(got.valid, want.valid) << step;
    EXPECT_DOUBLE_EQ(got.losses.aux, want.losses.aux) << step;
    EXPECT_DOUBLE_EQ(got.losses.z, want.losses.z) << step;
    for (int rank = 0; rank < layout.P(); ++rank) {
      if (c.aux_coefficient != 0) {
        EXPECT_EQ(nodes.total_counts(rank), domain.total_counts(rank)) << step << ", rank " << rank;
      }
      EXPECT_EQ(nodes.report(rank).slots, domain.report(rank).slots) << step << ", rank " << rank;
      EXPECT_EQ(nodes.status(rank).flags, domain.status(rank).flags) << step << ", rank " << rank;
    }
    if (layout.per_node == 1) {
      expect_same_bits(want, got, step);
    } else {
      // Another order of fp32 sums of the same terms; a bf16 wire rounds once a node, not once a rank, out and dx may be bf16.
      const bool rounds = c.combine_wire == CombineWire::kBF16 || options.out_dtype == DType::kBF16;
      expect_near(got, want, rounds ? kNormBound : 1e-5, step);
    }
    nodes.upload(batch);
    if (options.accumulate) nodes.zero_gradients();
    nodes.step();
    expect_same_bits(got, nodes.result(), step + ", again");
  }
  EXPECT_EQ(nodes.first_error(), "") << what;
}

TEST_P(MoeNodesCuda, GivesWhatOneDomainGives) {
  WB_NEEDS_GPU();
  const Layout layout = GetParam();
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    MoeConfig c = node_layer(100);
    c.combine_wire = wire;
    const std::string what = wire == CombineWire::kF32 ? "fp32 wire" : "bf16 wire";
    compare(c, layout, even(layout.P(), 100), {}, what);
    compare(c, layout, even(layout.P(), 97), {.out_dtype = DType::kBF16, .gradient_dtype = DType::kBF16}, what + ", bf16 results");
    compare(c, layout, even(layout.P(), 100), {.accumulate = true}, what + ", accumulated");
    c.latent = 32, c.global_coefficient = 0.5f, c.mode = ExchangeMode::kCaptured, c.receive_factor = 3;
    compare(c, layout, even(layout.P(), 60), {}, what + ", latent, global loss, budget");
  }
}

TEST_P(MoeNodesCuda, HardRoutes) {
  WB_NEEDS_GPU();
  const Layout layout = GetParam();
  const int P = layout.P();
  std::vector<std::int64_t> ragged;
  for (int p = 0; p < P; ++p) ragged.push_back(p % 4 == 1 ? 0 : (p % 4 == 2 ? 1 : 75 + p));
  MoeConfig c = node_layer(100);
  compare(c, layout, ragged, {}, "ragged");
  compare(gpu_config(32, 4, 100), layout, even(P, 0), {}, "no tokens at all");  // losses need some
  const auto replay = [&](const char* what, const std::function<std::int32_t(std::int64_t t, std::int64_t k)>& id) {
    compare(c, layout, even(P, 50), {}, what, [&](mt::Batch& batch) {
      for (std::int64_t t = 0; t < batch.T(); ++t) {
        for (std::int64_t k = 0; k < c.K; ++k) batch.replay.push_back(id(t, k));
      }
    });
  };
  replay("all to the first rank", [](std::int64_t, std::int64_t k) { return static_cast<std::int32_t>(k); });
  replay("all to the last rank", [&](std::int64_t, std::int64_t k) { return static_cast<std::int32_t>(c.E - 1 - k); });
  replay("one expert, the rest empty", [](std::int64_t, std::int64_t k) { return k == 0 ? 17 : -1; });
  replay("some tokens nowhere", [](std::int64_t t, std::int64_t k) { return t % 3 == 0 ? -1 : static_cast<std::int32_t>((t + 7 * k) % 32); });
  MoeConfig wide = gpu_config(32, 32 / layout.nodes, 40);  // K = the experts of a node
  compare(wide, layout, even(P, 40), {}, "K = E / nodes");
}

TEST_P(MoeNodesCuda, EveryRecomputeModePolicyAndRecipe) {
  WB_NEEDS_GPU();
  const Layout layout = GetParam();
  for (const Recompute recompute : {Recompute::kNone, Recompute::kActivation, Recompute::kLayer}) {
    MoeConfig c = node_layer(60);
    c.combine_wire = CombineWire::kF32, c.recompute = recompute;
    for (const bool resend : {false, true}) {
      MoeGpuOptions options;
      options.layer.resend_rows = resend, options.layer.exact_sizes = resend;
      options.layer.policy.gradient = resend ? DeviceMoePolicy::Rows::kGather : DeviceMoePolicy::Rows::kPermute;
      compare(c, layout, even(layout.P(), 60), options, fmt::format("recompute {}, rows sent again {}", static_cast<int>(recompute), resend));
    }
  }
  MoeConfig c = gpu_config(32, 4, 128, 128, 128);
  c.combine_wire = CombineWire::kF32, c.recipe.kind = Recipe::kMXFP8;
  compare(c, {layout.nodes, 1}, even(layout.nodes, 128), {}, "mxfp8");
}

TEST_P(MoeNodesCuda, AnExceededBudgetMakesTheStepInvalidOnEveryNode) {
  WB_NEEDS_GPU();
  const Layout layout = GetParam();
  const int P = layout.P();
  MoeConfig c = node_layer(64);
  c.mode = ExchangeMode::kCaptured, c.receive_factor = 1.5;
  MoeGpuOptions options;
  options.nodes = layout.nodes;
  GpuMoe nodes(c, P, bf16_weights(c, 3), options);
  mt::Batch spread = bf16_batch(c, even(P, 64), 4), full = spread;
  for (std::int64_t t = 0; t < spread.T(); ++t) {
    for (std::int64_t k = 0; k < c.K; ++k) {
      spread.replay.push_back(static_cast<std::int32_t>((t * c.K + k) % c.E));
      full.replay.push_back(static_cast<std::int32_t>(k));  // of rank 0 alone
    }
  }
  nodes.upload(spread), nodes.step();
  const mt::Result before = nodes.result();
  for (int rank = 0; rank < P; ++rank) EXPECT_EQ(nodes.report(rank).valid, 1);
  nodes.upload(full), nodes.step();
  const mt::Result invalid = nodes.result();
  for (int rank = 0; rank < P; ++rank) {
    const DeviceMoeReport report = nodes.report(rank);
    EXPECT_EQ(report.valid, 0) << rank;
    EXPECT_EQ(report.rows, 0) << rank;
    EXPECT_EQ(report.max_slot_demand, P * 64 * c.K) << rank;  // of any rank on any node
    EXPECT_EQ((nodes.status(rank).flags & kStatusSlotOverflow) != 0, rank == 0) << rank;
  }
  EXPECT_THAT(invalid.out, ::testing::Each(0.0f));
  EXPECT_THAT(invalid.gradients.w1, ::testing::Each(0.0f));
  nodes.clear_status();
  nodes.upload(spread), nodes.step();
  expect_same_bits(before, nodes.result(), "after an invalid step");
}

// As the CPU engine: partial sums that cross no node are not rounded to the wire's type.
TEST(MoeNodes, TwoLevelsInOneDomainRoundNothing) {
  WB_NEEDS_GPU();
  const auto step = [](Hierarchy hierarchy, CombineWire wire) {
    MoeConfig c = node_layer(60);
    c.hierarchy = hierarchy, c.combine_wire = wire;
    GpuMoe gpu(c, 2, bf16_weights(c, 3), {});
    gpu.upload(bf16_batch(c, even(2, 60), 4)), gpu.step();
    return gpu.result();
  };
  const mt::Result two_level = step(Hierarchy::kTwoLevel, CombineWire::kBF16);
  expect_same_bits(step(Hierarchy::kFlat, CombineWire::kF32), two_level, "fp32 wire");
  EXPECT_NE(step(Hierarchy::kFlat, CombineWire::kBF16).out, two_level.out);
}

TEST(MoeNodesRefusals, WhatNeedsOneDomainIsNamed) {
  DeviceMoeOptions options;
  options.nodes = 2;
  const auto refusal = [&](const MoeConfig& c, int P) -> std::string {
    try {
      (void)DeviceMoeLayer::arena_bytes(c, P, options);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  using ::testing::HasSubstr;
  MoeConfig c = node_layer(64);
  EXPECT_THAT(refusal(c, 4), HasSubstr("hierarchy = flat needs all ranks in one NVLink domain; the group has 2 nodes of 2"));
  c.hierarchy = Hierarchy::kTwoLevel;
  EXPECT_EQ(refusal(c, 4), "");
  EXPECT_THAT(refusal(c, 1), HasSubstr("1 ranks cannot make 2 nodes"));
  c.K = 17;
  EXPECT_THAT(refusal(c, 4), HasSubstr("E / nodes = 16 experts a token, got K = 17"));
  c.K = 4, c.expert_tensor_parallel = 2;
  EXPECT_THAT(refusal(c, 4), HasSubstr("slices of F (expert_tensor_parallel) between nodes"));
  c.expert_tensor_parallel = 1, c.force_dense_map = true;
  EXPECT_THAT(refusal(c, 4), HasSubstr("the dense-map path between nodes"));
  c.force_dense_map = false, options.nodes = 1;
  EXPECT_EQ(refusal(c, 4), "");  // one node: two levels are one
}

}  // namespace
}  // namespace waybill::cuda
