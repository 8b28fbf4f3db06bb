// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "waybill/simulate.h"

namespace waybill {

double ExchangeEstimate::time_us() const { return std::max({link_us, network_us, memory_us}); }

const char* ExchangeEstimate::bound() const {
  if (network_us >= link_us && network_us >= memory_us && network_us > 0) return "network";
  return link_us >= memory_us ? "link" : "memory";
}

ExchangeEstimate estimate_exchange(const ClusterSpec& cluster, const ExchangeShape& shape, DedupKind kind) {
  WB_CHECK(shape.T >= 0 && shape.H >= 1, "T = {}, H = {}: T >= 0 and H >= 1 are needed", shape.T, shape.H);
  WB_CHECK(cluster.link_gbps > 0 && cluster.network_gbps > 0 && cluster.memory_gbps > 0, "bandwidths must be positive: link {}, network {}, memory {} GB/s",
           cluster.link_gbps, cluster.network_gbps, cluster.memory_gbps);
  const ExchangeCopies copies = exchange_copies(shape.E, shape.K, cluster.P, cluster.num_domains);
  double network = 0, link = 0;
  switch (kind) {
    case DedupKind::kNone:
      network = copies.network_no_dedup;
      link = copies.no_dedup - copies.network_no_dedup;
      break;
    case DedupKind::kRank:
      network = copies.network_rank_dedup;
      link = copies.rank_dedup - copies.network_rank_dedup;
      break;
    case DedupKind::kHierarchical:
      network = copies.network_hierarchical;
      link = copies.link_hierarchical;
      break;
  }
  const double token_bytes = static_cast<double>(shape.T) * shape.bytes_per_row();
  const auto micros = [](double bytes, double gbps) { return bytes / (gbps * 1e3); };
  ExchangeEstimate estimate;
  estimate.rows_sent = static_cast<double>(shape.T) * (network + link);
  estimate.link_bytes = token_bytes * link;
  estimate.network_bytes = token_bytes * network;
  estimate.memory_bytes = 2 * token_bytes * (network + link);  // read where it was, written where it goes
  estimate.link_us = micros(estimate.link_bytes, cluster.link_gbps);
  estimate.network_us = micros(estimate.network_bytes, cluster.network_gbps);
  estimate.memory_us = micros(estimate.memory_bytes, cluster.memory_gbps);
  return estimate;
}

double RoutedRows::mean_received() const {
  if (received.empty()) return 0;
  return static_cast<double>(std::accumulate(received.begin(), received.end(), std::int64_t{0})) / static_cast<double>(received.size());
}

std::int64_t RoutedRows::max_received() const { return received.empty() ? 0 : *std::max_element(received.begin(), received.end()); }

RoutedRows count_routed_rows(const std::vector<RouteView>& routes) {
  const int P = static_cast<int>(routes.size());
  RoutedRows rows;
  rows.received.assign(routes.size(), 0);
  rows.sent.assign(routes.size(), 0);
  std::vector<std::int64_t> last_token(routes.size(), -1);
  for (int source = 0; source < P; ++source) {
    const RouteView& route = routes[static_cast<std::size_t>(source)];
    const ExpertPlacement placement = block_placement(route.E, P);
    std::fill(last_token.begin(), last_token.end(), -1);
    for (std::int64_t t = 0; t < route.T; ++t) {
      for (std::int64_t k = 0; k < route.K; ++k) {
        const std::int32_t id = route.id(t, k);
        if (id < 0 || id >= route.E) continue;
        const auto target = static_cast<std::size_t>(placement.rank_of(id));
        if (last_token[target] == t) continue;
        last_token[target] = t;
        if (static_cast<int>(target) == source) continue;
        ++rows.received[target];
        ++rows.sent[static_cast<std::size_t>(source)];
      }
    }
  }
  return rows;
}

}  // namespace waybill
