// SPDX-License-Identifier: Apache-2.0
// Argument checks of the matmuls, shared by every implementation: they run before anything is written.
#pragma once

#include "waybill/grouped_gemm.h"

namespace waybill::detail {

// The sizes that a checked call works with.
struct GroupedShape {
  std::int64_t L = 0, S = 0, N = 0, C = 0;  // S = rows that belong to a group = offsets[L]
};
GroupedShape check(const GroupedGemmArgs& args);
GroupedShape check(const GroupedGemmDgradArgs& args);
GroupedShape check(const GroupedGemmWgradArgs& args);

struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0;
};
GemmShape check(const GemmArgs& args);

}  // namespace waybill::detail
