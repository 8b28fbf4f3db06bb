// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "moe/etp.h"
#include "moe/layer_impl.h"
#include "moe/tensors.h"

namespace waybill {

void MoeLayer::Impl::check_backward(const Backward& b) const {
  moe::check_tensors(config, L, b.parameters, "parameter");
  moe::check_tensors(config, L, b.gradients, "gradient");
  moe::check_activations(b.x, b.saved.T, config.H, "x");
  moe::check_activations(b.d_out, b.saved.T, config.H, "d_out");
  moe::check_activations(b.dx, b.saved.T, config.H, "dx");
  WB_CHECK(std::isfinite(b.loss_scale), "loss_scale = {} must be finite", b.loss_scale);
}

void MoeLayer::Impl::backward(const Backward& b) {
  b.saved.ready = false;
  if (!b.step.valid) {
    std::fill_n(b.dx.as<float>(), b.dx.size(), 0.0f);
    return;
  }
  recompute(b);
  backward_experts(b);
  if (config.shared_F > 0) add_shared_input_gradient(b);
  if ((b.step.dense_map_reasons & kDenseMapCallerMap) == 0) backward_router(b);
  count_bytes(path(b.step));
  expert_flops += 2 * moe::expert_forward_flops(config, b.step.slots);
}

// What the forward did not keep, from x and the saved plan. The same calls on the same inputs give the same bits.
void MoeLayer::Impl::recompute(const Backward& b) {
  if (config.recompute == Recompute::kNone) return;
  const moe::ExpertContext context = experts(b.parameters, b.saved, b.times);
  if (config.recompute == Recompute::kLayer) {
    {
      const PhaseScope scope(b.times, Phase::kGate);
      unsaved.logits.resize(DType::kF32, {b.saved.T, config.E});
      moe::project(b.x, b.parameters.gate, unsaved.logits, /*accumulate=*/false, stream);
    }
    path(b.step).dispatch(b.saved.handle, expert_rows(b.parameters, b.x, b.times), unsaved.rows, b.times);
    moe::experts_first_matmul(context, unsaved.rows, expert_scratch, unsaved.h);
  }
  moe::experts_activation(context, keep(b.saved, &MoeStep::Saved::h, Recompute::kActivation), unsaved.a);
  if (config.shared_F == 0) return;
  const PhaseScope scope(b.times, Phase::kShared);
  const moe::SharedExpert expert = shared(b.parameters, b.saved);
  if (config.recompute == Recompute::kLayer) expert.hidden(b.x, unsaved.shared_h);
  expert.activate(keep(b.saved, &MoeStep::Saved::shared_h, Recompute::kActivation), unsaved.shared_a);
}

// d_out -> dx (written), d_weights [T, K], expert and latent gradients.
void MoeLayer::Impl::backward_experts(const Backward& b) {
  const bool latent = config.latent > 0;
  TensorView d_combined = b.d_out;
  if (latent) {
    const PhaseScope scope(b.times, Phase::kShared);
    d_latent_out.resize(DType::kF32, {b.saved.T, config.latent});
    moe::project_backward_weight(b.d_out, b.saved.latent_out, b.gradients.latent_up, stream);
    moe::project_backward_input(b.d_out, b.parameters.latent_up, d_latent_out, /*accumulate=*/false, stream);
    d_combined = d_latent_out;
  }
  moe::RowPath& rows_path = path(b.step);
  PendingRows pending = rows_path.dispatch_start(b.saved.handle, d_combined, dz, b.times);
  if (config.overlap_shared) backward_shared_weights(b);
  pending.finish(b.times);
  d_slot_weight.resize(DType::kF32, {b.saved.handle.layout().S_padded()});
  moe::experts_backward(experts(b.parameters, b.saved, b.times), b.gradients, keep(b.saved, &MoeStep::Saved::rows, Recompute::kActivation),
                        keep(b.saved, &MoeStep::Saved::h, Recompute::kActivation), keep(b.saved, &MoeStep::Saved::a, Recompute::kNone), dz, expert_scratch,
                        d_slot_weight.as<float>(), d_rows);
  TensorView d_sent = b.dx;
  if (latent) {
    d_latent_in.resize(DType::kF32, {b.saved.T, config.latent});
    d_sent = d_latent_in;
  }
  rows_path.combine(b.saved.handle, d_rows, d_sent, b.times);

  return_weights(b);
  if (!latent) return;
  const PhaseScope scope(b.times, Phase::kShared);
  moe::project_backward_weight(d_latent_in, b.x, b.gradients.latent_down, stream);
  moe::project_backward_input(d_latent_in, b.parameters.latent_down, b.dx, /*accumulate=*/false, stream);
}

// d_slot_weight goes home: to the routes it belongs to, or to the caller's map.
void MoeLayer::Impl::return_weights(const Backward& b) {
  if ((b.step.dense_map_reasons & kDenseMapCallerMap) != 0) {
    b.step.d_dense_map.resize(DType::kF32, {b.saved.T, config.E});
    dense->return_map_values(b.saved.handle, d_slot_weight.as<float>(), b.step.d_dense_map, b.times);
    return;
  }
  const int t = config.expert_tensor_parallel;
  d_route_weights.resize(DType::kF32, {b.saved.T, config.K * t});
  path(b.step).return_slot_values(b.saved.handle, d_slot_weight.as<float>(), d_route_weights.as<float>(), b.times);
  if (t > 1) {
    d_weights.resize(DType::kF32, {b.saved.T, config.K});
    moe::reduce_expanded(d_route_weights.as<float>(), b.saved.T, config.K, t, d_weights.as<float>());
  }
}

void MoeLayer::Impl::backward_shared_weights(const Backward& b) {
  if (config.shared_F == 0) return;
  const PhaseScope scope(b.times, Phase::kShared);
  shared(b.parameters, b.saved)
      .backward_weights(b.x, keep(b.saved, &MoeStep::Saved::shared_h, Recompute::kActivation), keep(b.saved, &MoeStep::Saved::shared_a, Recompute::kNone),
                        b.d_out, b.gradients.shared_w1, b.gradients.shared_w2, shared_da, shared_dh);
}

void MoeLayer::Impl::add_shared_input_gradient(const Backward& b) {
  if (!config.overlap_shared) backward_shared_weights(b);
  const PhaseScope scope(b.times, Phase::kShared);
  shared(b.parameters, b.saved).add_input_gradient(shared_dh, b.dx);
}

// d_weights and the losses -> d_logits -> gate gradient and dx (+=). With both aux losses on, the global one takes a second pass
// over the same buffer: no second [T, E] gradient exists.
void MoeLayer::Impl::backward_router(const Backward& b) {
  const RouterInputs inputs = router_inputs(b.parameters, keep(b.saved, &MoeStep::Saved::logits, Recompute::kActivation), b.saved);
  const float* route_gradient = (config.expert_tensor_parallel > 1 ? d_weights : d_route_weights).as<float>();
  d_logits.resize(DType::kF32, {b.saved.T, config.E});
  const int passes = two_aux_losses() ? 2 : 1;
  for (int pass = 0; pass < passes; ++pass) {
    const bool global = config.global_coefficient != 0 && (pass == 1 || !two_aux_losses());
    {
      const PhaseScope scope(b.times, Phase::kRouter);
      router_backward(config.router, loss_config(global), inputs, b.step.route, pass == 0 ? route_gradient : nullptr, loss_inputs(b.saved, global),
                      b.loss_scale, d_logits, stream);
    }
    const PhaseScope scope(b.times, Phase::kGate);
    moe::project_backward_weight(d_logits, b.x, b.gradients.gate, stream);
    moe::project_backward_input(d_logits, b.parameters.gate, b.dx, /*accumulate=*/true, stream);
  }
}

}  // namespace waybill
