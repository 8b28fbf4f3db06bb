// SPDX-License-Identifier: Apache-2.0
// The engine that the interface tests run on: each test program links one definition.
#pragma once

#include "waybill/fabric.h"

namespace waybill {

const char* engine_name();
// As run_ranks().
void run_engine(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options = {});

}  // namespace waybill
