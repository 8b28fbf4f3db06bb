// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "fabric/cuda_local/cuda_local_kernels.h"

namespace waybill::cuda {

// Every rank writes a stamp to every peer's window, passes a barrier, checks what it received (errors are counted), passes another.
// window: [P] uint32 a CTA; errors [1] int32 at its own offset. late_rank >= 0: that rank leaves at once (a crash).
void launch_stamp_exchange(const LocalRanks& ranks, std::uint64_t window, std::uint64_t errors, int ctas, int round_key, int late_rank, cudaStream_t stream);

}  // namespace waybill::cuda
