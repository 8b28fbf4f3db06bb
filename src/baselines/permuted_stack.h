// SPDX-License-Identifier: Apache-2.0
// Designs that send a copy of a row per expert, compute on contiguous rows of each expert, and add weighted results at the source.
// They differ in how the rows of an expert are laid out and multiplied.
#pragma once

#include "baselines/routed_stack.h"
#include "baselines/slot_exchange.h"

namespace waybill::baselines {

// Where the rows of each local expert stand in the buffers of a rank.
struct ExpertRows {
  std::vector<std::int64_t> counts;  // [L] received rows
  std::vector<std::int64_t> starts;  // [L] first row
  std::int64_t total = 0;            // rows of the buffers, padding included
};

class PermutedStack : public RoutedStack {
 public:
  PermutedStack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) : RoutedStack(config, ep, pool), exchange_(placement_, ep, stream_) {}

 protected:
  // The routes that are sent: all of them, or what a capacity leaves. pad_rows: see SlotExchange::plan.
  virtual const RouteView& routes_to_send(std::int64_t& /*pad_rows*/) { return route_.view(); }
  virtual ExpertRows lay_out(std::vector<std::int64_t> counts) const = 0;
  // y [total, H] = experts of rows [total, H]. What backward needs is kept.
  virtual void experts_forward(const StackCall& call, const ExpertRows& layout, const TensorView& rows, const TensorView& y) = 0;
  // d_rows [total, H]; gradients of w1 and w2 are added to. dy is 0 at padding rows.
  virtual void experts_backward(const StackCall& call, const MoeTensors& gradients, const ExpertRows& layout, const TensorView& rows, const TensorView& dy,
                                const TensorView& d_rows) = 0;

  void routed_forward(const StackCall& call, const TensorView& out) final;
  void routed_backward(const StackCall& call, const MoeTensors& gradients, const TensorView& d_out, const TensorView& dx, float* d_weights) final;

 private:
  void gather(const TensorView& from, bool weighted, const TensorView& sent);
  void index_add(const TensorView& sent, bool weighted, const TensorView& out);

  SlotExchange exchange_;
  ExpertRows layout_;
  std::vector<float> sent_weight_;  // [num_sent]
  Tensor sent_, results_;           // [num_sent, H]: scratch, and the experts' results of the last forward
  Tensor rows_, y_;                 // [total, H]: received rows, kept for backward, and scratch
};

// One row of an expert after the other, no gaps.
ExpertRows tight_rows(std::vector<std::int64_t> counts);

}  // namespace waybill::baselines
