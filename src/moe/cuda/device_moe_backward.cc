// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/cuda/second_bias.h"
#include "moe/cuda/sent_routes.h"
#include "moe/cuda/step_rows.h"
#include "ops/gemm/cuda/gemm_portable.h"
#include "ops/router/cuda/gate_gemm.h"
#include "waybill/gate.h"
#include "waybill/grouped_gemm_activation.h"
#include "waybill/router_weighted.h"

namespace waybill::cuda {

void DeviceMoeLayer::Impl::backward(const Backward& b) {
  b.saved.x.assign(b.x.begin(), b.x.end()), b.saved.d_out.assign(b.d_out.begin(), b.d_out.end());
  // Another forward has used the memory of the weights' copies since.
  const bool is_stale = b.saved.weights_version == 0 || b.saved.weights_version != weights_version;
  if (recipe && is_stale) mark(Phase::kActivation, b.stream), quantize_weights(b.parameters, b.saved, b.stream);
  recompute(b);
  if (config.latent > 0) mark(Phase::kShared, b.stream);
  const std::vector<DeviceRows> sent = sent_gradients(b);
  mark(Phase::kDispatch, b.stream);
  if (recipe) {
    blocked_send(b, sent);
  } else if (shared_gradients_beside()) {
    send_beside_shared(b, sent);
  } else {
    send_to_experts(b, sent, b.stream);
  }
  mark(Phase::kExpertGemm, b.stream);
  recipe ? blocked_second_gradients(b) : second_matmul_gradients(b);
  if (combines_beside(config, options)) {
    first_gradients_beside(b);
  } else {
    blocks_at_home() ? first_gradients_in_blocks_at_home(b) : first_gradients(b);
  }
  rest_of_input_gradients(b);
  mark(Phase::kOther, b.stream);
  b.saved.ready = false;
}

// Gradients of rows (or the rows of x once more) to the experts' ranks: into expert order while they arrive, or to their window where the matmuls read a
// list.
void DeviceMoeLayer::Impl::send_to_experts(const Backward& b, std::span<const DeviceRows> sent, cudaStream_t stream) {
  const bool gathered = lists_gradients();
  if (home()) {
    if (!gathered) exchange->permute_own(b.saved.handle, DType::kBF16, sent, y_rows(b.saved), stream);
    return;
  }
  if (gathered || !exchange->supports_chunks()) {
    exchange->dispatch(b.saved.handle, DType::kBF16, sent, windows.gradients, /*after_plan=*/false, stream);
    if (!gathered) exchange->permute(b.saved.handle, DType::kBF16, window_rows(windows.gradients), y_rows(b.saved), stream);
    return;
  }
  fork(stream);
  exchange->dispatch_chunks(b.saved.handle, DType::kBF16, sent, windows.gradients, /*after_plan=*/false, stream);
  exchange->permute_arriving(b.saved.handle, DType::kBF16, sent, window_rows(windows.gradients), y_rows(b.saved), side);
  join(stream);
}

// The same, and meanwhile the gradients of the shared expert's weights, whose matmuls keep to the caller's stream and its room for partial tiles.
void DeviceMoeLayer::Impl::send_beside_shared(const Backward& b, std::span<const DeviceRows> sent) {
  fork(b.stream, beside);
  mark_beside(Phase::kDispatch, beside);
  send_to_experts(b, sent, beside);  // first, so that its CTAs find room
  mark_beside(Phase::kOther, beside);
  mark(Phase::kShared, b.stream);
  shared_weight_gradients(b);
  mark(Phase::kDispatch, b.stream);  // what of it is still to come
  join(b.stream, beside);
}

// What the forward pass did not keep, but for the routes.
void DeviceMoeLayer::Impl::recompute(const Backward& b) {
  if (config.recompute == Recompute::kNone) return;
  if (config.recompute == Recompute::kActivation) {
    if (recipe && recipe->reads_h()) return;
    mark(Phase::kActivation, b.stream);
    for (std::size_t i = 0; i < count(); ++i) {
      activation_forward(config.activation, h(b.saved, i), slot_weights(b.saved, i).as<float>(), a(b.saved, i), on(b.stream),
                         offsets(b.saved, i).as<std::int32_t>() + L);
      if (config.shared_F > 0) {
        activation_forward(config.activation, shared_h(b.saved, i), nullptr, shared_a(b.saved, i), on(b.stream),
                           dense_offsets(b.saved, i).as<std::int32_t>() + 1);
      }
    }
    return;
  }
  mark(Phase::kGate, b.stream);
  for (std::size_t i = 0; i < count(); ++i) gate_forward(b.x[i], b.parameters[i].gate, logits(b.saved, i), on(b.stream));
  mark(Phase::kDispatch, b.stream);
  if (!home()) {
    exchange->dispatch(b.saved.handle, DType::kBF16, sent_rows(b.parameters, b.x, b.saved, b.stream), b.saved.rows_window, /*after_plan=*/false, b.stream);
  }
  if (config.shared_F > 0) mark(Phase::kShared, b.stream), shared_hidden(b.parameters, b.x, b.saved, /*keep_h=*/true, b.stream);
  mark(Phase::kExpertGemm, b.stream);
  first_matmul(b.parameters, b.saved, /*keep_h=*/true, b.stream);
}

// dW2, then the gradient through W2 and the activation: h becomes dh, a is used up.
void DeviceMoeLayer::Impl::second_matmul_gradients(const Backward& b) {
  const bool gathered = lists_gradients(), copies_blocks = in_blocks() && copies_block_rows();
  if (copies_blocks) second_weight_gradients_in_blocks(b);
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView dy = gathered ? listed_d_out(b.saved, i) : y(b.saved, i), list = gathered ? slot_rows(b.saved, i) : TensorView();
    // W2 [L, W, F] is [L, C, N] of the product whose rows are dy and whose gradient is a: that operand may be read through a list.
    GroupedGemmWgradArgs w2;
    w2.a = dy, w2.a_rows = list, w2.dy = a(b.saved, i), w2.layout = WeightLayout::kLCN;
    if (!gathered) w2.a = a(b.saved, i), w2.dy = dy, w2.layout = WeightLayout::kLNC;
    w2.offsets = offsets(b.saved, i), w2.d_weights = b.gradients[i].w2, w2.status = status_word(i);
    w2.accumulate = adds_to(w2.d_weights, b);
    if (!copies_blocks) grouped_gemm_wgrad(w2, on(b.stream));
    GroupedGemmActivationBackwardArgs act;
    act.product.a = dy, act.product.a_rows = list, act.product.weights = b.parameters[i].w2, act.product.layout = WeightLayout::kLCN;
    act.product.offsets = offsets(b.saved, i), act.product.y = a(b.saved, i), act.product.status = status_word(i);
    act.activation = config.activation, act.h = act.dh = h(b.saved, i), act.weight = slot_weights(b.saved, i);
    act.d_weight = TensorView(scratch_at<float>(i, scratch_parts.d_slot_weight), DType::kF32, {slots(b.saved, i)}, where);
    grouped_gemm_activation_backward(act, on(b.stream));
    if (config.expert_bias) bias_gradients(b, i);
  }
}

// db1 from dh; db2 and what the routing weights get from b2, which counts once: on slice 0.
void DeviceMoeLayer::Impl::bias_gradients(const Backward& b, std::size_t i) {
  const bool gathered = lists_gradients();
  const auto* begin = offsets(b.saved, i).as<std::int32_t>();
  const auto* list = slot_rows(b.saved, i).as<std::int32_t>();
  const MoeTensors& g = b.gradients[i];
  const std::int64_t list_rows = home() ? b.saved.routes[i].T : R;
  launch_bias_grad(
      {h(b.saved, i).data, true, begin, list, static_cast<int>(L), slots(b.saved, i), list_rows, config.inner_width(), g.b1.as<float>(), b.options.accumulate},
      b.stream);
  check_launch("bias_grad");
  if (!has_second_bias(i)) {
    if (!b.options.accumulate) WB_TRY_CUDA(cudaMemsetAsync(g.b2.data, 0, static_cast<std::size_t>(g.b2.size()) * sizeof(float), b.stream));
    return;
  }
  SecondBias args{};
  args.dy = gathered ? listed_d_out(b.saved, i).data : y(b.saved, i).data, args.rows = gathered ? list : nullptr, args.list_rows = list_rows;
  args.offsets = begin, args.num_slots = slots(b.saved, i), args.weight = slot_weights(b.saved, i).as<float>(), args.L = L, args.W = config.row_width();
  launch_second_bias_sums(args, g.b2.as<float>(), b.options.accumulate, b.stream);
  check_launch("moe_second_bias_sums");
  launch_second_bias_dots(args, b.parameters[i].b2.as<float>(), scratch_at<float>(i, scratch_parts.d_slot_weight), b.stream);
  check_launch("moe_second_bias_dots");
}

// The rows of x in expert order, where the matmuls do not read a list.
void DeviceMoeLayer::Impl::copy_x(const Backward& b) {
  if (recipe) return;  // rows are found through the list, and were sent again already
  if (options.resend_rows && !home()) {
    mark(Phase::kDispatch, b.stream);
    send_to_experts(b, sent_rows(b.parameters, b.x, b.saved, b.stream), b.stream);
    mark(Phase::kExpertGemm, b.stream);
  } else if (!lists_gradients() && !copies_x_in_blocks(config, options)) {
    home() ? exchange->permute_own(b.saved.handle, DType::kBF16, device_rows(b.x), copied_x_rows(b.saved), b.stream)
           : exchange->permute(b.saved.handle, DType::kBF16, window_rows(b.saved.rows_window), copied_x_rows(b.saved), b.stream);
  }
}

// dW1.
void DeviceMoeLayer::Impl::first_weight_gradients(const Backward& b) {
  if ((in_blocks() && copies_block_rows()) || copies_x_in_blocks(config, options)) {
    std::vector<void*> copies;  // `a` is used up
    for (std::size_t i = 0; i < count(); ++i) copies.push_back(in_blocks() ? y(b.saved, i).data : a(b.saved, i).data);
    return first_weight_gradients_in_blocks(b, in_blocks() ? y_columns(config, options) : x_columns(config), copies);
  }
  if (recipe) return blocked_first_weight_gradients(b);
  const bool gathered = lists_gradients();
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmWgradArgs w1;
    w1.a = gathered ? listed_x(b.saved, i) : copied_x(b.saved, i), w1.dy = h(b.saved, i), w1.offsets = offsets(b.saved, i), w1.d_weights = b.gradients[i].w1;
    if (gathered) w1.a_rows = slot_rows(b.saved, i);
    w1.accumulate = adds_to(w1.d_weights, b), w1.status = status_word(i);
    grouped_gemm_wgrad(w1, on(b.stream));
  }
}

// The gradient of the rows in expert order.
void DeviceMoeLayer::Impl::row_gradients(const Backward& b) {
  if (recipe) return blocked_row_gradients(b);
  if (in_blocks()) return row_gradients_in_blocks(b, {}, {});
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmDgradArgs d;
    d.dy = h(b.saved, i), d.weights = b.parameters[i].w1, d.offsets = offsets(b.saved, i), d.da = y(b.saved, i), d.status = status_word(i);
    grouped_gemm_dgrad(d, on(b.stream));
  }
}

// d_slot_weight -> d_weights -> d_logits.
void DeviceMoeLayer::Impl::router_gradients(const Backward& b) {
  mark(Phase::kCombine, b.stream);
  return_weights(b);
  if (takes_map(b.saved)) return;  // the router took no part
  mark(Phase::kRouter, b.stream);
  for (std::size_t i = 0; i < count(); ++i) {
    const std::int64_t T = b.saved.routes[i].T;
    float* to = d_logits(b.saved, i);
    const bool twice = (b.saved.reasons & kDenseMapDuplicateIds) != 0;
    route_gradients(b, i, twice ? RouterLossConfig{} : loss_config(only_global()), only_global(), true, to);
    if (twice) {
      const bool over_all = config.router.score == ScoreFunction::kSoftmax && !config.router.renormalise;
      launch_scale_duplicates({b.saved.routes[i].ids, b.saved.routes[i].weights, scratch_at<float>(i, scratch_parts.d_weights), T, config.K, config.E, over_all,
                               static_cast<int>(size_bytes(route_id_dtype(config.E)))},
                              to, b.stream);
      check_launch("moe_scale_duplicates");
      if (has_losses(config)) add_loss_gradients(b, i, only_global());
    }
    if (has_two_aux_losses(config)) add_loss_gradients(b, i, true);
    if (!has_losses(config)) continue;
    launch_clear_invalid(exchange->header(b.saved.handle, static_cast<int>(i)), to, T * config.E, b.stream);
    check_launch("moe_clear_invalid");
  }
}

void DeviceMoeLayer::Impl::route_gradients(const Backward& b, std::size_t i, const RouterLossConfig& losses, bool global, bool routes, float* d_logits_to) {
  RouterInputs inputs = router_inputs(b.parameters[i], b.saved, i);
  inputs.weight_factors = TensorView(b.saved.at<float>(i, step_parts.weight_factors), DType::kF32, {b.saved.routes[i].T}, where);
  const float* d_weights = routes ? scratch_at<float>(i, scratch_parts.d_weights) : nullptr;
  const TensorView gradient(d_logits_to, DType::kF32, {b.saved.routes[i].T, config.E}, where);
  if (b.options.loss_weights != nullptr) {
    const float* factors = b.options.loss_weights + (global && has_two_aux_losses(config) ? 3 : 0);
    router_backward_weighted(config.router, losses, inputs, route(b.saved, i), d_weights, loss_inputs(b.saved, i, global), factors, gradient, on(b.stream));
  } else {
    router_backward(config.router, losses, inputs, route(b.saved, i), d_weights, loss_inputs(b.saved, i, global), b.options.loss_scale, gradient, on(b.stream));
  }
}

// d_logits += what the losses give.
void DeviceMoeLayer::Impl::add_loss_gradients(const Backward& b, std::size_t i, bool global) {
  auto* more = scratch_at<float>(i, scratch_parts.d_logits_more);
  route_gradients(b, i, loss_config(global), global, false, more);
  launch_add_values(d_logits(b.saved, i), more, b.saved.routes[i].T * config.E, b.stream);
  check_launch("moe_add_values");
}

// backward_base as combine() takes it.
std::vector<const void*> DeviceMoeLayer::Impl::wire_bases(const Backward& b) {
  std::vector<const void*> bases;
  if (config.latent > 0) return bases;  // it joins the latent result
  for (std::size_t i = 0; i < count(); ++i) {
    TensorView base = backward_base(b.saved, i);
    if (base.dtype != exchange->wire()) {
      const TensorView rounded(scratch_at<void>(i, scratch_parts.wire_base), exchange->wire(), {base.shape[0], config.H}, where);
      round_rows(base, rounded, b.stream);
      base = rounded;
    }
    bases.push_back(base.data);
  }
  return bases;
}

void DeviceMoeLayer::Impl::first_gradients(const Backward& b) {
  copy_x(b), first_weight_gradients(b), row_gradients(b);
  router_gradients(b);
  base_gradients(b);
  mark(Phase::kCombine, b.stream);
  reduce_and_combine(b.saved, combined_gradients(b), wire_bases(b), b.stream);
}

// What dx has from elsewhere comes first, so that each block is whole once it is reduced; the gradient of the logits lies where the blocks come afterwards.
void DeviceMoeLayer::Impl::first_gradients_in_blocks_at_home(const Backward& b) {
  copy_x(b), first_weight_gradients(b);
  router_gradients(b);
  base_gradients(b);
  mark(Phase::kExpertGemm, b.stream);
  row_gradients_in_blocks(b, b.dx, wire_bases(b));
}

// The rows' gradient first, so that its way home is hidden behind dW1. The combine is queued first and takes its SMs; the matmul's CTAs fetch tiles as they
// come, so that those which start late leave no tail.
void DeviceMoeLayer::Impl::first_gradients_beside(const Backward& b) {
  router_gradients(b);
  base_gradients(b);
  mark(Phase::kExpertGemm, b.stream);
  row_gradients(b);
  const std::vector<TensorView> to = combined_gradients(b);
  const std::vector<const void*> bases = wire_bases(b);
  fork(b.stream, beside);
  join(b.stream, beside);  // what follows here may start no sooner than the combine, nor take its SMs
  mark_beside(Phase::kCombine, beside);
  reduce_and_combine(b.saved, to, bases, beside, options.policy.combine_sms);
  mark_beside(Phase::kOther, beside);
  {
    const struct Restored {
      int& value;
      const int before = value;
      ~Restored() { value = before; }
    } copying_ctas{exchange->tuning().local_ctas};
    if (copying_ctas.value <= 0) copying_ctas.value = std::max(2, 2 * (sm_count - options.policy.combine_sms));
    copy_x(b), first_weight_gradients(b);
  }
  mark(Phase::kCombine, b.stream);  // what of it is still to come
  join(b.stream, beside);
}

// d_gate; the parts of dx that the gate and the shared expert give, which lie where `a` was.
void DeviceMoeLayer::Impl::base_gradients(const Backward& b) {
  mark(Phase::kGate, b.stream);
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView base = backward_base(b.saved, i);
    if (takes_map(b.saved)) {
      WB_TRY_CUDA(cudaMemsetAsync(base.data, 0, static_cast<std::size_t>(base.size()) * size_bytes(base.dtype), b.stream));
      const TensorView& gate = b.gradients[i].gate;
      if (!b.options.accumulate) WB_TRY_CUDA(cudaMemsetAsync(gate.data, 0, static_cast<std::size_t>(gate.size()) * sizeof(float), b.stream));
      continue;
    }
    gate_backward({base.shape[0], config.H, config.E, DType::kBF16}, b.x[i].data, b.parameters[i].gate.data, d_logits(b.saved, i), base.data,
                  b.gradients[i].gate.as<float>(), b.options.accumulate, where.index, b.stream, base.dtype);
  }
  if (config.shared_F > 0) mark(Phase::kShared, b.stream), shared_gradients(b);
}

// What the combine of the rows' gradient writes: dx, or the gradient of the latent rows.
std::vector<TensorView> DeviceMoeLayer::Impl::combined_gradients(const Backward& b) const {
  if (config.latent == 0) return {b.dx.begin(), b.dx.end()};
  std::vector<TensorView> latent;
  for (std::size_t i = 0; i < count(); ++i) latent.push_back(latent_gradient(b.saved, i));
  return latent;
}

// With a latent width: dx = base + what comes of that gradient.
void DeviceMoeLayer::Impl::rest_of_input_gradients(const Backward& b) {
  if (config.latent == 0) return;
  mark(Phase::kShared, b.stream);
  latent_gradients(b);
  for (std::size_t i = 0; i < count(); ++i) round_rows(backward_base(b.saved, i), b.dx[i], b.stream);
}

}  // namespace waybill::cuda
