// SPDX-License-Identifier: Apache-2.0
// run_ranks() for engines that are built on the threads engine.
#pragma once

#include "fabric/threads/hub.h"

namespace waybill::threads {

void run_ranks(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options, CopyBytes copy);

}  // namespace waybill::threads
