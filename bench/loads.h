// SPDX-License-Identifier: Apache-2.0
// The loads of the benchmarks that are programs of their own: "even", the ten loads of bench/shapes/loads.toml by their short names (W0 to W9, with
// that file's parameters, which are the defaults of waybill/workload.h), and the three of the grouped matmuls' first records: "softmax",
// "hot90" (one expert with 90 %) and "zipf" (1 / rank in the order of the experts; W1 shuffles it).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "waybill/error.h"
#include "waybill/workload.h"

namespace waybill::bench {

inline constexpr std::array<const char*, kNumWorkloads> kWorkloads = {"W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9"};
inline constexpr std::array<const char*, 3> kShares = {"softmax", "hot90", "zipf"};

// W9 sets its number of tokens itself.
inline WorkloadConfig workload_of(const std::string& load, std::int64_t T, std::int64_t K, std::int64_t E, std::int64_t step = 0) {
  WorkloadConfig config;
  config.workload = parse_workload(load), config.K = K, config.E = E, config.step = step;
  config.T = config.workload == Workload::kFewRows ? few_rows_tokens(E, K) : T;
  return config;
}

// `total` rows in proportion to the shares, the remainder one by one from the first expert on.
inline std::vector<std::int64_t> split_by_shares(const std::vector<double>& shares, std::int64_t total) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<std::int64_t> counts;
  for (const double share : shares) counts.push_back(static_cast<std::int64_t>(share / sum * static_cast<double>(total)));
  std::int64_t given = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  for (std::size_t i = 0; given < total; i = (i + 1) % counts.size()) ++counts[i], ++given;
  return counts;
}

// Rows of L experts, `rows` of them on average (W9: 1 or 2; W0 to W9 draw top-4 routes, so the sum is a multiple of 4).
inline std::vector<std::int64_t> load_counts(const std::string& load, std::int64_t L, std::int64_t rows) {
  if (load == "even") return std::vector<std::int64_t>(static_cast<std::size_t>(L), rows);
  std::vector<double> shares(static_cast<std::size_t>(L), 1.0);
  if (load == "softmax") {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (double& share : shares) share = std::exp(normal(random));
  } else if (load == "zipf") {
    for (std::size_t i = 0; i < shares.size(); ++i) shares[i] = 1.0 / static_cast<double>(i + 1);
  } else if (load == "hot90") {
    shares[0] = L == 1 ? 1.0 : 9.0 * static_cast<double>(L - 1);
  } else {
    const std::int64_t K = std::min<std::int64_t>(4, L);
    return workload_counts(workload_of(load, L * rows / K, K, L));
  }
  return split_by_shares(shares, L * rows);
}

// The same as first rows [L + 1].
inline std::vector<std::int32_t> load_offsets(const std::string& load, std::int64_t L, std::int64_t rows) {
  std::vector<std::int32_t> offsets(1, 0);
  for (const std::int64_t count : load_counts(load, L, rows)) {
    WB_CHECK(offsets.back() + count <= INT32_MAX, "load {}: {} experts with {} rows on average are more than 2^31 rows", load, L, rows);
    offsets.push_back(static_cast<std::int32_t>(offsets.back() + count));
  }
  return offsets;
}

}  // namespace waybill::bench
