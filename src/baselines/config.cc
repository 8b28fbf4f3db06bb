// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "baselines/routed_stack.h"

namespace waybill {
namespace {

constexpr const char* kNames[kNumMoeStacks] = {"sparse", "loop", "padded", "capacity", "dense-map", "block-sparse"};

void check_routed_part_only(const MoeConfig& c) {
  WB_CHECK(c.latent == 0 && c.shared_F == 0 && !c.expert_bias,
           "a baseline is the routed part of a layer: latent = {}, shared_F = {}, expert_bias = {} must be off", c.latent, c.shared_F, c.expert_bias);
  WB_CHECK(c.aux_coefficient == 0 && c.sequence_coefficient == 0 && c.global_coefficient == 0 && c.z_coefficient == 0,
           "a baseline has no auxiliary losses: coefficients aux = {}, sequence = {}, global = {}, z = {} must be 0", c.aux_coefficient, c.sequence_coefficient,
           c.global_coefficient, c.z_coefficient);
  WB_CHECK(c.mode == ExchangeMode::kEager && c.recompute == Recompute::kNone && c.expert_tensor_parallel == 1,
           "a baseline runs in eager mode, without recompute and without expert tensor parallelism (ways = {})", c.expert_tensor_parallel);
  WB_CHECK(c.recipe.kind == Recipe::kF32, "a baseline multiplies fp32 operands: recipe = {}", to_string(c.recipe.kind));
  WB_CHECK(c.capacity_factor == 0 && !c.pad_to_capacity && !c.force_dense_map,
           "the design is chosen by MoeStackConfig::kind, not by the layer's capacity_factor = {}, pad_to_capacity = {}, force_dense_map = {}",
           c.capacity_factor, c.pad_to_capacity, c.force_dense_map);
  WB_CHECK(c.router.normalise_epsilon == 0 && c.router.forced_balance == ForcedBalance::kOff,
           "a baseline knows neither normalise_epsilon ({}) nor forced balance: replay routes instead", c.router.normalise_epsilon);
}

}  // namespace

const char* to_string(MoeStackKind kind) { return kNames[static_cast<int>(kind)]; }

MoeStackKind parse_moe_stack(std::string_view name) {
  std::string known;
  for (int i = 0; i < kNumMoeStacks; ++i) {
    if (name == kNames[i]) return static_cast<MoeStackKind>(i);
    known += (i > 0 ? ", " : "") + std::string(kNames[i]);
  }
  WB_FAIL(ErrorCode::kInvalidArgument, "no stack '{}', known are {}", name, known);
}

void validate(const MoeStackConfig& config, int P) {
  check_routed_part_only(config.moe);
  validate(config.moe, P);
  if (config.kind == MoeStackKind::kCapacity) {
    WB_CHECK(std::isfinite(config.capacity_factor) && config.capacity_factor > 0, "capacity_factor = {} must be finite and positive", config.capacity_factor);
  }
  if (config.kind == MoeStackKind::kBlockSparse) WB_CHECK(config.block >= 1 && config.block <= 4096, "block = {} must lie in [1, 4096]", config.block);
}

std::unique_ptr<MoeStack> make_moe_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  MoeStackConfig checked = config;
  checked.moe.router.E = config.moe.E;
  checked.moe.router.K = config.moe.K;
  validate(checked, ep.size());
  switch (checked.kind) {
    case MoeStackKind::kSparse:
      return baselines::make_sparse_stack(checked, ep, pool);
    case MoeStackKind::kLoop:
      return baselines::make_loop_stack(checked, ep, pool);
    case MoeStackKind::kPadded:
      return baselines::make_padded_stack(checked, ep, pool);
    case MoeStackKind::kCapacity:
      return baselines::make_capacity_stack(checked, ep, pool);
    case MoeStackKind::kDenseMap:
      return baselines::make_dense_map_stack(checked, ep, pool);
    case MoeStackKind::kBlockSparse:
      return baselines::make_block_sparse_stack(checked, ep, pool);
  }
  WB_FAIL(ErrorCode::kInvalidArgument, "unknown stack {}", static_cast<int>(config.kind));
}

}  // namespace waybill
