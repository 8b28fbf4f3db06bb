// SPDX-License-Identifier: Apache-2.0
// The shortest correct loops, fp64 accumulation. They share only types with the fast path; arguments are checked by the caller.
#pragma once

#include "waybill/grouped_gemm.h"

namespace waybill {

WB_API void grouped_gemm_ref(const GroupedGemmArgs& args);
WB_API void grouped_gemm_dgrad_ref(const GroupedGemmDgradArgs& args);
WB_API void grouped_gemm_wgrad_ref(const GroupedGemmWgradArgs& args);
WB_API void gemm_ref(const GemmArgs& args);

}  // namespace waybill
