// SPDX-License-Identifier: Apache-2.0
// The router.
#include <cstddef>
#include <cstring>

#include "convert.h"
#include "waybill/router_weighted.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

static_assert(sizeof(wb_status_word) == sizeof(StatusWord) && offsetof(wb_status_word, timeout_expected) == offsetof(StatusWord, timeout_expected) &&
              offsetof(wb_status_word, slot_demand) == offsetof(StatusWord, slot_demand) &&
              offsetof(wb_status_word, num_bad_ids) == offsetof(StatusWord, num_bad_ids) &&
              offsetof(wb_status_word, num_short_rows) == offsetof(StatusWord, num_short_rows));

struct LossSetup {
  RouterInputs inputs;
  RouterLossInputs loss_inputs;
};

LossSetup to_inputs(const wb_router_inputs* inputs) {
  const wb_router_inputs given = read_struct(inputs, "inputs");
  LossSetup setup;
  setup.inputs.logits = to_view(&given.logits, "inputs.logits", Memory::kAny);
  setup.inputs.expert_bias = to_view(given.expert_bias, "inputs.expert_bias", Memory::kAny);
  setup.inputs.expert_mask = to_view(given.expert_mask, "inputs.expert_mask", Memory::kAny);
  setup.inputs.padding_mask = to_view(given.padding_mask, "inputs.padding_mask", Memory::kAny);
  setup.inputs.replay_ids = to_view(given.replay_ids, "inputs.replay_ids", Memory::kAny);
  setup.inputs.token_offset = given.token_offset;
  if (given.weight_factors != nullptr) {  // only read
    setup.inputs.weight_factors = TensorView(const_cast<float*>(given.weight_factors), DType::kF32, {setup.inputs.logits.shape[0]}, setup.inputs.logits.device);
  }
  setup.loss_inputs.aux_counts = given.aux_counts;
  setup.loss_inputs.aux_tokens = given.aux_tokens;
  setup.loss_inputs.loss_tokens = given.loss_tokens;
  setup.loss_inputs.num_sequences = given.num_sequences;
  setup.loss_inputs.score_sums = given.score_sums;
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
    const LossSetup setup_inputs = to_inputs(inputs);
    const Device device = setup_inputs.inputs.logits.device;
    StatusWord status;
    RouterOutputs result;
    result.route = to_route(&given.route, "outputs.route", Memory::kAny);
    result.counts_unbiased = given.counts_unbiased;
    result.offsets = given.offsets;
    result.aligned_offsets = given.aligned_offsets;
    result.weight_factors = given.weight_factors;
    result.score_sums = given.score_sums;
    if (device.type == DeviceType::kCuda) {
      WB_CHECK(given.status == nullptr, "outputs.status is host memory, which a call on {} does not wait to fill: give outputs.status_word", to_string(device));
      result.status = reinterpret_cast<StatusWord*>(given.status_word);
    } else {
      result.status = &status;
      if (given.status != nullptr) (void)read_struct(given.status, "outputs.status");  // refuse before anything is written
    }
    router_forward(setup.config, setup_inputs.inputs, result, stream_on(stream, device, "inputs.logits"));
    if (device.type == DeviceType::kCuda) return;
    if (given.status != nullptr) add_status(status, given.status);
    if (given.status_word != nullptr) {
      StatusWord sum;
      std::memcpy(static_cast<void*>(&sum), given.status_word, sizeof(sum));
      sum.merge(status);
      std::memcpy(given.status_word, &sum, sizeof(sum));
    }
  });
}

wb_status wb_router_losses(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, double losses[3],
                           const wb_stream* stream) noexcept {
  return guarded([&] {
    required(losses, "losses");
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    const RouterLosses values = router_losses(setup.config, setup.losses, given.inputs, to_route(route, "route", Memory::kAny), given.loss_inputs,
                                              stream_on(stream, given.inputs.logits.device, "inputs.logits"));
    losses[0] = values.aux;
    losses[1] = values.sequence;
    losses[2] = values.z;
  });
}

wb_status wb_router_losses_into(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, double* losses,
                                const wb_stream* stream) noexcept {
  return guarded([&] {
    required(losses, "losses");
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    router_losses_into(setup.config, setup.losses, given.inputs, to_route(route, "route", Memory::kAny), given.loss_inputs, losses,
                       stream_on(stream, given.inputs.logits.device, "inputs.logits"));
  });
}

wb_status wb_router_backward(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights, float loss_scale,
                             const wb_tensor* d_logits, const wb_stream* stream) noexcept {
  return guarded([&] {
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    const RouteView view = to_route(route, "route", Memory::kAny);
    WB_CHECK(d_weights != nullptr || view.T == 0, "d_weights is null with T = {}", view.T);
    router_backward(setup.config, setup.losses, given.inputs, view, d_weights, given.loss_inputs, loss_scale, to_view(d_logits, "d_logits", Memory::kAny),
                    stream_on(stream, given.inputs.logits.device, "inputs.logits"));
  });
}

wb_status wb_router_losses_weighted(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* loss_weights,
                                    float* losses, const wb_stream* stream) noexcept {
  return guarded([&] {
    required(losses, "losses");
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    router_losses_weighted(setup.config, setup.losses, given.inputs, to_route(route, "route", Memory::kAny), given.loss_inputs, loss_weights, losses,
                           stream_on(stream, given.inputs.logits.device, "inputs.logits"));
  });
}

wb_status wb_router_backward_weighted(const wb_router_config* config, const wb_router_inputs* inputs, const wb_route* route, const float* d_weights,
                                      const float* loss_weights, const wb_tensor* d_logits, const wb_stream* stream) noexcept {
  return guarded([&] {
    const RouterSetup setup = to_router_setup(config, "config");
    const LossSetup given = to_inputs(inputs);
    const RouteView view = to_route(route, "route", Memory::kAny);
    WB_CHECK(d_weights != nullptr || view.T == 0, "d_weights is null with T = {}", view.T);
    router_backward_weighted(setup.config, setup.losses, given.inputs, view, d_weights, given.loss_inputs, loss_weights,
                             to_view(d_logits, "d_logits", Memory::kAny), stream_on(stream, given.inputs.logits.device, "inputs.logits"));
  });
}
