// SPDX-License-Identifier: Apache-2.0
// Counts over all ranks and the losses that need them. They are constants of the gradients.
#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/cuda/reduce_counts.h"
#include "moe/cuda/sum_nodes.h"

namespace waybill::cuda {

// What the losses are averaged over; from T where the caller does not say.
void DeviceMoeLayer::Impl::set_totals(const Forward& f) {
  if (!has_losses(config)) return;
  double tokens = f.options.valid_tokens;
  if (tokens == 0) {
    WB_CHECK(ranks.count == P && f.options.padding_masks.empty(),
             "the losses need valid_tokens, of all ranks: this launch holds {} of {} ranks, and {} padding masks are given", ranks.count, P,
             f.options.padding_masks.size());
    for (const TensorView& x : f.x) tokens += static_cast<double>(x.shape[0]);
  }
  f.saved.valid_tokens = tokens, f.saved.global_tokens = tokens + f.options.accumulated_tokens;
  f.saved.loss_tokens = f.options.loss_tokens > 0 ? f.options.loss_tokens : tokens;
  f.saved.loss_sequences = f.options.loss_sequences;
  if (config.sequence_coefficient == 0) return;
  for (const TensorView& x : f.x) {
    WB_CHECK(x.shape[0] % config.sequence_length == 0, "T = {} is not a multiple of sequence_length = {}", x.shape[0], config.sequence_length);
  }
  if (f.saved.loss_sequences > 0) return;
  WB_CHECK(f.options.padding_masks.empty(), "the sequence loss needs loss_sequences where padding masks are given");
  f.saved.loss_sequences = tokens / static_cast<double>(config.sequence_length);
}

void DeviceMoeLayer::Impl::reduce_counts(const Forward& f) {
  ReduceCountsArgs args{};
  args.ranks = ranks, args.window = windows.counts, args.n = static_cast<std::int32_t>(num_totals(config)), args.E = static_cast<std::int32_t>(config.E);
  args.first = args.n - args.E;  // the counts of the losses come last
  for (std::size_t i = 0; i < count(); ++i) {
    const auto* own = scratch_at<std::int32_t>(i, scratch_parts.own_counts);
    WB_TRY_CUDA(cudaMemcpyAsync(f.saved.at<void>(i, step_parts.counts), own, static_cast<std::size_t>(config.E) * 4, cudaMemcpyDeviceToDevice, f.stream));
    args.rank[i] = {own, f.options.accumulated_counts.empty() ? nullptr : f.options.accumulated_counts[i].as<std::int32_t>(),
                    f.saved.at<std::int32_t>(i, step_parts.totals),
                    config.global_coefficient != 0 ? f.saved.at<std::int32_t>(i, step_parts.global_totals) : nullptr};
  }
  launch_reduce_counts(args, f.stream);
  check_launch("moe_reduce_counts");
  if (options.nodes > 1) sum_nodes(f, args);
}

// From the counts of this node to those of all.
void DeviceMoeLayer::Impl::sum_nodes(const Forward& f, const ReduceCountsArgs& node) {
  std::vector<const void*> own;
  std::vector<void*> others;
  for (std::size_t i = 0; i < count(); ++i) own.push_back(node.rank[i].totals), others.push_back(scratch_at<void>(i, scratch_parts.node_counts));
  exchange->send_between_nodes(own, others, static_cast<std::size_t>(node.n) * 4, f.stream);
  for (std::size_t i = 0; i < count(); ++i) {
    const ReduceCountsArgs::Rank& rank = node.rank[i];
    launch_sum_nodes(
        {static_cast<const std::int32_t*>(others[i]), options.nodes, exchange->node(), node.n, node.E, node.first, rank.accumulated, rank.totals, rank.global},
        f.stream);
    check_launch("moe_sum_nodes");
  }
}

// The counts of all groups in place of this one's, and what hangs on them.
void DeviceMoeLayer::Impl::add_losses(const Forward& f, const std::int32_t* counts) {
  const auto n = static_cast<std::int32_t>(num_totals(config)), E = static_cast<std::int32_t>(config.E);
  for (std::size_t i = 0; i < count(); ++i) {
    auto* totals = f.saved.at<std::int32_t>(i, step_parts.totals);
    WB_TRY_CUDA(cudaMemcpyAsync(totals, counts, static_cast<std::size_t>(n) * sizeof(std::int32_t), cudaMemcpyDeviceToDevice, f.stream));
    if (config.global_coefficient == 0) continue;
    const std::int32_t* accumulated = f.options.accumulated_counts.empty() ? nullptr : f.options.accumulated_counts[i].as<std::int32_t>();
    launch_sum_nodes({nullptr, 1, 0, n, E, n - E, accumulated, totals, f.saved.at<std::int32_t>(i, step_parts.global_totals)}, f.stream);
    check_launch("moe_sum_nodes");
  }
  mark(Phase::kRouter, f.stream);
  compute_losses(f);
  report(f);
  mark(Phase::kOther, f.stream);
  f.saved.awaits_losses = false;
}

// The router knows one aux loss; where both are on the global one, the same formula with other counts, takes a second call.
RouterLossConfig DeviceMoeLayer::Impl::loss_config(bool global) const {
  RouterLossConfig losses;
  losses.aux_coefficient = global ? config.global_coefficient : config.aux_coefficient;
  if (global && has_two_aux_losses(config)) return losses;
  losses.sequence_coefficient = config.sequence_coefficient, losses.sequence_length = config.sequence_length;
  losses.z_coefficient = config.z_coefficient;
  return losses;
}

RouterLossInputs DeviceMoeLayer::Impl::loss_inputs(const Saved& saved, std::size_t i, bool global) const {
  RouterLossInputs inputs;
  if (!has_losses(config)) return inputs;
  inputs.aux_counts =
      global ? saved.at<std::int32_t>(i, step_parts.global_totals) : saved.at<std::int32_t>(i, step_parts.totals) + (num_totals(config) - config.E);
  inputs.aux_tokens = global ? saved.global_tokens : saved.valid_tokens;
  inputs.loss_tokens = saved.loss_tokens, inputs.num_sequences = saved.loss_sequences;
  return inputs;
}

void DeviceMoeLayer::Impl::compute_losses(const Forward& f) {
  for (std::size_t i = 0; i < count(); ++i) {
    const int passes = has_two_aux_losses(config) ? 2 : 1;
    for (int pass = 0; pass < passes; ++pass) {
      const bool global = only_global() || pass == 1;
      RouterLossInputs inputs = loss_inputs(f.saved, i, global);
      inputs.score_sums = scratch_at<double>(i, scratch_parts.score_sums);
      router_losses_into(config.router, loss_config(global), router_inputs(f.parameters[i], f.saved, i), route(f.saved, i), inputs,
                         scratch_at<double>(i, scratch_parts.losses) + 3 * pass, on(f.stream));
    }
  }
}

}  // namespace waybill::cuda
