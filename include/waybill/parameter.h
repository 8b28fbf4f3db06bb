// SPDX-License-Identifier: Apache-2.0
// One named parameter of a rank, with its gradient: what the optimizer, the gradient reduction and checkpoints work on.
#pragma once

#include <cstdint>
#include <string>

#include "waybill/tensor.h"

namespace waybill {

struct Parameter {
  std::string name;                                // replicated: "layers.0.attention.wq"; experts: "layers.0.moe.w1" holding experts [expert_begin, +L)
  Tensor value, grad;                              // fp32; grad is null where not trainable
  bool is_expert = false;                          // dimension 0 is local experts; gradients are reduced over the D replicas only
  bool decay = false;                              // weight decay applies (matrices)
  bool trainable = true;                           // false: state that is saved but has no gradient (router bias)
  std::int64_t expert_begin = 0, num_experts = 0;  // experts: first global id on this rank, experts in the layer
  int layer = -1;
};

}  // namespace waybill
