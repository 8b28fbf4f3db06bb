// SPDX-License-Identifier: Apache-2.0
#include "model_flops.h"

#include "waybill/model_math.h"

namespace waybill {

double model_flops_per_token(const ModelConfig& model) {
  double sum = 0;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    ModelConfig one = model;
    one.layers = {model.layers[i]};
    const TokenFlops flops = flops_per_token(architecture_of(one));
    sum += flops.linear + flops.attention + (i == 0 ? flops.head : 0);
  }
  return sum;
}

}  // namespace waybill
