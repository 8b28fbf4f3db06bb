// SPDX-License-Identifier: Apache-2.0
// What every older design has in common with the layer: gate, router and their backward. The routed part is the design's own.
#pragma once

#include "waybill/baselines.h"

namespace waybill::baselines {

// Parameters, input and where the time goes, of one call.
struct StackCall {
  const MoeTensors& parameters;
  const TensorView& x;
  PhaseTimes* times = nullptr;
};

class RoutedStack : public MoeStack {
 public:
  RoutedStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);

  void forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const Route* replay, PhaseTimes* times) final;
  void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx,
                PhaseTimes* times) final;
  const Route& route() const final { return route_; }
  const Route& kept_route() const override { return route_; }
  const MoeStackCounters& counters() const final { return counters_; }
  void reset_counters() final { counters_ = {}; }

 protected:
  // Chooses experts from logits_ into route_. The default is the library's router.
  virtual void choose(const StackCall& call);
  // out [T, H] is written.
  virtual void routed_forward(const StackCall& call, const TensorView& out) = 0;
  // dx [T, H] and d_weights [T, K] are written, expert gradients added to.
  virtual void routed_backward(const StackCall& call, const MoeTensors& gradients, const TensorView& d_out, const TensorView& dx, float* d_weights) = 0;

  RouterInputs router_inputs(const MoeTensors& parameters) const;

  const MoeStackConfig config_;
  Fabric& ep_;
  Stream stream_;
  std::int64_t L_ = 0;
  ExpertPlacement placement_;
  Tensor logits_;  // [T, E]
  Route route_;
  const Route* replay_ = nullptr;  // of the call in work
  MoeStackCounters counters_;

 private:
  Tensor d_weights_, d_logits_;
  bool ready_ = false;  // a forward ran and no backward has used it
};

std::unique_ptr<MoeStack> make_sparse_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);
std::unique_ptr<MoeStack> make_loop_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);
std::unique_ptr<MoeStack> make_padded_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);
std::unique_ptr<MoeStack> make_capacity_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);
std::unique_ptr<MoeStack> make_dense_map_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);
std::unique_ptr<MoeStack> make_block_sparse_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool);

}  // namespace waybill::baselines
