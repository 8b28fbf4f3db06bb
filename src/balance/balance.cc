// SPDX-License-Identifier: Apache-2.0
#include "waybill/balance.h"

#include <algorithm>
#include <cmath>

#include "waybill/error.h"

namespace waybill {
namespace {

std::int64_t checked_total(std::span<const std::int64_t> counts) {
  std::int64_t total = 0;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    WB_CHECK(counts[e] >= 0, "the count of entry {} is negative: {}", e, counts[e]);
    WB_CHECK(!__builtin_add_overflow(total, counts[e], &total), "the counts up to entry {} ({}) sum to more than 2^63 - 1", e, counts[e]);
  }
  return total;
}

void check_tile(std::int64_t tile_rows) { WB_CHECK(tile_rows >= 1, "a tile needs at least one row, got {}", tile_rows); }

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace

void update_expert_bias(std::span<float> bias, std::span<const std::int64_t> counts, float rate, bool subtract_mean) {
  WB_CHECK(bias.size() == counts.size(), "{} biases but {} counts", bias.size(), counts.size());
  WB_CHECK(std::isfinite(rate), "the bias update rate must be finite, got {}", rate);
  const std::int64_t total = checked_total(counts);
  const auto sign_of = [&](std::size_t e) {
    const __int128 excess = static_cast<__int128>(total) - static_cast<__int128>(counts.size()) * counts[e];
    return excess > 0 ? 1 : (excess < 0 ? -1 : 0);
  };
  float mean_sign = 0;
  if (subtract_mean && !bias.empty()) {
    std::int64_t sum = 0;
    for (std::size_t e = 0; e < bias.size(); ++e) sum += sign_of(e);
    mean_sign = static_cast<float>(static_cast<double>(sum) / static_cast<double>(bias.size()));
  }
  for (std::size_t e = 0; e < bias.size(); ++e) bias[e] += rate * (static_cast<float>(sign_of(e)) - mean_sign);
}

double load_imbalance(std::span<const std::int64_t> counts) {
  const std::int64_t total = checked_total(counts);
  if (total == 0) return 0;
  return static_cast<double>(*std::max_element(counts.begin(), counts.end())) * static_cast<double>(counts.size()) / static_cast<double>(total);
}

LoadSummary summarise_load(std::span<const std::int64_t> counts) {
  LoadSummary summary;
  summary.total = checked_total(counts);
  if (counts.empty()) return summary;
  std::vector<std::int64_t> sorted(counts.begin(), counts.end());
  std::sort(sorted.begin(), sorted.end());
  const auto num = static_cast<std::int64_t>(sorted.size());
  const auto percentile = [&](std::int64_t percent) { return sorted[static_cast<std::size_t>(std::max<std::int64_t>(ceil_div(num * percent, 100) - 1, 0))]; };
  summary.min = sorted.front();
  summary.max = sorted.back();
  summary.mean = static_cast<double>(summary.total) / static_cast<double>(num);
  summary.p50 = percentile(50);
  summary.p99 = percentile(99);
  summary.hottest = std::max_element(counts.begin(), counts.end()) - counts.begin();
  summary.num_idle = std::count(counts.begin(), counts.end(), 0);
  for (const std::int64_t n : counts) {
    const double share = summary.total > 0 ? static_cast<double>(n) / static_cast<double>(summary.total) : 0;
    if (share > 0) summary.entropy -= share * std::log(share);
  }
  return summary;
}

std::int64_t count_row_tiles(std::span<const std::int64_t> counts, std::int64_t tile_rows) {
  check_tile(tile_rows);
  checked_total(counts);
  std::int64_t tiles = 0;
  for (const std::int64_t n : counts) tiles += ceil_div(n, tile_rows);
  return tiles;
}

std::int64_t count_row_tiles_at_max(std::span<const std::int64_t> counts, std::int64_t tile_rows) {
  check_tile(tile_rows);
  checked_total(counts);
  if (counts.empty()) return 0;
  return static_cast<std::int64_t>(counts.size()) * ceil_div(*std::max_element(counts.begin(), counts.end()), tile_rows);
}

std::vector<std::int64_t> rows_per_rank(std::span<const std::int64_t> counts, const ExpertPlacement& placement) {
  WB_CHECK(static_cast<std::int64_t>(counts.size()) == placement.E, "{} counts for a placement of E = {} experts", counts.size(), placement.E);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(placement.P), 0);
  for (std::size_t e = 0; e < counts.size(); ++e) rows[static_cast<std::size_t>(placement.rank_of(static_cast<std::int64_t>(e)))] += counts[e];
  return rows;
}

LoadReport report_load(std::string name, std::span<const std::int64_t> counts, const ExpertPlacement& placement, std::int64_t tile_rows) {
  LoadReport report;
  report.name = std::move(name);
  report.experts = summarise_load(counts);
  report.ranks = summarise_load(rows_per_rank(counts, placement));
  report.real_rows = report.experts.total;
  report.padded_rows = count_row_tiles(counts, tile_rows) * tile_rows;
  return report;
}

std::string describe(const LoadReport& report) {
  const auto text = [](const LoadSummary& s) { return fmt::format("min {} mean {:.1f} max {} p50 {} p99 {}", s.min, s.mean, s.max, s.p50, s.p99); };
  return fmt::format("{}: rows per expert {} (idle {}); rows per rank {}, slowest rank {}; rows {} real, {} padded", report.name, text(report.experts),
                     report.experts.num_idle, text(report.ranks), report.ranks.hottest, report.real_rows, report.padded_rows);
}

}  // namespace waybill
