// SPDX-License-Identifier: Apache-2.0
// GoogleTest's main, linked statically into GPU test programs.
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
