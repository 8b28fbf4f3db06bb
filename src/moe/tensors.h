// SPDX-License-Identifier: Apache-2.0
// Checks of a layer's tensors and small views over plain vectors.
#pragma once

#include <string_view>

#include "waybill/moe.h"

namespace waybill::moe {

// Every tensor the configuration asks for is there with its shape, fp32, contiguous, on the CPU; none is there that it does not
// use. `what` is "parameter" or "gradient"; gradients have no router_bias.
void check_tensors(const MoeConfig& config, std::int64_t L, const MoeTensors& tensors, std::string_view what);

// A [T, H] fp32 contiguous activation of the caller.
void check_activations(const TensorView& view, std::int64_t T, std::int64_t H, std::string_view name);

}  // namespace waybill::moe
