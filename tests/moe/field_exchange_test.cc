// SPDX-License-Identifier: Apache-2.0
// Field cases about ranks, experts and repeatability, seen through the whole layer (ranks are threads).
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "moe/harness.h"

namespace waybill::test {
namespace {

// FNV-1a over the bits of a run: loss, output, input gradient and every weight gradient.
std::uint64_t fingerprint(const Result& r) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const auto add = [&hash](const void* data, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ull;
  };
  add(r.out.data(), r.out.size() * 4), add(r.dx.data(), r.dx.size() * 4), add(&r.losses.aux, 8);
  Weights<float> gradients = r.gradients;
  gradients.for_each([&](const char*, std::vector<float>& v) { add(v.data(), v.size() * 4); });
  return hash;
}

TEST(MoeFieldCases, F16_FortyForwardAndBackwardRunsHaveOneBitPattern) {
  for (const int P : {1, 2}) {
    for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
      MoeConfig c = small_config(16, 8, 512, 4);
      c.combine_wire = wire;
      c.aux_coefficient = 0.01f;
      c.debug_checks = false;
      const Weights<float> w = random_weights(c, 160);
      Batch batch = random_batch(c, P == 1 ? std::vector<std::int64_t>{512} : std::vector<std::int64_t>{300, 212}, 161);
      for (float& value : batch.x) value = bf16(value);
      for (float& value : batch.d_out) value = bf16(value);
      std::set<std::uint64_t> patterns;
      run_ranks(P, [&](Fabric& fabric) {
        ThreadPool pool(2);
        MoeLayer layer(c, fabric, fabric, &pool);
        for (int run = 0; run < 40; ++run) {
          RankRun rank(c, P, fabric.rank(), w, batch);
          rank.run(layer, c, batch, {});
          Result part = empty_result(c, P, w, batch);
          rank.collect(c, P, fabric.rank(), layer, part);
          const auto mine = static_cast<std::int64_t>(fingerprint(part));
          std::vector<std::int64_t> all(static_cast<std::size_t>(P));
          fabric.all_gather(&mine, all.data(), sizeof(mine), "fingerprints");
          std::uint64_t hash = 0;
          for (const std::int64_t value : all) hash = hash * 31 + static_cast<std::uint64_t>(value);
          if (fabric.rank() == 0) patterns.insert(hash);
        }
      });
      EXPECT_EQ(patterns.size(), 1u) << "P " << P << " wire " << static_cast<int>(wire);
    }
  }
}

TEST(MoeFieldCases, F17_ARankWithoutTokensStillTakesPart) {
  for (const int P : {4, 2}) {
    MoeConfig c = small_config(24, 6, 6, 2);
    const Weights<float> w = random_weights(c, 170);
    for (int step = 0; step < 10; ++step) {
      SCOPED_TRACE(fmt::format("P {} step {}", P, step));
      std::vector<std::int64_t> tokens(static_cast<std::size_t>(P), 4);
      tokens[static_cast<std::size_t>(step % P)] = 0;
      Batch batch = random_batch(c, tokens, 171 + static_cast<std::uint64_t>(step));
      for (std::int64_t t = 0; t < batch.T(); ++t) {
        for (std::int32_t e = 0; e < 6; ++e) batch.replay.push_back(e);
      }
      const Result r = run_layer(c, w, batch);
      EXPECT_EQ(r.slots[0], P == 4 ? 72 : 24);
      EXPECT_EQ(r.rows[0], P == 4 ? 12 : 4);
      for (std::size_t e = 0; e < 24; ++e) EXPECT_EQ(r.counts[e], e < 6 ? (P - 1) * 4 : 0);
      Batch one = batch;
      one.tokens = {batch.T()};
      const Result expected = run_layer(c, w, one);
      EXPECT_LE(relative_error(r.out, expected.out), 1e-6);
      EXPECT_LE(relative_error(r.dx, expected.dx), 1e-6);
    }
    const Result nothing = run_layer(c, w, random_batch(c, std::vector<std::int64_t>(static_cast<std::size_t>(P), 0), 199));
    EXPECT_EQ(nothing.slots, std::vector<std::int64_t>(static_cast<std::size_t>(P), 0));
  }
}

// Experts that return their input for stamps 0 and 1 (relu(x)^2), every weight 1 (K equal scores times scale K).
MoeConfig stamp_config(CombineWire wire) {
  MoeConfig c = small_config(32, 8, 8, 8);
  c.activation.kind = Activation::kReluSquared;
  c.router.scaling_factor = 8.0f;
  c.combine_wire = wire;
  c.debug_checks = false;
  return c;
}

Weights<float> stamp_weights(const MoeConfig& c) {
  Weights<float> w = random_weights(c, 180);
  std::fill(w.gate.begin(), w.gate.end(), 0.0f);
  for (std::size_t i = 0; i < w.w1.size(); ++i) w.w1[i] = w.w2[i] = i % 64 % 9 == 0 ? 1.0f : 0.0f;
  return w;
}

Batch stamp_batch(const MoeConfig& c, std::vector<std::int64_t> tokens, std::int64_t dropped) {
  Batch batch = random_batch(c, std::move(tokens), 181);
  for (std::size_t i = 0; i < batch.x.size(); ++i) batch.x[i] = random_u64(182, i) % 2 == 0 ? 0.0f : 1.0f;
  for (std::int64_t t = 0; t < batch.T(); ++t) {
    const std::uint64_t first = random_u64(183, static_cast<std::uint64_t>(t));
    for (std::int64_t k = 0; k < c.K; ++k) {
      batch.replay.push_back(k < dropped ? -1 : static_cast<std::int32_t>((first + 5 * static_cast<std::uint64_t>(k)) % 32));  // distinct: 5 and 32 are coprime
    }
  }
  return batch;
}

TEST(MoeFieldCases, F18_RanksWithDifferentTokenCountsGetTheirOwnRowsBack) {
  for (const CombineWire wire : {CombineWire::kF32, CombineWire::kBF16}) {
    for (const std::vector<std::int64_t>& tokens : std::vector<std::vector<std::int64_t>>{{1000, 16, 512, 2048}, {1000, 0, 512, 2048}, {5, 5, 0, 6}}) {
      SCOPED_TRACE(fmt::format("wire {} tokens {}", static_cast<int>(wire), fmt::join(tokens, ",")));
      MoeConfig c = stamp_config(wire);
      c.alignment = 32;
      RunOptions options;
      options.backward = false;
      const Batch batch = stamp_batch(c, tokens, 0);
      const Result r = run_layer(c, stamp_weights(c), batch, options);
      EXPECT_EQ(std::accumulate(r.slots.begin(), r.slots.end(), std::int64_t{0}), batch.T() * 8);
      if (tokens[1] == 16) {
        EXPECT_EQ(batch.T(), 3576);
      }
      if (tokens[1] == 16) {
        EXPECT_EQ(std::accumulate(r.counts.begin(), r.counts.end(), std::int64_t{0}), 28608);
      }
      for (const float weight : r.weights) ASSERT_EQ(weight, 1.0f);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < r.out.size(); ++i) wrong += r.out[i] != 8.0f * batch.x[i];
      EXPECT_EQ(wrong, 0u);
    }
  }
}

TEST(MoeFieldCases, F18_MaskedSlotsAndGrowingRanksStayExact) {
  MoeConfig c = stamp_config(CombineWire::kBF16);
  c.router.scaling_factor = 5.0f;  // 5 equal weights are left
  const Batch masked = stamp_batch(c, {9, 0, 33, 7}, 3);
  const Result m = run_layer(c, stamp_weights(c), masked);
  for (std::size_t i = 0; i < m.out.size(); ++i) ASSERT_EQ(m.out[i], 5.0f * masked.x[i]);

  const MoeConfig g = small_config(8, 2);
  const Weights<float> w = random_weights(g, 184);
  const Batch largest = random_batch(g, {64, 5, 6, 7}, 185);
  const Result expected = run_layer(g, w, largest);
  run_ranks(4, [&](Fabric& fabric) {  // one layer, rank 0 grows step by step: the other ranks' results do not move
    MoeLayer layer(g, fabric, fabric);
    for (const std::int64_t T : {1, 2, 31, 64}) {
      Batch batch = largest;
      batch.tokens[0] = T;
      batch.x.erase(batch.x.begin() + T * g.H, batch.x.begin() + 64 * g.H);
      batch.d_out.erase(batch.d_out.begin() + T * g.H, batch.d_out.begin() + 64 * g.H);
      RankRun rank(g, 4, fabric.rank(), w, batch);
      rank.run(layer, g, batch, {});
      const std::int64_t start = rank.first + (fabric.rank() == 0 ? 0 : 64 - T);
      EXPECT_TRUE(starts_with_bits(expected.out.data() + start * g.H, rank.out)) << "rank " << fabric.rank() << " T " << T;
    }
  });
}

TEST(MoeFieldCases, F20_ExpertsWithoutTokensGetExactlyZeroGradient) {
  for (const std::int64_t alignment : {1, 32}) {
    for (const float before : {0.0f, 5.0f}) {
      SCOPED_TRACE(fmt::format("alignment {} before {}", alignment, before));
      MoeConfig c = small_config(18, 1, 6, 4);
      c.expert_bias = true;
      c.alignment = alignment;
      const Weights<float> w = random_weights(c, 200);
      Batch batch = random_batch(c, {8, 8}, 201);
      for (std::int32_t t = 0; t < 16; ++t) batch.replay.push_back(t < 8 ? 0 : 13);  // 16 of 18 experts are empty
      std::mutex mutex;
      run_ranks(2, [&](Fabric& fabric) {
        MoeLayer layer(c, fabric, fabric);
        RankRun rank(c, 2, fabric.rank(), w, batch);
        std::vector<float> poison(batch.x.size(), std::numeric_limits<float>::quiet_NaN());
        Batch bad = batch;
        bad.x = bad.d_out = poison;  // fills every scratch buffer with NaN
        RankRun(c, 2, fabric.rank(), w, bad).run(layer, c, bad, {});
        rank.gradients.w.for_each([before](const char*, std::vector<float>& v) { std::fill(v.begin(), v.end(), before); });
        rank.run(layer, c, batch, {});
        const std::lock_guard lock(mutex);
        const std::int64_t busy = fabric.rank() == 0 ? 0 : 13 - 9;
        rank.gradients.w.for_each([&](const char* name, std::vector<float>& v) {
          if (std::string(name) == "gate" || v.empty()) return;
          const std::size_t per_expert = v.size() / 9;
          for (std::size_t i = 0; i < v.size(); ++i) {
            ASSERT_TRUE(std::isfinite(v[i])) << name;
            if (static_cast<std::int64_t>(i / per_expert) != busy) {
              ASSERT_EQ(v[i], before) << name << " element " << i;
            }
          }
          EXPECT_NE(v[static_cast<std::size_t>(busy) * per_expert], before) << name;
        });
      });
    }
  }
}

TEST(MoeFieldCases, F22_ExpertBiasIsWeightedAndSkipsPaddingRows) {
  for (const bool poison : {false, true}) {
    MoeConfig c = small_config(2, 2, 3, 2);
    c.expert_bias = true;
    c.alignment = 32;  // 10 real rows and 22 padding rows an expert
    Weights<float> w = random_weights(c, 220);
    std::fill(w.w1.begin(), w.w1.end(), 0.0f), std::fill(w.w2.begin(), w.w2.end(), 0.0f), std::fill(w.b1.begin(), w.b1.end(), 0.0f);
    w.gate = {std::log(0.7f), 0, 0, std::log(0.3f), 0, 0};
    const std::vector<float> b{0.5f, -2.0f, 3.0f};
    w.b2 = {b[0], b[1], b[2], b[0], b[1], b[2]};
    Batch batch = random_batch(c, {10}, 221);
    for (std::size_t i = 0; i < batch.x.size(); ++i) batch.x[i] = i % 3 == 0 ? 1.0f : 0.0f, batch.d_out[i] = 1.0f;
    run_ranks(1, [&](Fabric& fabric) {
      MoeLayer layer(c, fabric, fabric);
      if (poison) {  // padding rows then lie in memory that held NaN and Inf
        Batch bad = batch;
        for (std::size_t i = 0; i < bad.x.size(); ++i) {
          bad.x[i] = i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
          bad.d_out[i] = bad.x[i];
        }
        bad.replay.assign(20, 0);
        for (std::size_t i = 1; i < 20; i += 2) bad.replay[i] = 1;
        RankRun(c, 1, 0, w, bad).run(layer, c, bad, {});
      }
      RankRun rank(c, 1, 0, w, batch);
      rank.run(layer, c, batch, {});
      for (std::size_t i = 0; i < rank.out.size(); ++i) EXPECT_NEAR(rank.out[i] / b[i % 3], 1.0, 1e-6);
      for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(rank.gradients.w.b2[i], i < 3 ? 7.0 : 3.0, 1e-5);
      for (const std::vector<float>* zero : {&rank.gradients.w.w1, &rank.gradients.w.b1, &rank.gradients.w.w2}) {
        for (const float value : *zero) EXPECT_EQ(value, 0.0f);
      }
    });
  }
}

}  // namespace
}  // namespace waybill::test
