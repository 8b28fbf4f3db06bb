// SPDX-License-Identifier: Apache-2.0
// The fabric's interface tests (tests/fabric) on the mpi engine: groups of the first P processes. Sizes beyond the launcher's number are left
// out, so that the run with 8 processes takes most.
#include "fabric/engine.h"
#include "fabric/mpi/world.h"

namespace waybill {

const char* engine_name() { return "mpi"; }
void run_engine(int P, const std::function<void(Fabric&)>& body, const FabricOptions&) {
  Fabric& world = *testing::g_world;
  if (P > world.size()) return;
  if (const auto group = world.split(world.rank() < P ? 0 : -1, 0, "engine")) body(*group);
  world.barrier("engine");
}

}  // namespace waybill
