// SPDX-License-Identifier: Apache-2.0
// Sizes of one layer's parts that parameter counts, operation counts and memory share.
#pragma once

#include "waybill/model_math.h"

namespace waybill::model {

std::int64_t attention_parameters(const ArchitectureConfig& c);
std::int64_t delta_net_matrices(const ArchitectureConfig& c);
std::int64_t delta_net_convolution(const ArchitectureConfig& c);
std::int64_t matrices(const LayerShape& layer);                                // of one expert
std::int64_t row_width(const ArchitectureConfig& c, const LayerShape& layer);  // of the rows experts see
std::int64_t expert_parameters(const ArchitectureConfig& c, const LayerShape& layer);

}  // namespace waybill::model
