// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "waybill/grouped_gemm.h"

namespace waybill::detail {

// The d_bias part of grouped_gemm_wgrad: fp32, rows of a group in ascending order, added once to d_bias when accumulating.
void bias_grad(const GroupedGemmWgradArgs& args, ThreadPool* pool);

}  // namespace waybill::detail
