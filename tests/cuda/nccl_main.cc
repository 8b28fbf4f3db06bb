// SPDX-License-Identifier: Apache-2.0
// GoogleTest's main for tests that fork: CUDA must not start in this process.
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
