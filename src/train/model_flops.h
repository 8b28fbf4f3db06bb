// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "waybill/language_model.h"

namespace waybill {

// Operations per token, forward and backward, by the formula of flops_per_token(); layers may differ.
double model_flops_per_token(const ModelConfig& model);

}  // namespace waybill
