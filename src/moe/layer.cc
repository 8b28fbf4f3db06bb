// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "moe/agreement.h"
#include "moe/etp.h"
#include "moe/layer_impl.h"
#include "moe/tensors.h"

namespace waybill {

MoeLayer::Impl::Impl(const MoeConfig& layer_config, Fabric& ep_group, Fabric& world_group, ThreadPool* pool)
    : config(layer_config), ep(ep_group), world(world_group), stream(Stream::cpu(pool)) {
  validate(config, ep.size());
  moe::check_agreement(config, ep);
  config.router.E = config.E;
  config.router.K = config.K;
  L = config.L(ep.size());
  static_reasons = moe::static_dense_reasons(config, ep);
  const int t = config.expert_tensor_parallel;
  placement = ExpertPlacement{config.E * t, ep.size(), nullptr, nullptr};
  if (t > 1) {
    moe::make_etp_tables(config.E, ep.size(), t, rank_table, local_table);
    placement.rank_table = rank_table.data();
    placement.local_table = local_table.data();
  }
  factor = config.receive_factor == 0 && config.mode == ExchangeMode::kCaptured ? 1.5 : config.receive_factor;
  expert_ids.resize(static_cast<std::size_t>(placement.L()));
  for (std::int64_t e = 0; e < placement.E; ++e) {
    if (placement.rank_of(e) == ep.rank()) expert_ids[static_cast<std::size_t>(placement.local_of(e))] = e;
  }
  build_paths();
}

void MoeLayer::Impl::build_paths() {
  ExchangeConfig exchange;
  exchange.H = config.row_width();
  exchange.E = placement.E;
  exchange.K = config.K * config.expert_tensor_parallel;
  exchange.T_max = config.mode == ExchangeMode::kCaptured ? config.T_max : 0;  // eager sizes exactly and takes any T
  exchange.mode = config.mode;
  exchange.receive_factor = config.mode == ExchangeMode::kCaptured ? factor : 0;
  exchange.combine_wire = config.combine_wire;
  exchange.hierarchy = config.hierarchy;
  exchange.alignment = config.alignment;
  exchange.debug_checks = config.debug_checks;
  if ((static_reasons & (kDenseMapTopK | kDenseMapFabric)) == 0) compact = std::make_unique<moe::CompactPath>(exchange, placement, ep, stream.pool);
  dense = std::make_unique<moe::DensePath>(placement, ep, config.alignment);
}

moe::RowPath& MoeLayer::Impl::path(const MoeStep& step) {
  if (step.dense_map_reasons != kDenseMapNone) return *dense;
  return *compact;
}

TensorView MoeLayer::Impl::expert_rows(const MoeTensors& parameters, const TensorView& x, PhaseTimes* times) {
  if (config.latent == 0) return x;
  const PhaseScope scope(times, Phase::kShared);
  latent_in.resize(DType::kF32, {x.shape[0], config.latent});
  moe::project(x, parameters.latent_down, latent_in, /*accumulate=*/false, stream);
  return latent_in;
}

moe::ExpertContext MoeLayer::Impl::experts(const MoeTensors& parameters, const MoeStep::Saved& saved, PhaseTimes* times) const {
  const bool second_bias = config.expert_bias && ep.rank() % config.expert_tensor_parallel == 0;
  return moe::ExpertContext{config, parameters, saved.handle.layout(), expert_ids, saved.rounding_seed, second_bias, stream, times};
}

moe::SharedExpert MoeLayer::Impl::shared(const MoeTensors& parameters, const MoeStep::Saved& saved) {
  return moe::SharedExpert{config.activation, config.recipe, parameters.shared_w1, parameters.shared_w2, saved.rounding_seed, expert_scratch.operands, stream};
}

RouterInputs MoeLayer::Impl::router_inputs(const MoeTensors& parameters, const TensorView& logits_view, const MoeStep::Saved& saved) const {
  RouterInputs inputs;
  inputs.logits = logits_view;
  inputs.expert_bias = parameters.router_bias;
  if (!saved.padding_mask.empty()) inputs.padding_mask = TensorView::of(saved.padding_mask.data(), {saved.T});
  return inputs;
}

// The router knows one aux loss; the global loss is the same formula with other counts and goes through a second call where
// both are on.
RouterLossConfig MoeLayer::Impl::loss_config(bool global) const {
  RouterLossConfig losses;
  losses.aux_coefficient = global ? config.global_coefficient : config.aux_coefficient;
  if (global && two_aux_losses()) return losses;
  losses.sequence_coefficient = config.sequence_coefficient;
  losses.sequence_length = config.sequence_length;
  losses.z_coefficient = config.z_coefficient;
  return losses;
}

RouterLossInputs MoeLayer::Impl::loss_inputs(const MoeStep::Saved& saved, bool global) const {
  RouterLossInputs inputs;
  inputs.aux_counts = global ? saved.global_counts.data() : saved.aux_counts.data();
  inputs.aux_tokens = global ? saved.global_tokens : saved.aux_tokens;
  inputs.loss_tokens = saved.loss_tokens;
  inputs.num_sequences = saved.loss_sequences;
  return inputs;
}

void MoeLayer::Impl::count_bytes(moe::RowPath& used) {
  bytes += used.bytes();
  used.reset_bytes();
}

MoeLayer::MoeLayer(const MoeConfig& config, Fabric& ep, Fabric& world, ThreadPool* pool) : impl_(std::make_unique<Impl>(config, ep, world, pool)) {}
MoeLayer::~MoeLayer() = default;

const MoeConfig& MoeLayer::config() const { return impl_->config; }
std::int64_t MoeLayer::L() const { return impl_->L; }

void MoeLayer::forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, MoeStep& step, const MoeForwardOptions& options,
                       PhaseTimes* times) {
  impl_->check_forward(parameters, x, out, options);
  impl_->forward({parameters, x, out, step, impl_->prepare(step, x, options), options, times});
}

void MoeLayer::backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx,
                        MoeStep& step, float loss_scale, PhaseTimes* times) {
  WB_CHECK(step.saved != nullptr && step.saved->ready, "backward needs a step that a training forward filled and no backward has used yet");
  const Impl::Backward b{parameters, gradients, x, d_out, dx, step, *step.saved, loss_scale, times};
  impl_->check_backward(b);
  impl_->backward(b);
}

void MoeLayer::set_receive_factor(double factor) {
  WB_CHECK(std::isfinite(factor) && factor >= 0, "receive_factor = {} must be finite and not negative (0 = worst case)", factor);
  impl_->factor = factor;
  if (impl_->config.mode == ExchangeMode::kCaptured) impl_->build_paths();
}

double MoeLayer::receive_factor() const { return impl_->factor; }

ReceiveBudget MoeLayer::budget() const { return impl_->compact != nullptr ? impl_->compact->exchange().budget() : ReceiveBudget{}; }

const ExchangeBytes& MoeLayer::bytes() const { return impl_->bytes; }
StatusWord& MoeLayer::status() { return impl_->status; }
double MoeLayer::expert_flops() const { return impl_->expert_flops; }
std::int64_t MoeLayer::num_dense_map_forwards() const { return impl_->dense_forwards; }

}  // namespace waybill
