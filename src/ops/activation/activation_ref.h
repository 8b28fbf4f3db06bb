// SPDX-License-Identifier: Apache-2.0
// The shortest correct loops, fp64 maths. Arguments are checked by the caller.
#pragma once

#include "waybill/activation.h"

namespace waybill {

WB_API void activation_forward_ref(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& a);
WB_API void activation_backward_ref(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& da, const TensorView& dh,
                                    float* d_weight);

}  // namespace waybill
