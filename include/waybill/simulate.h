// SPDX-License-Identifier: Apache-2.0
// Cluster cost model of the exchange: how many copies of a row cross which link, and the time that their bytes need at least.
// Closed forms for uniform routing, counts for given routes. A model, never a measurement.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "waybill/route.h"

namespace waybill {

// Probability that a token with K distinct, uniformly chosen experts of E visits a given one of n equal groups of experts:
// 1 - C(E - E/n, K) / C(E, K). Refuses E not divisible by n and K > E.
WB_API double group_hit_probability(std::int64_t E, std::int64_t K, std::int64_t n);

// Mean copies of a token's row that leave its rank in one direction.
//   no_dedup    one copy per expert on another rank:               K (1 - 1/P)
//   rank_dedup  one copy per other rank with one of its experts:   (P-1) p(P)
// With N domains (ranks that share fast links; P/N ranks each), of these over the network between domains:
//   network_no_dedup     K (1 - 1/N)
//   network_rank_dedup   (P - P/N) p(P)
//   network_hierarchical (N-1) p(N)     once per remote domain, fanned out inside it
//   link_hierarchical    (P-N) p(P)     copies inside domains then
struct ExchangeCopies {
  double no_dedup = 0, rank_dedup = 0;
  double network_no_dedup = 0, network_rank_dedup = 0, network_hierarchical = 0, link_hierarchical = 0;
};
WB_API ExchangeCopies exchange_copies(std::int64_t E, std::int64_t K, int P, int num_domains = 1);

struct ClusterSpec {
  int P = 8;
  int num_domains = 1;
  // GB/s = 1e9 bytes a second, per rank and direction. Defaults: rows pushed over NVLink 4 on two H200, both directions busy; a
  // 400 Gbit/s network card at 90 %; HBM3e row copies. bytes read + written for `memory_gbps`.
  double link_gbps = 363, network_gbps = 45, memory_gbps = 4290;
};

struct ExchangeShape {
  std::int64_t T = 4096, H = 7168, E = 256, K = 8;
  double row_bytes = 0;  // payload of a row; 0 = H bf16 values
  double bytes_per_row() const { return row_bytes > 0 ? row_bytes : 2.0 * static_cast<double>(H); }
};

// One direction of one exchange for the slowest rank. time_us is the largest of the three floors.
struct ExchangeEstimate {
  double rows_sent = 0;  // copies that leave a rank, mean
  double link_bytes = 0, network_bytes = 0, memory_bytes = 0;
  double link_us = 0, network_us = 0, memory_us = 0;
  double time_us() const;
  const char* bound() const;  // "link", "network" or "memory"
};
enum class DedupKind : std::uint8_t { kNone = 0, kRank = 1, kHierarchical = 2 };
WB_API ExchangeEstimate estimate_exchange(const ClusterSpec& cluster, const ExchangeShape& shape, DedupKind kind);

// Rows that each rank receives from others, for routes as they are. routes[p] belongs to source rank p; block placement.
struct RoutedRows {
  std::vector<std::int64_t> received;  // [P] deduplicated rows from other ranks
  std::vector<std::int64_t> sent;      // [P]
  double mean_received() const;
  std::int64_t max_received() const;
};
WB_API RoutedRows count_routed_rows(const std::vector<RouteView>& routes);

}  // namespace waybill
