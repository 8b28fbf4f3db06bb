// SPDX-License-Identifier: Apache-2.0
// The MoE layer.
#include <span>

#include "handles.h"
#include "moe_convert.h"
#include "waybill/balance.h"
#include "waybill/moe.h"

using namespace waybill;
using namespace waybill::capi;

struct wb_moe_layer {
  MoeLayer layer;
  wb_moe_layer(const MoeConfig& config, Fabric& ep, Fabric& world, ThreadPool* pool) : layer(config, ep, world, pool) {}
};

struct wb_moe_step {
  MoeStep step;
};

namespace {

wb_moe_config default_moe_config() {
  const MoeConfig defaults;
  wb_moe_config config{};
  config.router = default_router_config();
  config.router.struct_size = sizeof(wb_router_config);
  config.alignment = defaults.alignment;
  config.receive_factor = defaults.receive_factor;
  config.activation = static_cast<std::int32_t>(defaults.activation.kind);
  config.activation_limit = defaults.activation.limit;
  config.activation_alpha = defaults.activation.alpha;
  config.mode = static_cast<std::int32_t>(defaults.mode);
  config.combine_wire = static_cast<std::int32_t>(defaults.combine_wire);
  config.recompute = static_cast<std::int32_t>(defaults.recompute);
  config.expert_tensor_parallel = defaults.expert_tensor_parallel;
  config.allow_dense_map = defaults.allow_dense_map ? 1 : 0;
  config.hierarchy = static_cast<std::int32_t>(defaults.hierarchy);
  config.overlap_shared = defaults.overlap_shared ? 1 : 0;
  config.recipe = static_cast<std::int32_t>(defaults.recipe.kind);
  config.scale_rule = static_cast<std::int32_t>(defaults.recipe.scale_rule);
  config.power_of_two_scales = defaults.recipe.power_of_two_scales ? 1 : 0;
  config.stochastic_rounding = defaults.recipe.stochastic_rounding ? 1 : 0;
  config.hadamard = defaults.recipe.hadamard ? 1 : 0;
  return config;
}

static_assert(static_cast<int>(Recipe::kNVFP4) == WB_RECIPE_NVFP4 && static_cast<int>(ScaleRule::kFloor) == WB_SCALE_FLOOR);

}  // namespace

wb_moe_forward_options capi::default_forward_options() {
  wb_moe_forward_options options{};
  options.training = 1;
  return options;
}

MoeConfig capi::to_moe_config(const wb_moe_config* config) {
  const wb_moe_config given = read_struct(config, "config", default_moe_config());
  const RouterSetup router = to_router_setup(&given.router, "config.router");
  MoeConfig result;
  result.H = given.H;
  result.E = router.config.E;
  result.K = router.config.K;
  result.F = given.F;
  result.latent = given.latent;
  result.shared_F = given.shared_F;
  result.router = router.config;
  result.activation = {checked_enum(given.activation, Activation::kReluSquared, "activation"), given.activation_limit, given.activation_alpha};
  result.expert_bias = given.expert_bias != 0;
  result.bias_update_rate = given.bias_update_rate;
  result.aux_coefficient = router.losses.aux_coefficient;
  result.sequence_coefficient = router.losses.sequence_coefficient;
  result.global_coefficient = given.global_coefficient;
  result.z_coefficient = router.losses.z_coefficient;
  result.sequence_length = router.losses.sequence_length;
  result.mode = checked_enum(given.mode, ExchangeMode::kCaptured, "mode");
  result.receive_factor = given.receive_factor;
  result.T_max = given.T_max;
  result.combine_wire = checked_enum(given.combine_wire, CombineWire::kBF16, "combine_wire");
  result.alignment = given.alignment;
  result.recompute = checked_enum(given.recompute, Recompute::kLayer, "recompute");
  result.debug_checks = given.debug_checks != 0;
  result.capacity_factor = given.capacity_factor;
  result.pad_to_capacity = given.pad_to_capacity != 0;
  result.expert_tensor_parallel = given.expert_tensor_parallel;
  result.aux_counts = given.aux_counts_unbiased != 0 ? AuxCounts::kUnbiased : AuxCounts::kDispatch;
  result.allow_dense_map = given.allow_dense_map != 0;
  result.force_dense_map = given.force_dense_map != 0;
  result.hierarchy = checked_enum(given.hierarchy, Hierarchy::kAuto, "hierarchy");
  result.overlap_shared = given.overlap_shared != 0;
  result.recipe.kind = checked_enum(given.recipe, Recipe::kNVFP4, "recipe");
  result.recipe.scale_rule = checked_enum(given.scale_rule, ScaleRule::kFloor, "scale_rule");
  result.recipe.power_of_two_scales = given.power_of_two_scales != 0;
  result.recipe.stochastic_rounding = given.stochastic_rounding != 0;
  result.recipe.hadamard = given.hadamard != 0;
  return result;
}

MoeTensors capi::to_moe_tensors(const wb_moe_tensors* tensors, const char* name, Memory memory) {
  const wb_moe_tensors given = read_struct(tensors, name);
  MoeTensors result;
  result.gate = to_view(given.gate, "gate", memory);
  result.router_bias = to_view(given.router_bias, "router_bias", memory);
  result.w1 = to_view(given.w1, "w1", memory);
  result.w2 = to_view(given.w2, "w2", memory);
  result.b1 = to_view(given.b1, "b1", memory);
  result.b2 = to_view(given.b2, "b2", memory);
  result.shared_w1 = to_view(given.shared_w1, "shared_w1", memory);
  result.shared_w2 = to_view(given.shared_w2, "shared_w2", memory);
  result.latent_down = to_view(given.latent_down, "latent_down", memory);
  result.latent_up = to_view(given.latent_up, "latent_up", memory);
  return result;
}

wb_status wb_moe_config_init(wb_moe_config* config, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(config, struct_size, default_moe_config(), "config"); });
}

wb_status wb_moe_layer_create(const wb_moe_config* config, wb_fabric* ep, wb_fabric* world, wb_thread_pool* pool, wb_moe_layer** layer) noexcept {
  return guarded([&] {
    wb_moe_layer*& target = required(layer, "layer");
    target = new wb_moe_layer(to_moe_config(config), *required(ep, "ep").fabric, *required(world, "world").fabric, pool == nullptr ? nullptr : &pool->pool);
  });
}

void wb_moe_layer_destroy(wb_moe_layer* layer) noexcept { delete layer; }

wb_status wb_moe_step_create(wb_moe_step** step) noexcept {
  return guarded([&] { required(step, "step") = new wb_moe_step{}; });
}

void wb_moe_step_destroy(wb_moe_step* step) noexcept { delete step; }

wb_status wb_moe_forward_options_init(wb_moe_forward_options* options, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(options, struct_size, default_forward_options(), "options"); });
}

wb_status wb_moe_forward(wb_moe_layer* layer, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options, const wb_tensor* out,
                         wb_moe_step* step) noexcept {
  return guarded([&] {
    const wb_moe_forward_options given = options == nullptr ? default_forward_options() : read_struct(options, "options", default_forward_options());
    WB_CHECK(given.rounding_seed_device == nullptr, "options.rounding_seed_device is for layers on GPUs; set rounding_seed");
    MoeForwardOptions forward;
    forward.padding_mask = to_view(given.padding_mask, "options.padding_mask");
    forward.training = given.training != 0;
    forward.token_offset = given.token_offset;
    forward.loss_tokens = given.loss_tokens;
    forward.loss_sequences = given.loss_sequences;
    forward.rounding_seed = given.rounding_seed;
    Route replay;
    if (given.replay != nullptr) {
      replay = Route::copy_of(to_route(given.replay, "options.replay"));
      forward.replay = &replay;
    }
    required(layer, "layer")
        .layer.forward(to_moe_tensors(parameters, "parameters"), to_view(x, "x"), to_view(out, "out"), required(step, "step").step, forward);
  });
}

wb_status wb_update_expert_bias(float* bias, const int64_t* counts, int64_t E, float rate, int32_t subtract_mean) noexcept {
  return guarded([&] {
    WB_CHECK(E >= 1, "E is {}, it must be positive", E);
    const auto size = static_cast<std::size_t>(E);
    update_expert_bias(std::span<float>(&required(bias, "bias"), size), std::span<const std::int64_t>(&required(counts, "counts"), size), rate,
                       subtract_mean != 0);
  });
}

wb_status wb_moe_backward(wb_moe_layer* layer, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x, const wb_tensor* d_out,
                          const wb_tensor* dx, wb_moe_step* step, float loss_scale) noexcept {
  return guarded([&] {
    required(layer, "layer")
        .layer.backward(to_moe_tensors(parameters, "parameters"), to_moe_tensors(gradients, "gradients"), to_view(x, "x"), to_view(d_out, "d_out"),
                        to_view(dx, "dx"), required(step, "step").step, loss_scale);
  });
}

wb_status wb_moe_step_get_info(const wb_moe_step* step, wb_moe_step_info* info) noexcept {
  return guarded([&] {
    const MoeStep& source = required(step, "step").step;
    wb_moe_step_info result{};
    result.expert_counts = source.counts.data();
    result.E = static_cast<std::int64_t>(source.counts.size());
    result.route = from_route(source.route.view());
    result.slots = source.slots;
    result.rows = source.rows;
    result.saved_bytes = static_cast<std::int64_t>(source.saved_bytes);
    result.aux = source.losses.aux;
    result.sequence = source.losses.sequence;
    result.global = source.global_loss;
    result.z = source.losses.z;
    result.valid = source.valid ? 1 : 0;
    result.status = from_status(source.status);
    write_struct(info, result, "info");
  });
}
