// SPDX-License-Identifier: Apache-2.0
// x_mid = x + attention(norm(x)) wo^T, and its backward.
#pragma once

#include "model/parameters.h"
#include "ops/model/attention.h"
#include "ops/model/rope.h"

namespace waybill::model {

// What one layer's attention keeps for backward. The block's input x is kept by the caller; norm(x) is computed again.
struct AttentionSaved {
  Tensor q, k, v;                     // after norm and rotation: [T, heads, D]
  Tensor q_raw, k_raw;                // before, only with qk_norm
  Tensor o;                           // [T, num_heads, D]
  std::vector<float> lse;             // [B, num_heads, seq_len]
  std::vector<float> rstd;            // [T]
  std::vector<float> q_rstd, k_rstd;  // [T * heads], only with qk_norm
};

// Scratch of a rank, shared by all layers.
struct AttentionScratch {
  Tensor normed, d_normed;  // [T, H]
  Tensor d_o, dq, dk, dv;
};

class AttentionBlock {
 public:
  AttentionBlock(const ModelConfig& config, ParameterList& list, const AttentionParameters& at, const RopeTable& rope, Stream stream)
      : config_(config), list_(list), at_(at), rope_(rope), stream_(stream) {}

  // x, x_mid [B * seq_len, H]; x_mid is written.
  void forward(std::int64_t B, std::int64_t seq_len, const TensorView& x, const TensorView& x_mid, AttentionSaved& saved, AttentionScratch& scratch) const;
  // d: gradient of x_mid on entry, of x on return. Parameter gradients are added to.
  void backward(std::int64_t B, std::int64_t seq_len, const TensorView& x, const TensorView& d, AttentionSaved& saved, AttentionScratch& scratch) const;

 private:
  TensorView value(int index) const { return list_.parameters[static_cast<std::size_t>(index)].value; }
  TensorView grad(int index) const { return list_.parameters[static_cast<std::size_t>(index)].grad; }
  AttentionDims dims(std::int64_t B, std::int64_t seq_len) const { return {B, seq_len, config_.num_heads, config_.num_kv_heads, config_.head_dim}; }

  const ModelConfig& config_;
  ParameterList& list_;
  const AttentionParameters& at_;
  const RopeTable& rope_;
  Stream stream_;
};

}  // namespace waybill::model
