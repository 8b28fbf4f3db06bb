// SPDX-License-Identifier: Apache-2.0
// The bench command inside a test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "commands.h"
#include "waybill/error.h"

namespace waybill::cli {

// What `waybill ARGUMENTS` prints.
inline std::string run_bench(std::vector<std::string> arguments) {
  CLI::App app{"test", "waybill"};
  register_bench_command(app);
  std::reverse(arguments.begin(), arguments.end());
  ::testing::internal::CaptureStdout();
  try {
    app.parse(arguments);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace waybill::cli
