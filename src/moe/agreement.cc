// SPDX-License-Identifier: Apache-2.0
#include "moe/agreement.h"

#include <bit>
#include <vector>

namespace waybill::moe {
namespace {

struct Setting {
  const char* name;
  double value;  // sizes are below 2^53
};

template <class T>
Setting setting(const char* name, T value) {
  return {name, static_cast<double>(value)};
}

std::vector<Setting> settings_of(const MoeConfig& c) {
  const bool is_captured = c.mode == ExchangeMode::kCaptured;
  return {setting("H", c.H),
          setting("E", c.E),
          setting("K", c.K),
          setting("F", c.F),
          setting("latent", c.latent),
          setting("shared_F", c.shared_F),
          setting("router.score", c.router.score),
          setting("router.renormalise", c.router.renormalise),
          setting("router.scaling_factor", c.router.scaling_factor),
          setting("router.num_groups", c.router.num_groups),
          setting("router.num_kept_groups", c.router.num_kept_groups),
          setting("router.group_score", c.router.group_score),
          setting("router.normalise_epsilon", c.router.normalise_epsilon),
          setting("router.forced_balance", c.router.forced_balance),
          setting("activation.kind", c.activation.kind),
          setting("activation.limit", c.activation.limit),
          setting("activation.alpha", c.activation.alpha),
          setting("recipe.kind", c.recipe.kind),
          setting("recipe.scale_rule", c.recipe.scale_rule),
          setting("recipe.power_of_two_scales", c.recipe.power_of_two_scales),
          setting("recipe.stochastic_rounding", c.recipe.stochastic_rounding),
          setting("recipe.hadamard", c.recipe.hadamard),
          setting("expert_bias", c.expert_bias),
          setting("bias_update_rate", c.bias_update_rate),
          setting("bias_subtract_mean", c.bias_subtract_mean),
          setting("aux_coefficient", c.aux_coefficient),
          setting("sequence_coefficient", c.sequence_coefficient),
          setting("global_coefficient", c.global_coefficient),
          setting("z_coefficient", c.z_coefficient),
          setting("aux_counts", c.aux_counts),
          setting("sequence_length", c.sequence_length),
          setting("mode (0 eager, 1 captured)", c.mode),
          setting("receive_factor", is_captured ? c.receive_factor : 0),
          setting("T_max", is_captured ? c.T_max : 0),
          setting("combine_wire (0 fp32, 1 bf16)", c.combine_wire),
          setting("hierarchy (0 flat, 1 two_level, 2 auto)", c.hierarchy),
          setting("alignment", c.alignment),
          setting("recompute", c.recompute),
          setting("debug_checks", c.debug_checks),
          setting("expert_tensor_parallel", c.expert_tensor_parallel),
          setting("allow_dense_map", c.allow_dense_map),
          setting("force_dense_map", c.force_dense_map),
          setting("capacity_factor", c.capacity_factor),
          setting("pad_to_capacity", c.pad_to_capacity)};
}

}  // namespace

void check_agreement(const MoeConfig& config, Fabric& ep) {
  const std::vector<Setting> settings = settings_of(config);
  std::vector<double> mine, all(settings.size() * static_cast<std::size_t>(ep.size()));
  mine.reserve(settings.size());
  for (const Setting& s : settings) mine.push_back(s.value);
  ep.all_gather(mine.data(), all.data(), mine.size() * sizeof(double), "layer config");
  for (std::size_t p = 1; p < static_cast<std::size_t>(ep.size()); ++p) {
    for (std::size_t i = 0; i < settings.size(); ++i) {
      const double first = all[i], other = all[p * settings.size() + i];
      WB_CHECK(std::bit_cast<std::uint64_t>(first) == std::bit_cast<std::uint64_t>(other),
               "the ranks of a layer must have one config: {} is {} on rank 0, but {} on rank {}", settings[i].name, first, other, p);
    }
  }
}

}  // namespace waybill::moe
