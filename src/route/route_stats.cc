// SPDX-License-Identifier: Apache-2.0
#include "waybill/route_stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace waybill {
namespace {

constexpr std::size_t kNumHottest = 8;

void summarise_experts(RouteStats& stats) {
  stats.min_count = *std::min_element(stats.counts.begin(), stats.counts.end());
  stats.max_count = *std::max_element(stats.counts.begin(), stats.counts.end());
  stats.mean_count = static_cast<double>(stats.num_routes) / static_cast<double>(stats.E);
  stats.num_idle_experts = std::count(stats.counts.begin(), stats.counts.end(), 0);
  for (const std::int64_t count : stats.counts) {
    if (count == 0) continue;
    const double share = static_cast<double>(count) / static_cast<double>(stats.num_routes);
    stats.entropy -= share * std::log(share);
  }
  std::vector<std::int64_t> order(stats.counts.size());
  std::iota(order.begin(), order.end(), 0);
  const std::size_t kept = std::min(kNumHottest, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(), [&](std::int64_t a, std::int64_t b) {
    const std::int64_t load_a = stats.counts[static_cast<std::size_t>(a)], load_b = stats.counts[static_cast<std::size_t>(b)];
    return load_a != load_b ? load_a > load_b : a < b;
  });
  for (std::size_t i = 0; i < kept && stats.counts[static_cast<std::size_t>(order[i])] > 0; ++i) {
    stats.hottest.push_back(HotExpert{order[i], stats.counts[static_cast<std::size_t>(order[i])]});
  }
}

double max_over_mean(const std::vector<std::int64_t>& values) {
  if (values.empty()) return 0;
  const auto sum = static_cast<double>(std::accumulate(values.begin(), values.end(), std::int64_t{0}));
  return sum == 0 ? 0 : static_cast<double>(*std::max_element(values.begin(), values.end())) * static_cast<double>(values.size()) / sum;
}

}  // namespace

double RouteStats::expert_imbalance() const { return max_over_mean(counts); }
double RouteStats::rank_imbalance() const { return max_over_mean(rank_slots); }
double RouteStats::dedup_gain() const {
  const std::int64_t rows = std::accumulate(rank_rows.begin(), rank_rows.end(), std::int64_t{0});
  return rows == 0 ? 0 : static_cast<double>(num_routes) / static_cast<double>(rows);
}

RouteStats route_stats(const RouteView& route, const ExpertPlacement& placement) {
  WB_CHECK(route.E == placement.E, "the route has E = {} experts, the placement E = {}", route.E, placement.E);
  WB_CHECK(route.device.type == DeviceType::kCpu, "the route must be in host memory, it is on {}", to_string(route.device));
  RouteStats stats;
  stats.T = route.T;
  stats.K = route.K;
  stats.E = route.E;
  stats.P = placement.P;
  stats.counts.assign(static_cast<std::size_t>(route.E), 0);
  stats.rank_rows.assign(static_cast<std::size_t>(placement.P), 0);
  stats.rank_slots.assign(static_cast<std::size_t>(placement.P), 0);
  std::vector<std::int64_t> last_token(static_cast<std::size_t>(placement.P), -1);
  for (std::int64_t t = 0; t < route.T; ++t) {
    bool empty = true;
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      stats.num_bad_ids += is_bad_id(id, route.E) ? 1 : 0;
      if (!is_route(id, route.E)) continue;
      empty = false;
      ++stats.num_routes;
      ++stats.counts[static_cast<std::size_t>(id)];
      const auto rank = static_cast<std::size_t>(placement.rank_of(id));
      ++stats.rank_slots[rank];
      stats.rank_rows[rank] += last_token[rank] != t ? 1 : 0;
      last_token[rank] = t;
    }
    stats.num_empty_tokens += empty ? 1 : 0;
  }
  summarise_experts(stats);
  return stats;
}

RouteStats route_stats(const RouteView& route) { return route_stats(route, block_placement(route.E, 1)); }

std::string describe(const RouteStats& stats) {
  std::string text = fmt::format("{} tokens, top-{} of {} experts: {} routes, {} tokens without a route, {} bad ids\n", stats.T, stats.K, stats.E,
                                 stats.num_routes, stats.num_empty_tokens, stats.num_bad_ids);
  text +=
      fmt::format("load per expert: min {}, mean {:.2f}, max {} ({:.2f} x mean), {} idle; entropy {:.4f} of {:.4f} nats\n", stats.min_count, stats.mean_count,
                  stats.max_count, stats.expert_imbalance(), stats.num_idle_experts, stats.entropy, std::log(static_cast<double>(stats.E)));
  text += "hottest experts:";
  for (const HotExpert& hot : stats.hottest) text += fmt::format(" {} ({})", hot.expert, hot.count);
  if (stats.hottest.empty()) text += " none";
  text += fmt::format("\nranks: {}, slots max/mean {:.2f}, deduplication {:.2f} slots a row", stats.P, stats.rank_imbalance(), stats.dedup_gain());
  for (std::size_t p = 0; p < stats.rank_rows.size(); ++p) {
    text += fmt::format("\n  rank {}: {} rows, {} slots", p, stats.rank_rows[p], stats.rank_slots[p]);
  }
  return text;
}

}  // namespace waybill
