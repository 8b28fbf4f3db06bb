// SPDX-License-Identifier: Apache-2.0
// Runs the same tests on every process; the process's exit code is its own result, so one failing rank fails the launcher.
#include <gtest/gtest.h>

#include "fabric/mpi/world.h"

namespace waybill::testing {
Fabric* g_world = nullptr;
}

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::unique_ptr<waybill::Fabric> world = waybill::make_mpi_fabric({.fabric = {.timeout = std::chrono::milliseconds(20000)}});
  waybill::testing::g_world = world.get();
  if (world->rank() != 0) {
    ::testing::TestEventListeners& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
  }
  const int result = RUN_ALL_TESTS();
  std::int64_t failures = result == 0 ? 0 : 1;
  world->all_reduce(std::span<std::int64_t>(&failures, 1), waybill::ReduceOp::kSum, "results");
  if (failures > 0 && world->rank() == 0) std::fprintf(stderr, "%ld rank(s) failed\n", static_cast<long>(failures));
  return failures == 0 ? 0 : 1;
}
