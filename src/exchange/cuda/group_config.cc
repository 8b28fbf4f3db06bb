// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/group_config.h"

#include "exchange/impl.h"

namespace waybill::cuda {

void check_group_config(Fabric& fabric, const ExchangeConfig& config, const ExpertPlacement& placement) {
  compare_configs(fabric, config, placement, NodeMap(fabric.topology()));
}

}  // namespace waybill::cuda
