// SPDX-License-Identifier: Apache-2.0
// A router call on the host with everything it needs in memory, for tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "waybill/random.h"
#include "waybill/router.h"

namespace waybill::test {

// Pins one implementation for the life of the object.
class ForceRouter {
 public:
  explicit ForceRouter(const char* name) { setenv("WB_FORCE", (std::string("router:") + name).c_str(), 1); }
  ~ForceRouter() { unsetenv("WB_FORCE"); }
};

// Storage of one call. Logits are given in fp32 and stored in `dtype`, rows `stride` elements apart.
struct RouterCase {
  RouterConfig config;
  std::int64_t T = 0;
  DType dtype = DType::kF32;
  std::int64_t stride = 0;  // 0 = E
  std::vector<float> logits;
  std::vector<float> bias;
  std::vector<std::uint8_t> expert_mask, padding_mask;
  std::vector<std::int32_t> replay;
  std::int64_t token_offset = 0;

  RouterCase(std::int64_t E, std::int64_t K, ScoreFunction score, std::vector<float> x) : T(static_cast<std::int64_t>(x.size()) / E), logits(std::move(x)) {
    config.E = E;
    config.K = K;
    config.score = score;
  }
};

struct RouterResult {
  Route route;
  std::vector<std::int32_t> counts_unbiased, offsets, aligned_offsets;
  StatusWord status;

  std::vector<std::int32_t> ids(std::int64_t t) const {
    std::vector<std::int32_t> row;
    for (std::int64_t k = 0; k < route.K(); ++k) row.push_back(route.view().id(t, k));
    return row;
  }
  std::vector<float> weights(std::int64_t t) const {
    const float* row = route.view().weights + t * route.K();
    return {row, row + route.K()};
  }
  std::vector<std::int32_t> counts() const { return {route.view().counts, route.view().counts + route.E()}; }
};

// The inputs of a case, with the logits stored in its dtype.
struct StoredInputs {
  Tensor logits;
  RouterInputs inputs;

  explicit StoredInputs(const RouterCase& c) {
    const std::int64_t stride = c.stride > 0 ? c.stride : c.config.E;
    logits = Tensor(c.dtype, {c.T, stride});
    if (logits.size() > 0) std::memset(logits.view().data, 0xff, static_cast<std::size_t>(logits.size()) * size_bytes(c.dtype));  // NaN between the rows
    for (std::int64_t i = 0; i < c.T * c.config.E; ++i) {
      const std::int64_t at = i / c.config.E * stride + i % c.config.E;
      const float x = c.logits[static_cast<std::size_t>(i)];
      if (c.dtype == DType::kBF16)
        logits.as<bf16>()[at] = bf16(x);
      else if (c.dtype == DType::kF16)
        logits.as<f16>()[at] = f16(x);
      else
        logits.as<float>()[at] = x;
    }
    inputs.logits = logits.view();
    inputs.logits.shape[1] = c.config.E;
    if (!c.bias.empty()) inputs.expert_bias = TensorView::of(c.bias.data(), {c.config.E});
    if (!c.expert_mask.empty()) inputs.expert_mask = TensorView::of(c.expert_mask.data(), {c.config.E});
    if (!c.padding_mask.empty()) inputs.padding_mask = TensorView::of(c.padding_mask.data(), {c.T});
    if (!c.replay.empty()) inputs.replay_ids = TensorView::of(c.replay.data(), {c.T, c.config.K});
    inputs.token_offset = c.token_offset;
  }
};

// Runs the forward pass into poisoned outputs.
inline RouterResult forward(const RouterCase& c, Stream stream = {}) {
  const StoredInputs stored(c);
  RouterResult result;
  result.route = Route(c.T, c.config.K, c.config.E);
  const auto E = static_cast<std::size_t>(c.config.E);
  result.counts_unbiased.assign(E, -77);
  result.offsets.assign(E + 1, -77);
  result.aligned_offsets.assign(E + 1, -77);
  for (std::int64_t i = 0; i < c.T * c.config.K; ++i) {
    result.route.view().set_id(i / c.config.K, i % c.config.K, 77);
    result.route.view().weights[i] = -77.0f;
  }
  for (std::size_t e = 0; e < E; ++e) result.route.view().counts[e] = -77;
  router_forward(c.config, stored.inputs,
                 {result.route.view(), result.counts_unbiased.data(), result.offsets.data(), result.aligned_offsets.data(), &result.status}, stream);
  return result;
}

inline RouterLosses losses(const RouterCase& c, const RouterLossConfig& config, const RouteView& route, const RouterLossInputs& given = {},
                           Stream stream = {}) {
  const StoredInputs stored(c);
  return router_losses(c.config, config, stored.inputs, route, given, stream);
}

// d_logits [T * E].
inline std::vector<float> backward(const RouterCase& c, const RouterLossConfig& config, const RouteView& route, const std::vector<float>& d_weights,
                                   const RouterLossInputs& given = {}, float loss_scale = 1.0f, Stream stream = {}) {
  const StoredInputs stored(c);
  std::vector<float> d_logits(static_cast<std::size_t>(c.T * c.config.E), -77.0f);
  router_backward(c.config, config, stored.inputs, route, d_weights.empty() ? nullptr : d_weights.data(), given, loss_scale,
                  TensorView::of(d_logits.data(), {c.T, c.config.E}), stream);
  return d_logits;
}

inline std::vector<float> normal_logits(std::int64_t T, std::int64_t E, std::uint64_t seed, float sigma = 1.0f) {
  std::vector<float> x(static_cast<std::size_t>(T * E));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = sigma * random_normal(seed, i);
  return x;
}

}  // namespace waybill::test
