// SPDX-License-Identifier: Apache-2.0
// A self-test of the engine: seconds, no files, no network. Each check says what was wrong, with the values.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace waybill::cli {

struct SelfCheck {
  std::string name;
  std::function<void()> body;  // throws with the reason when it fails
};

struct SelfCheckResult {
  std::string name, failure;  // failure "" = passed
  double seconds = 0;
};

std::vector<SelfCheck> engine_self_checks();
std::vector<SelfCheckResult> run_self_checks(const std::vector<SelfCheck>& checks);
// 0 when every check passed and there was one, else 1.
int self_check_exit_code(const std::vector<SelfCheckResult>& results);

}  // namespace waybill::cli
