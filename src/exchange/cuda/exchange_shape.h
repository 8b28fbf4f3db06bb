// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "exchange/cuda/device_exchange.h"

namespace waybill::cuda {

// Throws for what the GPU exchange cannot do; see DeviceExchange.
void check_device_config(const ExchangeConfig& config, int P, const MapRoom& map = {});

// Sizes; windows, handle parts and tables are not set.
ExchangeShape make_shape(const ExchangeConfig& config, int P, const MapRoom& map = {});

struct WindowSize {
  const char* name;
  std::uint64_t* offset;  // where it is kept
  std::int64_t bytes;
};
std::vector<WindowSize> window_sizes(const ExchangeShape& shape, ExchangeWindows& windows);

// Sets the parts of a handle; returns its bytes.
std::size_t lay_out_handle(ExchangeShape& shape);

}  // namespace waybill::cuda
