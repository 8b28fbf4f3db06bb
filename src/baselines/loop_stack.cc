// SPDX-License-Identifier: Apache-2.0
// One matmul after the other, one leaf tensor per expert: no grouped call, no padding.
#include "baselines/permuted_stack.h"
#include "waybill/grouped_gemm.h"

namespace waybill::baselines {
namespace {

// The tensor of one expert, as a module of its own would hold it.
TensorView leaf(const TensorView& weights, std::int64_t expert) {
  const std::int64_t rows = weights.shape[1], columns = weights.shape[2];
  return TensorView::of(weights.as<float>() + expert * rows * columns, {rows, columns});
}

class LoopStack final : public PermutedStack {
 public:
  using PermutedStack::PermutedStack;

 private:
  ExpertRows lay_out(std::vector<std::int64_t> counts) const override { return tight_rows(std::move(counts)); }

  template <class Body>
  void for_each_expert(const ExpertRows& layout, const Body& body) const {
    for (std::size_t e = 0; e < layout.counts.size(); ++e) {
      if (layout.counts[e] > 0) body(static_cast<std::int64_t>(e), layout.starts[e], layout.starts[e] + layout.counts[e]);
    }
  }

  void experts_forward(const StackCall& call, const ExpertRows& layout, const TensorView& rows, const TensorView& y) override {
    h_.resize(DType::kF32, {layout.total, config_.moe.inner_width()});
    a_.resize(DType::kF32, {layout.total, config_.moe.F});
    for_each_expert(layout, [&](std::int64_t e, std::int64_t begin, std::int64_t end) {
      const TensorView h = h_.view().rows(begin, end), a = a_.view().rows(begin, end);
      {
        const PhaseScope scope(call.times, Phase::kExpertGemm);
        gemm({.a = rows.rows(begin, end), .b = leaf(call.parameters.w1, e), .c = h, .transpose_b = true}, stream_);
      }
      {
        const PhaseScope scope(call.times, Phase::kActivation);
        activation_forward(config_.moe.activation, h, nullptr, a, stream_);
      }
      const PhaseScope scope(call.times, Phase::kExpertGemm);
      gemm({.a = a, .b = leaf(call.parameters.w2, e), .c = y.rows(begin, end), .transpose_b = true}, stream_);
    });
  }

  void experts_backward(const StackCall& call, const MoeTensors& gradients, const ExpertRows& layout, const TensorView& rows, const TensorView& dy,
                        const TensorView& d_rows) override {
    da_.resize(DType::kF32, {layout.total, config_.moe.F});
    dh_.resize(DType::kF32, {layout.total, config_.moe.inner_width()});
    for_each_expert(layout, [&](std::int64_t e, std::int64_t begin, std::int64_t end) {
      const TensorView dy_e = dy.rows(begin, end), da = da_.view().rows(begin, end), dh = dh_.view().rows(begin, end);
      {
        const PhaseScope scope(call.times, Phase::kExpertGemm);
        gemm({.a = dy_e, .b = leaf(call.parameters.w2, e), .c = da}, stream_);
        gemm({.a = dy_e, .b = a_.view().rows(begin, end), .c = leaf(gradients.w2, e), .transpose_a = true, .accumulate = true}, stream_);
      }
      {
        const PhaseScope scope(call.times, Phase::kActivation);
        activation_backward(config_.moe.activation, h_.view().rows(begin, end), nullptr, da, dh, nullptr, stream_);
      }
      const PhaseScope scope(call.times, Phase::kExpertGemm);
      gemm({.a = dh, .b = rows.rows(begin, end), .c = leaf(gradients.w1, e), .transpose_a = true, .accumulate = true}, stream_);
      gemm({.a = dh, .b = leaf(call.parameters.w1, e), .c = d_rows.rows(begin, end)}, stream_);
    });
  }

  Tensor h_, a_, da_, dh_;
};

}  // namespace

std::unique_ptr<MoeStack> make_loop_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) { return std::make_unique<LoopStack>(config, ep, pool); }

}  // namespace waybill::baselines
