// SPDX-License-Identifier: Apache-2.0
// Small models, token batches and comparisons for the model tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "waybill/language_model.h"
#include "waybill/optimizer.h"
#include "waybill/random.h"

namespace waybill::testing {

inline LayerConfig dense_layer(std::int64_t F) {
  LayerConfig layer;
  layer.dense_F = F;
  return layer;
}

inline LayerConfig moe_layer(std::int64_t E, std::int64_t K, std::int64_t F, int P = 1) {
  LayerConfig layer;
  layer.is_moe = true;
  layer.moe.E = E;
  layer.moe.K = K;
  layer.moe.F = F;
  layer.P = P;
  return layer;
}

inline ModelConfig tiny_model(std::vector<LayerConfig> layers) {
  ModelConfig c;
  c.name = "tiny";
  c.vocab = 23;
  c.H = 16;
  c.num_heads = 4;
  c.num_kv_heads = 2;
  c.head_dim = 6;
  c.seq_len = 8;
  c.init_std = 0.3f;  // large enough that every gradient is far from zero
  c.layers = std::move(layers);
  return c;
}

// [B, seq_len + 1] tokens of sequences first_sequence, ... of one endless random corpus.
inline Tensor random_tokens(const ModelConfig& c, std::int64_t first_sequence, std::int64_t B, std::uint64_t key = 77) {
  Tensor tokens(DType::kI32, {B, c.seq_len + 1});
  const std::int64_t width = c.seq_len + 1;
  for (std::int64_t i = 0; i < B * width; ++i)
    tokens.as<std::int32_t>()[i] =
        static_cast<std::int32_t>(random_u64(key, static_cast<std::uint64_t>(first_sequence * width + i)) % static_cast<std::uint64_t>(c.vocab));
  return tokens;
}

// The whole model on every layout: parameter name -> all values, experts joined in global order.
using Snapshot = std::map<std::string, std::vector<float>>;

// Adds this rank's part. Replicated parameters of different ranks must agree to the bit, as must the replicas of an expert.
inline void collect(LanguageModel& model, bool gradients, Snapshot& into, std::mutex& mutex) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Parameter& p : model.parameters()) {
    if (gradients && !p.trainable) continue;
    const Tensor& t = gradients ? p.grad : p.value;
    const std::int64_t L = p.is_expert ? t.dim(0) : 1, size = t.size() / L, experts = p.is_expert ? p.num_experts : 1;
    std::vector<float>& whole = into[p.name];
    if (whole.empty()) whole.assign(static_cast<std::size_t>(experts * size), std::nanf(""));
    float* slice = whole.data() + p.expert_begin * size;
    if (std::isnan(slice[0])) {
      std::memcpy(slice, t.as<float>(), static_cast<std::size_t>(t.size()) * sizeof(float));
    } else {
      EXPECT_EQ(std::memcmp(slice, t.as<float>(), static_cast<std::size_t>(t.size()) * sizeof(float)), 0) << p.name << " differs between its holders";
    }
  }
}

// Largest difference of a parameter, relative to its largest value. Names must agree.
inline void expect_close(const Snapshot& a, const Snapshot& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, expected] : b) {
    ASSERT_TRUE(a.count(name)) << name;
    const std::vector<float>& got = a.at(name);
    ASSERT_EQ(got.size(), expected.size()) << name;
    double scale = 1e-7, worst = 0;
    for (const float v : expected) scale = std::max(scale, std::fabs(static_cast<double>(v)));
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double d = std::fabs(static_cast<double>(got[i]) - expected[i]);
      if (!(d <= worst)) worst = d;
    }
    EXPECT_LE(worst, tolerance * scale) << name;
  }
}

inline void expect_same_bits(const Snapshot& a, const Snapshot& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, expected] : b) {
    const std::vector<float>& got = a.at(name);
    ASSERT_EQ(got.size(), expected.size()) << name;
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << name;
  }
}

}  // namespace waybill::testing
