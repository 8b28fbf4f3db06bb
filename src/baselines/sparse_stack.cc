// SPDX-License-Identifier: Apache-2.0
// The library's own layer behind the stacks' interface.
#include "baselines/routed_stack.h"

namespace waybill::baselines {
namespace {

class SparseStack final : public MoeStack {
 public:
  SparseStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) : layer_(config.moe, ep, ep, pool) {}

  void forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const Route* replay, PhaseTimes* times) override {
    MoeForwardOptions options;
    options.replay = replay;
    layer_.forward(parameters, x, out, step_, options, times);
    const std::int64_t routes = step_.route.T() * step_.route.K();
    counters_.slots_visited += 2 * routes + 3 * step_.slots;  // plan: count and place; layout: count and place; the sum over slots
    if (replay == nullptr) counters_.scores_visited += step_.route.T() * step_.route.E();
    counters_.real_rows += step_.slots;
    counters_.computed_rows += step_.slots;
    count_bytes();
  }
  void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx,
                PhaseTimes* times) override {
    layer_.backward(parameters, gradients, x, d_out, dx, step_, 1.0f, times);
    counters_.slots_visited += step_.route.T() * step_.route.K() + 2 * step_.slots;  // the sum over slots, values out and home
    count_bytes();
  }
  const Route& route() const override { return step_.route; }
  const Route& kept_route() const override { return step_.route; }
  const MoeStackCounters& counters() const override { return counters_; }
  void reset_counters() override {
    counters_ = {};
    base_ = layer_.bytes();
  }

 private:
  void count_bytes() {
    counters_.bytes = layer_.bytes();
    counters_.bytes -= base_;
  }

  MoeLayer layer_;
  MoeStep step_;
  MoeStackCounters counters_;
  ExchangeBytes base_;
};

}  // namespace

std::unique_ptr<MoeStack> make_sparse_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  return std::make_unique<SparseStack>(config, ep, pool);
}

}  // namespace waybill::baselines
