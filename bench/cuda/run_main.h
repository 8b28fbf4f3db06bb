// SPDX-License-Identifier: Apache-2.0
// What main() of a CUDA benchmark does: runs it, and says in one line why it cannot (exit code 2; 1 is a result that did not match).
#pragma once

#include <cstdio>
#include <exception>

namespace waybill::cuda {

using BenchMain = int (*)(int argc, char** argv);

inline int run_main(const char* name, BenchMain bench, int argc, char** argv) {
  try {
    return bench(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 2;
  }
}

}  // namespace waybill::cuda
