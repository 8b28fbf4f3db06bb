// SPDX-License-Identifier: Apache-2.0
// For ranks in processes of their own: DeviceExchange itself asks no other rank.
#pragma once

#include "waybill/exchange.h"

namespace waybill::cuda {

// Collective, before DeviceExchange is made: refuses, on every rank and with both values, a group whose ranks were given different configs or
// placements.
void check_group_config(Fabric& fabric, const ExchangeConfig& config, const ExpertPlacement& placement);

}  // namespace waybill::cuda
