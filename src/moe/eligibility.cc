// SPDX-License-Identifier: Apache-2.0
#include "moe/eligibility.h"

#include <array>
#include <string_view>

namespace waybill {
namespace {

struct Reason {
  std::uint32_t bit;
  const char* text;
};
constexpr std::array<Reason, 6> kReasons{{
    {kDenseMapDuplicateIds, "a row of the replayed routes names an expert twice"},
    {kDenseMapForced, "force_dense_map is set"},
    {kDenseMapTopK, "K is above the limit of compact plans"},
    {kDenseMapFabric, "the fabric engine has no compact exchange"},
    {kDenseMapPadToCapacity, "experts are padded to their capacity"},
    {kDenseMapCallerMap, "the caller gave a dense map"},
}};

}  // namespace

std::string describe_dense_map(std::uint32_t reasons) {
  std::string text;
  for (const Reason& reason : kReasons) {
    if ((reasons & reason.bit) == 0) continue;
    if (!text.empty()) text += "; ";
    text += reason.text;
  }
  return text.empty() ? "compact routes are legal" : text;
}

namespace moe {

std::uint32_t static_dense_reasons(const MoeConfig& config, const Fabric& ep) {
  // Engines that carry the variable all-to-all of compact rows. A new engine is added here once its exchange tests pass.
  constexpr std::array<std::string_view, 3> kCompactEngines{"single", "threads", "mpi"};
  std::uint32_t reasons = kDenseMapNone;
  if (config.force_dense_map) reasons |= kDenseMapForced;
  if (config.pad_to_capacity) reasons |= kDenseMapPadToCapacity;
  if (config.K * config.expert_tensor_parallel > kMaxCompactK) reasons |= kDenseMapTopK;
  bool compact_engine = false;
  for (const std::string_view name : kCompactEngines) compact_engine |= name == ep.engine();
  if (!compact_engine) reasons |= kDenseMapFabric;
  return reasons;
}

bool has_duplicate_ids(const RouteView& route) {
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 1; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      if (id < 0) continue;
      for (std::int64_t j = 0; j < k; ++j) {
        if (route.id(t, j) == id) return true;
      }
    }
  }
  return false;
}

}  // namespace moe
}  // namespace waybill
