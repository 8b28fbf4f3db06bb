// SPDX-License-Identifier: Apache-2.0
#include "waybill/build_info.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "waybill/error.h"
#include "waybill/version.h"

namespace waybill {
namespace {

std::string compiler_name() {
#if defined(__clang__)
  return fmt::format("clang++ {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#elif defined(__GNUC__)
  return fmt::format("g++ {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#else
  return "unknown compiler";
#endif
}

// Splits a list that the build passes as "a;b;c" or "a,b,c".
std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> items;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(";,"), text.size());
    if (end > 0) items.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return items;
}

BuildInfo make_build_info() {
  BuildInfo info;
  info.version = WB_VERSION_STRING;
  info.compiler = compiler_name();
#if defined(NDEBUG)
  info.build_type = "release";
#else
  info.build_type = "debug";
#endif
  info.cpu_isas = {"portable"};
#if defined(__x86_64__)
  info.cpu_isas.insert(info.cpu_isas.end(), {"avx2", "avx512f"});
#endif
  info.features = {"fabric:threads"};
#if defined(WAYBILL_CUDA_ARCHS)
  info.cuda_archs = split_list(WAYBILL_CUDA_ARCHS);
  info.features.emplace_back("cuda");
#else
  info.cuda_archs = split_list("");
#endif
#if defined(__SANITIZE_ADDRESS__)
  info.features.emplace_back("sanitizer:address");
#endif
#if defined(__SANITIZE_THREAD__)
  info.features.emplace_back("sanitizer:thread");
#endif
  return info;
}

}  // namespace

const BuildInfo& build_info() {
  static const BuildInfo info = make_build_info();
  return info;
}

std::string describe(const BuildInfo& info) {
  return fmt::format("waybill {} ({}, {}; cpu: {}; cuda archs: {}; features: {})", info.version, info.compiler, info.build_type, fmt::join(info.cpu_isas, " "),
                     info.cuda_archs.empty() ? "none" : fmt::format("{}", fmt::join(info.cuda_archs, " ")), fmt::join(info.features, " "));
}

void check_component_version(std::string_view component, std::string_view component_version) {
  if (component_version == WB_VERSION_STRING) return;
  WB_FAIL(ErrorCode::kUnsupported, "{} is of version {}, the waybill library of version {}; build both from one release", component, component_version,
          WB_VERSION_STRING);
}

}  // namespace waybill
