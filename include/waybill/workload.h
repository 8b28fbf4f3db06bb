// SPDX-License-Identifier: Apache-2.0
// Workloads W0 to W9: synthetic routes with a named skew, for tests and benchmarks. The routes of a batch are a function of (workload,
// seed, step, T, K, E, parameters) alone; P only says how the batch is split over source ranks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "waybill/route.h"

namespace waybill {

enum class Workload : std::uint8_t {
  kBalanced = 0,       // W0: forced balance, every expert the same load and few tokens already on all ranks
  kZipf = 1,           // W1: popularity rank^-zipf_exponent, ranks shuffled over the experts by the seed
  kHotExpert = 2,      // W2: one expert with hot_factor times the mean load, the rest uniform
  kOneExpert = 3,      // W3: one expert in every row (K = 1: all rows to it)
  kHotRank = 4,        // W4: hot_share of the routes go to the first max(K, E / 8) experts: rank 0 of up to 8 ranks
  kRaggedSources = 5,  // W5: uniform routes, sources of very different length, every third one empty (P > 1)
  kEmptyExperts = 6,   // W6: the second half of the experts and every fourth of the first get nothing, so at P >= 2 a rank is empty
  kMovingHotSpot = 7,  // W7: hot_share of the tokens visit one expert that changes with every step
  kBurst = 8,          // W8: a run of a quarter of the batch, at a place that depends on the step, goes to the same K experts
  kFewRows = 9,        // W9: every expert gets 1 or 2 rows; needs E <= T * K <= 2 E
};
inline constexpr int kNumWorkloads = 10;

WB_API const char* short_name(Workload workload);       // "W0"
WB_API const char* to_string(Workload workload);        // "balanced"
WB_API Workload parse_workload(std::string_view name);  // either form; kInvalidArgument listing the names

struct WorkloadConfig {
  Workload workload = Workload::kBalanced;
  std::uint64_t seed = 1;
  std::int64_t step = 0;
  std::int64_t T = 0, K = 0, E = 0;  // T: tokens of the whole batch, all sources
  double zipf_exponent = 1.0;
  double hot_factor = 10.0;
  double hot_share = 0.5;
};
WB_API void validate(const WorkloadConfig& config);

// Tokens that give W9 its 1 to 2 rows per expert.
WB_API std::int64_t few_rows_tokens(std::int64_t E, std::int64_t K);

// ids [T * K] of the whole batch: distinct within a row, none is -1.
WB_API std::vector<std::int32_t> workload_ids(const WorkloadConfig& config);
// Row boundaries [P + 1] of the sources.
WB_API std::vector<std::int64_t> workload_bounds(const WorkloadConfig& config, int P);
// One route per source, weights 1 / K.
WB_API std::vector<Route> workload_routes(const WorkloadConfig& config, int P);
// Rows per expert of the whole batch.
WB_API std::vector<std::int64_t> workload_counts(const WorkloadConfig& config);

}  // namespace waybill
