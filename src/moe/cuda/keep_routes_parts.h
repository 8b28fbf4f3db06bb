// SPDX-License-Identifier: Apache-2.0
// The steps of launch_keep_routes() before the placing (keep_routes.cu says what they are for). places [segments, E] i32.
#pragma once

#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {

// places: routes of each segment and expert, into cleared memory. T > 0.
void launch_keep_routes_count(const KeepRoutes& args, cudaStream_t stream);
// places become the routes of the expert before the segment; the capacity, and what is dropped, to args.dropped.
void launch_keep_routes_sum(const KeepRoutes& args, cudaStream_t stream);

}  // namespace waybill::cuda
