// SPDX-License-Identifier: Apache-2.0
// GoogleTest's main, linked statically into GPU test programs. Without a GPU nothing is run, and that is said as ctest reads it.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  if (!found && !GTEST_FLAG_GET(list_tests)) {
    std::puts("[  SKIPPED ] needs a GPU");
    return 0;
  }
  return RUN_ALL_TESTS();
}
