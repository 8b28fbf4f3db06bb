// SPDX-License-Identifier: Apache-2.0
// What this library was built with, and the check that its parts and the caller's headers are of one version.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "waybill/export.h"

namespace waybill {

struct BuildInfo {
  std::string version;                  // "0.1.0"
  std::string compiler;                 // "g++ 12.2.0"
  std::string build_type;               // "release" or "debug" (assertions on)
  std::vector<std::string> cpu_isas;    // instruction sets with own kernels, portable first
  std::vector<std::string> cuda_archs;  // "sm_90a", ...; empty without CUDA
  std::vector<std::string> features;    // "cuda", "sanitizer:address", ...
};
WB_API const BuildInfo& build_info();

// One line for logs and bug reports: "waybill 0.1.0 (g++ 12.2.0, release; cpu: ...; cuda archs: none; features: ...)".
WB_API std::string describe(const BuildInfo& info);

// Refuses a part (caller's headers, device library, plug-in) of another version: kUnsupported naming the part and both versions.
WB_API void check_component_version(std::string_view component, std::string_view component_version);

}  // namespace waybill
