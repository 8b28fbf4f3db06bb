// SPDX-License-Identifier: Apache-2.0
// The rules of a RoutePlan, and its text for people.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "waybill/route_plan.h"

namespace waybill {
namespace {

constexpr int kMaxListedRanks = 16;

// `size` offsets from 0 to `last`, each at least `step` above the one before.
void check_offsets(const char* name, const std::vector<std::int64_t>& offsets, std::int64_t size, std::int64_t last, std::int64_t step) {
  WB_CHECK(static_cast<std::int64_t>(offsets.size()) == size, "plan: {} has {} entries, expected {}", name, offsets.size(), size);
  WB_CHECK(offsets.front() == 0, "plan: {}[0] = {}, expected 0", name, offsets.front());
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    WB_CHECK(offsets[i] - offsets[i - 1] >= step, "plan: {}[{}] = {} after {}, expected at least {} more", name, i, offsets[i], offsets[i - 1], step);
  }
  WB_CHECK(offsets.back() == last, "plan: {} ends at {}, expected {}", name, offsets.back(), last);
}

void check_sizes(const RoutePlan& plan, const ExpertPlacement& placement) {
  WB_CHECK(plan.P == placement.P, "plan: P = {}, the placement has P = {}", plan.P, placement.P);
  WB_CHECK(plan.T >= 0, "plan: T = {} is negative", plan.T);
  WB_CHECK(plan.K >= 0 && plan.K <= std::numeric_limits<std::int16_t>::max(), "plan: K = {} is not in 0 .. 32767", plan.K);
  const std::int64_t rows = plan.num_rows(), slots = plan.num_slots();
  check_offsets("row_offsets", plan.row_offsets, plan.P + std::int64_t{1}, rows, 0);
  check_offsets("slot_offsets", plan.slot_offsets, rows + 1, slots, 1);
  check_offsets("token_offsets", plan.token_offsets, plan.T + 1, rows, 0);
  WB_CHECK(static_cast<std::int64_t>(plan.slot_weight.size()) == slots, "plan: {} slot weights for {} slots", plan.slot_weight.size(), slots);
  WB_CHECK(static_cast<std::int64_t>(plan.slot_k.size()) == slots, "plan: {} columns for {} slots", plan.slot_k.size(), slots);
  WB_CHECK(static_cast<std::int64_t>(plan.token_rows.size()) == rows, "plan: {} token_rows for {} rows", plan.token_rows.size(), rows);
  WB_CHECK(plan.num_bad_ids >= 0 && plan.num_bad_ids <= plan.T * plan.K - slots, "plan: {} bad ids beside {} slots of T * K = {}", plan.num_bad_ids, slots,
           plan.T * plan.K);
}

void check_slots(const RoutePlan& plan, std::int64_t row, std::int64_t L, std::vector<bool>& taken) {
  const auto r = static_cast<std::size_t>(row);
  const std::int64_t token = plan.row_token[r];
  std::int64_t last_k = -1;
  for (auto s = static_cast<std::size_t>(plan.slot_offsets[r]); s < static_cast<std::size_t>(plan.slot_offsets[r + 1]); ++s) {
    const std::int64_t k = plan.slot_k[s];
    WB_CHECK(plan.slot_expert[s] >= 0 && plan.slot_expert[s] < L, "plan: row {}, slot {}: local expert {} is not in 0 .. {}", row, s, plan.slot_expert[s],
             L - 1);
    WB_CHECK(std::isfinite(plan.slot_weight[s]), "plan: row {}, slot {}: weight {}", row, s, plan.slot_weight[s]);
    WB_CHECK(k > last_k && k < plan.K, "plan: row {}, slot {}: column k = {} after {}, expected ascending below K = {}", row, s, k, last_k, plan.K);
    last_k = k;
    const auto place = static_cast<std::size_t>(token * plan.K + k);
    WB_CHECK(!taken[place], "plan: token {}, k = {} is sent twice, again in row {}", token, k, row);
    taken[place] = true;
  }
}

}  // namespace

void validate(const RoutePlan& plan, const ExpertPlacement& placement) {
  validate(placement);
  check_sizes(plan, placement);
  std::vector<bool> taken(static_cast<std::size_t>(plan.T * plan.K), false);
  for (int p = 0; p < plan.P; ++p) {
    std::int64_t last = -1;
    for (std::int64_t row = plan.row_offsets[static_cast<std::size_t>(p)]; row < plan.row_offsets[static_cast<std::size_t>(p) + 1]; ++row) {
      const std::int64_t token = plan.row_token[static_cast<std::size_t>(row)];
      WB_CHECK(token > last && token < plan.T, "plan: rank {}, row {}: token {} after {}, expected ascending below T = {}", p, row, token, last, plan.T);
      last = token;
      check_slots(plan, row, placement.L(), taken);
    }
  }
  // Ascending rows that name their token, as many as there are rows: every row once.
  for (std::int64_t t = 0; t < plan.T; ++t) {
    std::int64_t last = -1;
    for (std::int64_t i = plan.token_offsets[static_cast<std::size_t>(t)]; i < plan.token_offsets[static_cast<std::size_t>(t) + 1]; ++i) {
      const std::int64_t row = plan.token_rows[static_cast<std::size_t>(i)];
      WB_CHECK(row > last && row < plan.num_rows(), "plan: token {}: row {} after {}, expected ascending below {}", t, row, last, plan.num_rows());
      WB_CHECK(plan.row_token[static_cast<std::size_t>(row)] == t, "plan: token {} lists row {}, which is of token {}", t, row,
               plan.row_token[static_cast<std::size_t>(row)]);
      last = row;
    }
  }
}

std::string describe(const RoutePlan& plan) {
  const std::int64_t rows = plan.num_rows(), slots = plan.num_slots();
  std::string text = fmt::format("plan: T = {}, K = {}, P = {}: {} rows, {} slots ({:.2f} a row)", plan.T, plan.K, plan.P, rows, slots,
                                 rows > 0 ? static_cast<double>(slots) / static_cast<double>(rows) : 0.0);
  if (plan.num_bad_ids > 0) text += fmt::format(", {} bad ids ignored", plan.num_bad_ids);
  if (plan.row_offsets.size() != static_cast<std::size_t>(plan.P) + 1) return text;  // never built
  for (int p = 0; p < std::min(plan.P, kMaxListedRanks); ++p) {
    const std::int64_t first = plan.row_offsets.at(static_cast<std::size_t>(p)), end = plan.row_offsets.at(static_cast<std::size_t>(p) + 1);
    const std::int64_t rank_slots = plan.slot_offsets.at(static_cast<std::size_t>(end)) - plan.slot_offsets.at(static_cast<std::size_t>(first));
    text += fmt::format("\n  to rank {}: {} rows, {} slots", p, end - first, rank_slots);
  }
  if (plan.P > kMaxListedRanks) text += fmt::format("\n  and {} more ranks", plan.P - kMaxListedRanks);
  return text;
}

}  // namespace waybill
