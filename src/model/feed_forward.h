// SPDX-License-Identifier: Apache-2.0
// x_out = x_mid + feed_forward(norm(x_mid)), dense SwiGLU or MoE, and its backward.
#pragma once

#include <memory>

#include "model/parameters.h"

namespace waybill::model {

struct FeedForwardSaved {
  std::vector<float> rstd;  // [T]
  Tensor h;                 // dense: [T, 2F] before the activation
  MoeStep moe;
};

struct FeedForwardScratch {
  Tensor normed, d_normed;  // [T, H]
  Tensor out;               // MoE: [T, H]
  Tensor a, da, dh;         // dense: [T, F], [T, F], [T, 2F]
};

class FeedForward {
 public:
  // ep: the layer's expert-parallel group; unused by dense layers.
  FeedForward(const ModelConfig& config, const LayerConfig& layer, ParameterList& list, const FeedForwardParameters& at, Fabric* ep, Fabric& world,
              ThreadPool* pool);

  bool is_moe() const { return moe_ != nullptr; }
  MoeLayer& moe() { return *moe_; }

  // x_mid, x_out [T, H]; x_out is written. options: MoE only. Collective where MoE.
  void forward(const TensorView& x_mid, const TensorView& x_out, FeedForwardSaved& saved, FeedForwardScratch& scratch, const MoeForwardOptions& options,
               PhaseTimes* times);
  // d: gradient of x_out on entry, of x_mid on return. Parameter gradients are added to.
  void backward(const TensorView& x_mid, const TensorView& d, FeedForwardSaved& saved, FeedForwardScratch& scratch, PhaseTimes* times);

 private:
  TensorView value(int index) const { return list_.parameters[static_cast<std::size_t>(index)].value; }
  TensorView grad(int index) const { return list_.parameters[static_cast<std::size_t>(index)].grad; }

  const ModelConfig& config_;
  std::int64_t dense_F_ = 0;
  ParameterList& list_;
  FeedForwardParameters at_;
  Stream stream_;
  std::unique_ptr<MoeLayer> moe_;
};

}  // namespace waybill::model
