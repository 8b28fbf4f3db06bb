// SPDX-License-Identifier: Apache-2.0
// Launchers of the plan from dense maps, one a file; see DeviceExchange::plan_map(). Correct for any map, and as costly as it sounds.
#pragma once

#include "exchange/cuda/exchange_kernels.h"
#include "exchange/cuda/map_windows.h"

namespace waybill::cuda {

// What a rank brings; `call` of ExchangeParams has room for one: a: ids [T, K] or null, b: weights [T, K], c: cells [T, E] f32 where ids are null,
// d: [1] slots that the rank pads each expert to, or null.
void launch_map_push(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream);
void launch_map_count(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream);
void launch_map_scan(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream);
void launch_map_fill(const ExchangeParams& q, const MapWindows& map, cudaStream_t stream);
// b: cells [T, E] bytes of the forward, c: d_map [T, E] f32. ctas a rank, resident together.
void launch_map_values(const ExchangeParams& q, int ctas, cudaStream_t stream);
const void* map_values_kernel();
// a: ids [T, K], b: d_map [T, E], c: d_weights [T, K].
void launch_map_routes(const ExchangeParams& q, cudaStream_t stream);

}  // namespace waybill::cuda
