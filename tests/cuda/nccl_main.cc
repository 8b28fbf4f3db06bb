// SPDX-License-Identifier: Apache-2.0
// GoogleTest's main for tests that fork: CUDA must not start in this process. --check-nccl: only says whether the NCCL library that would be
// loaded is the one this program was built for (exit code 0).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "fabric/nccl/nccl_library.h"

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--check-nccl") == 0) {
    try {
      std::printf("NCCL %s\n", waybill::cuda::nccl_version_text(waybill::cuda::nccl_library().version).c_str());
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
