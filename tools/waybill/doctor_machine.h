// SPDX-License-Identifier: Apache-2.0
// What `waybill doctor` finds out about the machine. Reads files and asks programs for their versions; changes nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace waybill::cli {

enum class Verdict : std::uint8_t { kOk, kNote, kProblem };

// One line of the doctor: what was looked at, what was found, what that means and how to mend it.
struct Finding {
  Verdict verdict = Verdict::kOk;
  std::string topic, found, advice;
};

std::string cpu_name();                             // "model name" of /proc/cpuinfo
std::string simd_level();                           // best instruction set the CPU kernels can use here: "avx512f", "avx2" or "portable"
std::int64_t memory_bytes(const std::string& key);  // a line of /proc/meminfo, e.g. "MemAvailable"; 0 where unknown
// First output line of a command, "" where it fails. The command is one of this file's constants, never user input.
std::string first_line_of(const std::string& command);
std::vector<Finding> examine_machine();

}  // namespace waybill::cli
