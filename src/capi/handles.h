// SPDX-License-Identifier: Apache-2.0
// What the opaque handles of waybill_distributed.h hold.
#pragma once

#include <memory>
#include <vector>

#include "convert.h"
#include "waybill/exchange.h"
#include "waybill/fabric.h"

struct wb_fabric {
  std::unique_ptr<waybill::Fabric> fabric;
};

struct wb_group {
  std::vector<std::unique_ptr<wb_fabric>> ranks;
};

struct wb_exchange {
  waybill::Exchange exchange;
  wb_exchange(const waybill::ExchangeConfig& config, waybill::Fabric& fabric) : exchange(config, waybill::block_placement(config.E, fabric.size()), fabric) {}
};

struct wb_dispatch {
  waybill::DispatchHandle handle;
  waybill::Tensor rows;  // [R, H] of the last dispatch
};

namespace waybill::capi {
ExchangeConfig to_exchange_config(const wb_exchange_config* config);
}
