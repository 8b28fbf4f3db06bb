// SPDX-License-Identifier: Apache-2.0
// The rules of a layer's configuration. Nothing is changed or sent before they hold.
#include <algorithm>
#include <cmath>
#include <limits>

#include "waybill/moe.h"

namespace waybill {
namespace {

void check_sizes(const MoeConfig& c) {
  WB_CHECK(c.H >= 1, "H = {} must be at least 1", c.H);
  WB_CHECK(c.E >= 1, "E = {} must be at least 1", c.E);
  WB_CHECK(c.K >= 1 && c.K <= c.E, "K = {} must be in 1..E = {}", c.K, c.E);
  WB_CHECK(c.F >= 1, "F = {} must be at least 1", c.F);
  WB_CHECK(c.latent >= 0, "latent = {} must not be negative (0 = no latent width)", c.latent);
  WB_CHECK(c.shared_F >= 0, "shared_F = {} must not be negative (0 = no shared expert)", c.shared_F);
  WB_CHECK(c.T_max >= 0 && c.T_max <= std::numeric_limits<std::int32_t>::max(), "T_max = {} must be in 0..2^31-1", c.T_max);
  WB_CHECK(c.alignment >= 1, "alignment = {} must be at least 1", c.alignment);
}

// Sizes whose products are computed in 64 bits, all experts' first matrix being the largest tensor.
void check_products(const MoeConfig& c) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  WB_CHECK(c.H <= kMax && c.latent <= kMax && c.F <= kMax && c.shared_F <= kMax && c.E <= kMax,
           "H = {}, latent = {}, F = {}, shared_F = {} and E = {} must be below 2^31", c.H, c.latent, c.F, c.shared_F, c.E);
  const auto elements = static_cast<__int128>(c.E) * 2 * c.F * std::max(c.H, c.latent);
  WB_CHECK(elements <= std::numeric_limits<std::int64_t>::max() / 8, "E = {} experts of F = {} have more than 2^60 weights at a width of {}", c.E, c.F,
           std::max(c.H, c.latent));
}

void check_layout(const MoeConfig& c, int P) {
  WB_CHECK(P >= 1, "P = {} must be at least 1", P);
  const int t = c.expert_tensor_parallel;
  WB_CHECK(t >= 1 && P % t == 0, "expert_tensor_parallel = {} must divide P = {}", t, P);
  WB_CHECK(c.F % t == 0, "expert_tensor_parallel = {} must divide F = {}", t, c.F);
  WB_CHECK(c.E % (P / t) == 0, "E = {} is not divisible by the {} ranks that hold different experts (P = {}, expert_tensor_parallel = {})", c.E, P / t, P, t);
}

void check_coefficient(const char* name, float value) { WB_CHECK(std::isfinite(value) && value >= 0, "{} = {} must be finite and not negative", name, value); }

void check_losses(const MoeConfig& c) {
  check_coefficient("aux_coefficient", c.aux_coefficient);
  check_coefficient("sequence_coefficient", c.sequence_coefficient);
  check_coefficient("global_coefficient", c.global_coefficient);
  check_coefficient("z_coefficient", c.z_coefficient);
  check_coefficient("bias_update_rate", c.bias_update_rate);
  WB_CHECK(c.sequence_coefficient == 0 || c.sequence_length >= 1, "sequence_coefficient = {} needs sequence_length >= 1, got {}", c.sequence_coefficient,
           c.sequence_length);
}

void check_activation(const MoeConfig& c) {
  if (c.activation.kind != Activation::kClampedSwiGLU) return;
  WB_CHECK(c.activation.limit > 0 && std::isfinite(c.activation.alpha), "clamped SwiGLU needs limit > 0 and a finite alpha, got {} and {}", c.activation.limit,
           c.activation.alpha);
}

void check_exchange(const MoeConfig& c) {
  WB_CHECK(std::isfinite(c.receive_factor) && c.receive_factor >= 0, "receive_factor = {} must be finite and not negative", c.receive_factor);
  WB_CHECK(c.mode == ExchangeMode::kEager || c.T_max >= 1, "captured mode has fixed sizes: it needs T_max >= 1, got {}", c.T_max);
  WB_CHECK(c.receive_factor == 0 || c.T_max >= 1, "receive_factor = {} is a multiple of T_max: set T_max, got {}", c.receive_factor, c.T_max);
}

// Widths that a product contracts; the slots of an expert may be any number.
void check_recipe(const MoeConfig& c) {
  validate(c.recipe);
  check_recipe_fit(c.recipe, c.latent > 0 ? "latent" : "H", c.row_width());
  check_recipe_fit(c.recipe, c.expert_tensor_parallel > 1 ? "F / expert_tensor_parallel" : "F", c.local_F());
  if (c.shared_F == 0) return;
  check_recipe_fit(c.recipe, "H", c.H);
  check_recipe_fit(c.recipe, "shared_F", c.shared_F);
}

void check_capacity(const MoeConfig& c) {
  WB_CHECK(std::isfinite(c.capacity_factor) && c.capacity_factor >= 0, "capacity_factor = {} must be finite and not negative (0 = dropless)",
           c.capacity_factor);
  WB_CHECK(!c.pad_to_capacity || c.capacity_factor > 0, "pad_to_capacity needs capacity_factor > 0, got {}", c.capacity_factor);
}

}  // namespace

void validate(const MoeConfig& config, int P) {
  check_sizes(config);
  check_products(config);
  check_layout(config, P);
  check_losses(config);
  check_activation(config);
  check_exchange(config);
  check_capacity(config);
  check_recipe(config);
  RouterConfig router = config.router;
  router.E = config.E;
  router.K = config.K;
  validate(router);
}

}  // namespace waybill
