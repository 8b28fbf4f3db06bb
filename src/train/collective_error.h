// SPDX-License-Identifier: Apache-2.0
// Runs a local step on every rank and lets all ranks fail together: the lowest failing rank's error is thrown on each of them, after
// all have stopped, so that rank 0 may clean up. Its text begins with "rank N: ", unless every rank says the same.
#pragma once

#include <functional>

#include "waybill/fabric.h"

namespace waybill {

// Collective. on_failure runs on rank 0 after every rank has ended `body`, before the throw.
void run_together(Fabric& world, const char* phase, const std::function<void()>& body, const std::function<void()>& on_failure = {});

}  // namespace waybill
