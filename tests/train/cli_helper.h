// SPDX-License-Identifier: Apache-2.0
// The command as a user meets it: exit code, text, and what is left on disk.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>

#include "run_helper.h"

namespace waybill::test {

struct Outcome {
  int code = -1;
  std::string text;  // stdout and stderr
};

inline Outcome run_shell(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  char part[4096];
  for (std::size_t n; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) outcome.text.append(part, n);
  outcome.code = WEXITSTATUS(pclose(pipe));
  return outcome;
}

class CliTest : public testing::Test {
 protected:
  RunFolder folder_;
  std::string golden_ = std::string(WAYBILL_CONFIG_DIR) + "/golden.toml";
  std::string base_ = std::string(WAYBILL_BINARY) + " train " + golden_ + " --text " + folder_.text() + " ";

  // Exit code 2, one line that holds `part`, and no run folder.
  void expect_refused(const std::string& command, const std::string& part) {
    SCOPED_TRACE(command);
    const Outcome outcome = run_shell(command);
    EXPECT_EQ(outcome.code, 2) << outcome.text;
    EXPECT_THAT(outcome.text, testing::HasSubstr(part));
    EXPECT_EQ(std::count(outcome.text.begin(), outcome.text.end(), '\n'), 1) << outcome.text;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "r"));
  }
};

}  // namespace waybill::test
