// SPDX-License-Identifier: Apache-2.0
// Where Buffer reports its allocations for AllocationTrace.
#pragma once

#include <cstddef>

namespace waybill::detail {

// Called after each successful Buffer allocation. One relaxed atomic load when nobody traces.
void note_allocation(std::size_t bytes);

}  // namespace waybill::detail
