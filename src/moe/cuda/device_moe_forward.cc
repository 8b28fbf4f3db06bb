// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/cuda/round_rows.h"
#include "moe/cuda/second_bias.h"
#include "moe/cuda/step_report.h"
#include "moe/cuda/step_rows.h"
#include "waybill/gate.h"
#include "waybill/grouped_gemm_activation.h"

namespace waybill::cuda {

void DeviceMoeLayer::Impl::forward(const Forward& f) {
  f.saved.x.assign(f.x.begin(), f.x.end());
  if (recipe && !f.options.weights_unchanged) mark(Phase::kActivation, f.stream), quantize_weights(f.parameters, f.saved, f.stream);
  f.saved.reasons = dense_reasons(f);
  if (takes_map(f.saved)) {
    take_map(f);
  } else {
    choose(f);
  }
  mark(Phase::kPlan, f.stream);
  plan(f);
  if (options.exact_sizes) read_sizes(f);
  fork(f.stream);  // the layout beside the rows on the link
  exchange->layout(f.saved.handle, side);
  const std::vector<DeviceRows> sent = sent_rows(f.parameters, f.x, f.saved, f.stream);
  mark(Phase::kDispatch, f.stream);
  if (shared_beside()) fork(f.stream);  // no sooner than the rows can go
  if (!home()) exchange->dispatch(f.saved.handle, DType::kBF16, sent, f.saved.rows_window, /*after_plan=*/true, f.stream);
  if (shared_beside()) {  // queued behind the dispatch, whose few CTAs find room so
    mark_beside(Phase::kShared, side);
    first_of_shared(f, side);
    mark_beside(Phase::kOther, side);
  }
  join(f.stream);
  if (options.exact_sizes) take_sizes(f);  // the rows are on their way meanwhile
  if (config.shared_F > 0 && !shared_beside()) mark(Phase::kShared, f.stream), first_of_shared(f, f.stream);
  mark(Phase::kExpertGemm, f.stream);
  first_matmul(f.parameters, f.saved, f.options.training && config.recompute <= Recompute::kActivation, f.stream);
  in_blocks() ? second_matmul_in_blocks(f) : second_matmul(f);
  mark(Phase::kCombine, f.stream);
  gather_results(f);
  f.saved.awaits_losses = waits_for_losses(f);
  if (!f.saved.awaits_losses) report(f);
  mark(Phase::kOther, f.stream);
  f.saved.weights_version = weights_version;
  f.saved.ready = f.options.training;
}

// How many rows the shared expert sees, and its first matmul.
void DeviceMoeLayer::Impl::first_of_shared(const Forward& f, cudaStream_t stream) {
  for (std::size_t i = 0; i < count(); ++i) {
    launch_step_rows(exchange->header(f.saved.handle, static_cast<int>(i)), static_cast<std::int32_t>(f.saved.routes[i].T),
                     dense_offsets(f.saved, i).as<std::int32_t>(), stream);
    check_launch("moe_step_rows");
  }
  shared_hidden(f.parameters, f.x, f.saved, f.options.training && config.recompute <= Recompute::kActivation, stream);
}

void DeviceMoeLayer::Impl::choose(const Forward& f) {
  mark(Phase::kGate, f.stream);
  for (std::size_t i = 0; i < count(); ++i) gate_forward(f.x[i], f.parameters[i].gate, logits(f.saved, i), on(f.stream));
  mark(Phase::kRouter, f.stream);
  for (std::size_t i = 0; i < count(); ++i) {
    RouterInputs inputs = router_inputs(f.parameters[i], f.saved, i);
    inputs.token_offset = f.options.token_offset;
    for (std::size_t before = 0; before < i; ++before) inputs.token_offset += f.saved.routes[before].T;
    if (!f.options.replay_ids.empty()) inputs.replay_ids = f.options.replay_ids[i];
    RouterOutputs outputs;
    outputs.route = route(f.saved, i), outputs.status = f.options.training ? status_word(i) : nullptr;
    if (num_totals(config) > 0) outputs.route.counts = scratch_at<std::int32_t>(i, scratch_parts.own_counts);
    if (config.aux_counts == AuxCounts::kUnbiased && num_totals(config) > 0) outputs.counts_unbiased = outputs.route.counts + config.E;
    if (has_losses(config) && f.options.training) outputs.score_sums = scratch_at<double>(i, scratch_parts.score_sums);
    outputs.weight_factors = f.saved.at<float>(i, step_parts.weight_factors);
    router_forward(config.router, inputs, outputs, on(f.stream));
  }
  if (num_totals(config) > 0) reduce_counts(f);
  if (has_losses(config) && f.options.training && !waits_for_losses(f)) compute_losses(f);
}

// h (where wanted) and a of every rank.
void DeviceMoeLayer::Impl::first_matmul(std::span<const MoeTensors> parameters, const Saved& saved, bool keep_h, cudaStream_t stream) {
  if (recipe) return blocked_first_matmul(parameters, saved, keep_h, stream);
  const bool permuted = options.policy.forward == DeviceMoePolicy::Rows::kPermute && !in_blocks();
  if (permuted) {
    home() ? exchange->permute_own(saved.handle, DType::kBF16, device_rows(saved.x), y_rows(saved), stream)
           : exchange->permute(saved.handle, DType::kBF16, window_rows(saved.rows_window), y_rows(saved), stream);
  }
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmActivationArgs args;
    args.product.a = permuted ? y(saved, i) : listed_x(saved, i);
    if (!permuted) args.product.a_rows = slot_rows(saved, i);
    args.product.weights = parameters[i].w1, args.product.offsets = offsets(saved, i), args.product.status = status_word(i);
    if (keep_h) args.product.y = h(saved, i);
    if (config.expert_bias) args.product.bias = parameters[i].b1;
    args.activation = config.activation, args.out = a(saved, i), args.weight = slot_weights(saved, i);
    grouped_gemm_activation(args, on(stream));
  }
}

void DeviceMoeLayer::Impl::second_matmul(const Forward& f) {
  for (std::size_t i = 0; i < count(); ++i) {
    if (recipe) {
      ExpertSet set = routed_set(f.saved, i);
      set.keeps_a = set.keeps_a && f.options.training;
      recipe->second(set, h(f.saved, i), slot_weights(f.saved, i), a(f.saved, i), y(f.saved, i), /*accumulate=*/false, f.stream);
    } else {
      GroupedGemmArgs args;
      args.a = a(f.saved, i), args.weights = f.parameters[i].w2, args.offsets = offsets(f.saved, i), args.y = y(f.saved, i), args.status = status_word(i);
      grouped_gemm(args, on(f.stream));
    }
    if (!has_second_bias(i)) continue;
    // It takes the routing weight, which the matmul's epilogue does not know.
    SecondBias bias{};
    bias.offsets = offsets(f.saved, i).as<std::int32_t>(), bias.num_slots = slots(f.saved, i), bias.weight = slot_weights(f.saved, i).as<float>();
    bias.L = L, bias.W = config.row_width();
    launch_second_bias_add(bias, f.parameters[i].b2.as<float>(), y(f.saved, i).data, f.stream);
    check_launch("moe_second_bias_add");
  }
}

// The weights are in `a` already. The shared expert's part is added where the partials are, or joins the latent result.
void DeviceMoeLayer::Impl::gather_results(const Forward& f) {
  if (config.latent == 0) {
    std::vector<const void*> base;
    if (config.shared_F == 0 && blocks_at_home()) return;  // each block is there
    if (config.shared_F == 0) return reduce_and_combine(f.saved, f.out, base, f.stream);
    reduce(f.saved, f.stream);  // then y is free, and holds the shared expert's part
    mark(Phase::kShared, f.stream);
    for (std::size_t i = 0; i < count(); ++i) base.push_back(forward_base(f.saved, i).data);
    shared_result(f);
    mark(Phase::kCombine, f.stream);
    return exchange->combine(f.saved.handle, windows.partials, f.out[0].dtype, device_rows(f.out), f.stream, base);
  }
  std::vector<TensorView> latent;
  for (std::size_t i = 0; i < count(); ++i) latent.push_back(latent_out(f.saved, i));
  reduce_and_combine(f.saved, latent, {}, f.stream);
  mark(Phase::kShared, f.stream);
  latent_result(f.parameters, f.saved, f.stream);
  if (config.shared_F > 0) shared_result(f);
  for (std::size_t i = 0; i < count(); ++i) round_rows(forward_base(f.saved, i), f.out[i], f.stream);
}

void DeviceMoeLayer::Impl::reduce(const Saved& saved, cudaStream_t stream) {
  if (in_blocks()) return;  // each is reduced where it was made
  exchange->unpermute_reduce(saved.handle, DType::kBF16, y_rows(saved), /*weighted=*/false, exchange->partials(), window_rows(windows.partials),
                             /*z_in_window=*/true, stream);
}

// y -> out, plus base where it is given.
void DeviceMoeLayer::Impl::reduce_and_combine(const Saved& saved, std::span<const TensorView> out, std::span<const void* const> base, cudaStream_t stream,
                                              int num_sms) {
  if (home()) return exchange->reduce_home(saved.handle, DType::kBF16, y_rows(saved), out[0].dtype, device_rows(out), stream, base, 0, num_sms);
  if (out[0].dtype == DType::kBF16 && !in_blocks()) {
    return exchange->reduce_and_combine(saved.handle, DType::kBF16, y_rows(saved), /*weighted=*/false, windows.partials, device_rows(out), stream, base,
                                        num_sms);
  }
  reduce(saved, stream);
  exchange->combine(saved.handle, windows.partials, out[0].dtype, device_rows(out), stream, base);
}

void DeviceMoeLayer::Impl::round_rows(const TensorView& from, const TensorView& to, cudaStream_t stream) {
  launch_round_rows(from.as<float>(), to.data, to.size(), to.dtype == DType::kBF16, stream);
  check_launch("moe_round_rows");
}

void DeviceMoeLayer::Impl::report(const Forward& f) {
  for (std::size_t i = 0; i < count(); ++i) {
    const int index = static_cast<int>(i);
    StepReportArgs args{};
    args.header = exchange->header(f.saved.handle, index), args.expert_counts = exchange->expert_counts(f.saved.handle, index);
    args.L = static_cast<std::int32_t>(L), args.is_global = only_global() ? 1 : 0, args.report = f.saved.reports.at(index);
    args.dense_map_reasons = f.saved.reasons;
    if (has_losses(config) && f.options.training && !takes_map(f.saved)) args.losses = scratch_at<double>(i, scratch_parts.losses);
    if (args.losses != nullptr && has_two_aux_losses(config)) args.global_losses = args.losses + 3;
    if (config.capacity_factor > 0) args.dropped = scratch_at<std::int32_t>(i, scratch_parts.dropped);
    args.wait_ns = exchange->wait_ns(index), args.P = ranks.table.size;
    launch_step_report(args, f.stream);
    check_launch("moe_step_report");
  }
}

}  // namespace waybill::cuda
