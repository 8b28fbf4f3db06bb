// SPDX-License-Identifier: Apache-2.0
#include "waybill/grouped_gemm.h"

#include "ops/gemm/gemm_ref.h"
#include "ops/gemm/grouped_gemm_checks.h"

namespace waybill {

void grouped_gemm(const GroupedGemmArgs& args, Stream) {
  detail::check(args);
  grouped_gemm_ref(args);
}

void grouped_gemm_dgrad(const GroupedGemmDgradArgs& args, Stream) {
  detail::check(args);
  grouped_gemm_dgrad_ref(args);
}

void grouped_gemm_wgrad(const GroupedGemmWgradArgs& args, Stream) {
  detail::check(args);
  grouped_gemm_wgrad_ref(args);
}

void gemm(const GemmArgs& args, Stream) {
  detail::check(args);
  gemm_ref(args);
}

}  // namespace waybill
