// SPDX-License-Identifier: Apache-2.0
// Dropless by block-sparse matmul: h = SDD(rows, w1), y = DSD(a, w2); da = SDD(dy, w2), dw2 by DDS, dw1 by DDS, d_rows = DSD(dh, w1).
#include "baselines/block_matrix.h"
#include "baselines/permuted_stack.h"

namespace waybill::baselines {
namespace {

class BlockSparseStack final : public PermutedStack {
 public:
  using PermutedStack::PermutedStack;

 private:
  ExpertRows lay_out(std::vector<std::int64_t> counts) const override {
    const BlockTopology topology = make_block_topology(counts, config_.moe.F, config_.block);
    return {std::move(counts), topology.starts, topology.num_rows()};
  }

  std::int64_t parts() const { return config_.moe.inner_width() / config_.moe.F; }
  WeightPanels w1(const MoeTensors& tensors) const { return {tensors.w1, WeightPanels::Axis::kRows, parts()}; }
  WeightPanels w2(const MoeTensors& tensors) const { return {tensors.w2, WeightPanels::Axis::kColumns, 1}; }

  void experts_forward(const StackCall& call, const ExpertRows& layout, const TensorView& rows, const TensorView& y) override {
    topology_ = make_block_topology(layout.counts, config_.moe.F, config_.block);
    const std::int64_t value_rows = topology_.num_blocks() * topology_.block;
    h_.resize(DType::kF32, {value_rows, parts() * topology_.block});
    a_.resize(DType::kF32, {value_rows, topology_.block});
    {
      const PhaseScope scope(call.times, Phase::kExpertGemm);
      block_sdd(topology_, rows, w1(call.parameters), h_, stream_);
    }
    {
      const PhaseScope scope(call.times, Phase::kActivation);
      activation_forward(config_.moe.activation, h_, nullptr, a_, stream_);
    }
    const PhaseScope scope(call.times, Phase::kExpertGemm);
    block_dsd(topology_, a_, w2(call.parameters), y, stream_);
  }

  void experts_backward(const StackCall& call, const MoeTensors& gradients, const ExpertRows& /*layout*/, const TensorView& rows, const TensorView& dy,
                        const TensorView& d_rows) override {
    da_.resize(DType::kF32, {h_.dim(0), topology_.block});
    dh_.resize(DType::kF32, {h_.dim(0), h_.dim(1)});
    {
      const PhaseScope scope(call.times, Phase::kExpertGemm);
      block_sdd(topology_, dy, w2(call.parameters), da_, stream_);
      block_dds(topology_, dy, a_, w2(gradients), stream_);
    }
    {
      const PhaseScope scope(call.times, Phase::kActivation);
      activation_backward(config_.moe.activation, h_, nullptr, da_, dh_, nullptr, stream_);
    }
    const PhaseScope scope(call.times, Phase::kExpertGemm);
    block_dds(topology_, rows, dh_, w1(gradients), stream_);
    block_dsd(topology_, dh_, w1(call.parameters), d_rows, stream_);
  }

  BlockTopology topology_;
  Tensor h_, a_, da_, dh_;  // values of the blocks
};

}  // namespace

std::unique_ptr<MoeStack> make_block_sparse_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  return std::make_unique<BlockSparseStack>(config, ep, pool);
}

}  // namespace waybill::baselines
