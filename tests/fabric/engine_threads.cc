// SPDX-License-Identifier: Apache-2.0
#include "fabric/engine.h"

namespace waybill {

const char* engine_name() { return "threads"; }
void run_engine(int P, const std::function<void(Fabric&)>& body, const FabricOptions& options) { run_ranks(P, body, options); }

}  // namespace waybill
