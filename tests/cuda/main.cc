// SPDX-License-Identifier: Apache-2.0
// GoogleTest's main, linked statically into GPU test programs. Without a GPU every test is skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace {

class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "needs a GPU";
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::AddGlobalTestEnvironment(new NeedsGpu);  // owned by GoogleTest
  return RUN_ALL_TESTS();
}
