// SPDX-License-Identifier: Apache-2.0
// The design this library replaces, and the ladder from it to compact routes (DenseMapChanges).
#include "baselines/grouped_experts.h"
#include "baselines/map_rows.h"
#include "baselines/repeated_max.h"
#include "baselines/routed_stack.h"

namespace waybill::baselines {
namespace {

class DenseMapStack final : public RoutedStack {
 public:
  DenseMapStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool)
      : RoutedStack(config, ep, pool), map_(config.changes, placement_, ep, stream_), experts_(config.moe, stream_) {}

 private:
  void choose(const StackCall& call) override {
    if (replay_ == nullptr && !config_.changes.fast_top_k) {
      const PhaseScope scope(call.times, Phase::kRouter);
      const TensorView& bias = call.parameters.router_bias;
      repeated_max_route(config_.moe.router, logits_, bias ? bias.as<float>() : nullptr, route_.view(), counters_.scores_visited, stream_);
      return;
    }
    RoutedStack::choose(call);
  }

  void routed_forward(const StackCall& call, const TensorView& out) override {
    const std::int64_t H = config_.moe.H;
    map_.plan(route_, counters_, call.times);
    map_.dispatch(call.x, rows_, counters_, call.times);
    map_.dispatch_probabilities(counters_, call.times);
    slots_.resize(DType::kF32, {map_.S(), H});
    y_.resize(DType::kF32, {map_.S(), H});
    z_.resize(DType::kF32, {map_.R(), H});
    map_.permute(rows_, slots_, counters_, call.times);
    experts_.forward(call.parameters, map_.expert_offsets(), slots_, map_.slot_weight(), y_, call.times);
    map_.reduce(y_, z_, counters_, call.times);
    map_.combine(z_, out, counters_, call.times);
    counters_.real_rows += map_.S();
    counters_.computed_rows += map_.S();
  }

  void routed_backward(const StackCall& call, const MoeTensors& gradients, const TensorView& d_out, const TensorView& dx, float* d_weights) override {
    d_slot_weight_.resize(DType::kF32, {map_.S()});
    d_slots_.resize(DType::kF32, {map_.S(), config_.moe.H});
    map_.dispatch(d_out, rows_, counters_, call.times);
    map_.permute(rows_, y_, counters_, call.times);
    experts_.backward(call.parameters, gradients, slots_, map_.slot_weight(), y_, d_slots_, d_slot_weight_.as<float>(), call.times);
    map_.reduce(d_slots_, z_, counters_, call.times);
    map_.combine(z_, dx, counters_, call.times);
    map_.return_weights(d_slot_weight_.as<float>(), d_weights, counters_, call.times);
  }

  MapRows map_;
  GroupedExperts experts_;
  Tensor rows_, z_;             // [R, H]
  Tensor slots_, y_, d_slots_;  // [S, H]: expert-ordered copies
  Tensor d_slot_weight_;        // [S]
};

}  // namespace

std::unique_ptr<MoeStack> make_dense_map_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  return std::make_unique<DenseMapStack>(config, ep, pool);
}

}  // namespace waybill::baselines
