// SPDX-License-Identifier: Apache-2.0
// The router's losses and gradient for automatic differentiation: each loss has a weight in the logits' memory, which need not be known on the
// host when the call is made (a cotangent, a number of tokens summed over devices).
#pragma once

#include "waybill/router.h"

namespace waybill {

// loss_weights: [3] aux, sequence, z; null = 1 each. values [3], in the logits' memory too: the losses times their weights. Otherwise as
// router_losses_into(): a CUDA call queues and returns.
WB_API void router_losses_weighted(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                   const RouterLossInputs& loss_inputs, const float* loss_weights, float* values, Stream stream = {});

// As router_backward() with the coefficients times their weights and loss_scale 1.
WB_API void router_backward_weighted(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                     const float* d_weights, const RouterLossInputs& loss_inputs, const float* loss_weights, const TensorView& d_logits,
                                     Stream stream = {});

}  // namespace waybill
