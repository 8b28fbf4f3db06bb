// SPDX-License-Identifier: Apache-2.0
// What a batch of routes looks like: load per expert and per rank. For people and metrics; no hot path reads it.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/route.h"

namespace waybill {

struct HotExpert {
  std::int64_t expert = 0, count = 0;
};

struct RouteStats {
  std::int64_t T = 0, K = 0, E = 0;
  int P = 1;
  std::int64_t num_routes = 0;        // valid (token, expert) pairs
  std::int64_t num_empty_tokens = 0;  // tokens without a valid route
  std::int64_t num_bad_ids = 0;       // ids outside [-1, E)
  std::vector<std::int64_t> counts;   // [E]
  std::int64_t min_count = 0, max_count = 0;
  double mean_count = 0;
  std::int64_t num_idle_experts = 0;     // experts without a route
  double entropy = 0;                    // of the load over experts, in nats; ln E when balanced
  std::vector<HotExpert> hottest;        // at most 8, by count, ties by id
  std::vector<std::int64_t> rank_rows;   // [P] deduplicated rows for each rank: a token counts once per rank
  std::vector<std::int64_t> rank_slots;  // [P] routes for each rank

  double expert_imbalance() const;  // max / mean load of an expert; 0 without routes
  double rank_imbalance() const;    // max / mean slots of a rank; 0 without routes
  double dedup_gain() const;        // slots / rows: what one copy per rank saves; 0 without routes
};

// Host routes. Work O(T*K + E + P).
WB_API RouteStats route_stats(const RouteView& route, const ExpertPlacement& placement);
WB_API RouteStats route_stats(const RouteView& route);  // one rank

// A few lines of text, no trailing newline.
WB_API std::string describe(const RouteStats& stats);

}  // namespace waybill

template <>
struct fmt::formatter<waybill::RouteStats> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const waybill::RouteStats& stats, Context& context) const {
    return fmt::format_to(context.out(), "{}", waybill::describe(stats));
  }
};
