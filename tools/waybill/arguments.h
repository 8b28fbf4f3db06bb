// SPDX-License-Identifier: Apache-2.0
// Checks of the command line that CLI11 lacks. A refusal names the value and what is allowed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace waybill::cli {

// An integer from `least`, of at most 19 digits: what a wrapped -1 or a fraction would hide is refused.
CLI::Validator at_least(std::int64_t least);

// "unknown command trian; did you mean train?" where the arguments name a command that `app` or one of its commands does not have; else
// empty.
std::string unknown_command(const CLI::App& app, int argc, const char* const* argv);

// Refuses a file that could not be written later; "" and "-" are fine. Nothing is changed.
void check_writable(const std::string& path, const std::string& option);

}  // namespace waybill::cli
