// SPDX-License-Identifier: Apache-2.0
// The shortest correct AdamW, in double: what optimizer.cc is compared with.
#pragma once

#include "waybill/optimizer.h"

namespace waybill::ref {

void adamw(const OptimizerConfig& config, double learning_rate, double gradient_scale, std::int64_t step, bool decay, std::int64_t count, const float* grad,
           double* value, double* m, double* v);

}  // namespace waybill::ref
