// SPDX-License-Identifier: Apache-2.0
// The router.
#include "convert.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

struct LossSetup {
  RouterInputs inputs;
  RouterLossInputs loss_inputs;
};

LossSetup to_inputs(const wb_router_inputs* inputs) {
  const wb_router_inputs given = read_struct(inputs, "inputs");
  LossSetup setup;
  setup.inputs.logits = to_view(&given.logits, "inputs.logits");
  setup.inputs.expert_bias = to_view(given.expert_bias, "inputs.expert_bias");
  setup.inputs.expert_mask = to_view(given.expert_mask, "inputs.expert_mask");
  setup.inputs.padding_mask = to_view(given.padding_mask, "inputs.padding_mask");
  setup.inputs.replay_ids = to_view(given.replay_ids, "inputs.replay_ids");
  setup.inputs.token_offset = given.token_offset;
  setup.loss_inputs.aux_counts = given.aux_counts;
  setup.loss_inputs.aux_tokens = given.aux_tokens;
  setup.loss_inputs.loss_tokens = given.loss_tokens;
  setup.loss_inputs.num_sequences = given.num_sequences;
  return setup;
}

}  // namespace

wb_status wb_router_config_init(wb_router_config* config, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(config, struct_size, default_router_config(), "config"); });
}

wb_status wb_router_forward(const wb_router_config* config, const wb_router_inputs* inputs, const wb_router_outputs* outputs,
                            const wb_stream* stream) noexcept {
  return guarded([&] {
    const RouterSetup setup = to_router_setup(config, "config");
    const wb_router_outputs given = read_struct(outputs, "outputs");
    StatusWord status;
    RouterOutputs result;
    result.route = to_route(&given.route, "outputs.route");
    result.counts_unbiased = given.counts_unbiased;
    result.offsets = given.offsets;
    result.aligned_offsets = given.aligned_offsets;
    result.status = &status;
    if (given.status != nullptr) (void)read_struct(given.status, "outputs.status");  // refuse before anything is written
    router_forward(setup.config, to_inputs(inputs).inputs, result, to_stream(stream));
    if (given.status != nullptr) add_status(status, given.status);
  });
}

wb_status wb_router_losses(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, double losses[3],
                           const wb_stream* stream) noexcept {
  return guarded([&] {
    required(losses, "losses");
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    const RouterLosses values = router_losses(setup.config, setup.losses, given.inputs, to_route(route, "route"), given.loss_inputs, to_stream(stream));
    losses[0] = values.aux;
    losses[1] = values.sequence;
    losses[2] = values.z;
  });
}

wb_status wb_router_backward(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights, float loss_scale,
                             const wb_tensor* d_logits, const wb_stream* stream) noexcept {
  return guarded([&] {
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    const RouteView view = to_route(route, "route");
    WB_CHECK(d_weights != nullptr || view.T == 0, "d_weights is null with T = {}", view.T);
    router_backward(setup.config, setup.losses, given.inputs, view, d_weights, given.loss_inputs, loss_scale, to_view(d_logits, "d_logits"), to_stream(stream));
  });
}
