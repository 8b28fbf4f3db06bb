// SPDX-License-Identifier: Apache-2.0
#include "baselines/routed_stack.h"

#include "moe/dense_mlp.h"
#include "moe/eligibility.h"
#include "moe/tensors.h"

namespace waybill::baselines {

RoutedStack::RoutedStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool)
    : config_(config), ep_(ep), stream_(Stream::cpu(pool)), L_(config.moe.L(ep.size())), placement_(block_placement(config.moe.E, ep.size())) {}

RouterInputs RoutedStack::router_inputs(const MoeTensors& parameters) const {
  RouterInputs inputs;
  inputs.logits = logits_;
  inputs.expert_bias = parameters.router_bias;
  return inputs;
}

void RoutedStack::choose(const StackCall& call) {
  const PhaseScope scope(call.times, Phase::kRouter);
  RouterInputs inputs = router_inputs(call.parameters);
  if (replay_ != nullptr) {
    const RouteView& replay = replay_->view();
    inputs.replay_ids = TensorView(replay.ids, replay.id_dtype, {replay.T, replay.K});
  }
  if (replay_ == nullptr) counters_.scores_visited += logits_.size();
  RouterOutputs outputs;
  outputs.route = route_.view();
  router_forward(config_.moe.router, inputs, outputs, stream_);
}

void RoutedStack::forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const Route* replay, PhaseTimes* times) {
  const MoeConfig& moe = config_.moe;
  WB_CHECK(x.rank == 2, "x must be [T, H = {}], got {}", moe.H, x.describe());
  const std::int64_t T = x.shape[0];
  moe::check_tensors(moe, L_, parameters, "parameter");
  moe::check_activations(x, T, moe.H, "x");
  moe::check_activations(out, T, moe.H, "out");
  WB_CHECK(replay == nullptr || (replay->T() == T && replay->K() == moe.K && replay->E() == moe.E),
           "replayed routes are [T={}, K={}] over E={}, expected [T={}, K={}] over E={}", replay->T(), replay->K(), replay->E(), T, moe.K, moe.E);
  WB_CHECK(replay == nullptr || !moe::has_duplicate_ids(*replay),
           "a replayed row names an expert twice: only the MoE layer's dense-map path takes such routes");
  const StackCall call{parameters, x, times};
  replay_ = replay;
  logits_.resize(DType::kF32, {T, moe.E});
  {
    const PhaseScope scope(times, Phase::kGate);
    moe::project(x, parameters.gate, logits_, /*accumulate=*/false, stream_);
  }
  if (route_.T() != T || route_.K() != moe.K || route_.E() != moe.E) route_ = Route(T, moe.K, moe.E);
  choose(call);
  replay_ = nullptr;
  routed_forward(call, out);
  ready_ = true;
}

void RoutedStack::backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx,
                           PhaseTimes* times) {
  const MoeConfig& moe = config_.moe;
  WB_CHECK(ready_, "backward() without a forward() before it");
  const std::int64_t T = route_.T();
  moe::check_tensors(moe, L_, parameters, "parameter");
  moe::check_tensors(moe, L_, gradients, "gradient");
  moe::check_activations(x, T, moe.H, "x");
  moe::check_activations(d_out, T, moe.H, "d_out");
  moe::check_activations(dx, T, moe.H, "dx");
  ready_ = false;
  d_weights_.resize(DType::kF32, {T, moe.K});
  routed_backward({parameters, x, times}, gradients, d_out, dx, d_weights_.as<float>());
  d_logits_.resize(DType::kF32, {T, moe.E});
  {
    const PhaseScope scope(times, Phase::kRouter);
    router_backward(moe.router, {}, router_inputs(parameters), route_, d_weights_.as<float>(), {}, 1.0f, d_logits_, stream_);
  }
  const PhaseScope scope(times, Phase::kGate);
  moe::project_backward_weight(d_logits_, x, gradients.gate, stream_);
  moe::project_backward_input(d_logits_, parameters.gate, dx, /*accumulate=*/true, stream_);
}

}  // namespace waybill::baselines
