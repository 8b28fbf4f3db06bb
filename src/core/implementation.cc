// SPDX-License-Identifier: Apache-2.0
#include "core/implementation.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "waybill/log.h"

namespace waybill {
namespace {

// Every op that has a list of implementations.
constexpr std::array<std::string_view, 6> kOps{"activation", "gemm", "gemm_activation", "quantize", "quantize_activated", "router"};

}  // namespace

std::string forced_implementation(const char* op) {
  const char* value = std::getenv("WB_FORCE");
  if (value == nullptr) return {};
  std::string_view rest = value;
  std::string forced;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t colon = item.find(':');
    WB_CHECK(colon != std::string_view::npos, "WB_FORCE holds '{}', expected <op>:<implementation>", item);
    const std::string_view name = item.substr(0, colon);
    WB_CHECK(std::find(kOps.begin(), kOps.end(), name) != kOps.end(), "WB_FORCE names op '{}', known are {}", name, fmt::join(kOps, ", "));
    if (name == op && forced.empty()) forced = item.substr(colon + 1);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  return forced;
}

bool selection_is_logged() {
  static const bool is_logged = [] {
    const char* value = std::getenv("WB_LOG");
    return value != nullptr && std::string_view(value).find("select") != std::string_view::npos;
  }();
  return is_logged;
}

void log_selection(const char* op, const char* name, const std::string& refusals) {
  log(LogLevel::kInfo, fmt::format("select {}: {}{}{}", op, name, refusals.empty() ? "" : "; refused: ", refusals));
}

}  // namespace waybill
