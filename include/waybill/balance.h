// SPDX-License-Identifier: Apache-2.0
// Load balance without gradients: the aux-free expert bias (DeepSeek-V3) and load statistics. Host memory, no allocation in a step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "waybill/export.h"
#include "waybill/route.h"

namespace waybill {

// b_e += rate * sign(mean(n) - n_e), compared in integers as sign(sum(n) - E * n_e); sign(0) = 0. Counts are the step's totals over
// all ranks, without padding. No tokens: no change. subtract_mean also removes the mean of the update (torchtitan's variant).
// The bias is fp32 and stays it: 1000 updates of 1e-3 would stop at 0.5 in bf16.
WB_API void update_expert_bias(std::span<float> bias, std::span<const std::int64_t> counts, float rate, bool subtract_mean = false);

// max(n) / mean(n); 0 when there are no tokens.
WB_API double load_imbalance(std::span<const std::int64_t> counts);

// Distribution of one set of loads (rows per expert, or rows per rank).
struct LoadSummary {
  std::int64_t total = 0, min = 0, max = 0;
  double mean = 0;
  std::int64_t p50 = 0, p99 = 0;  // nearest rank: the smallest load that at least half / 99% of the entries do not exceed
  std::int64_t hottest = 0;       // index of the maximum, the lowest of several
  std::int64_t num_idle = 0;      // entries without a row
  double entropy = 0;             // of the shares, in nat; log(entries) when even
};
WB_API LoadSummary summarise_load(std::span<const std::int64_t> counts);

// Row tiles that hold work: sum_e ceil(n_e / tile_rows). What the time of a grouped matmul should follow.
WB_API std::int64_t count_row_tiles(std::span<const std::int64_t> counts, std::int64_t tile_rows);
// Row tiles if the hottest expert set the size for all: E * ceil(max / tile_rows). What it must not follow.
WB_API std::int64_t count_row_tiles_at_max(std::span<const std::int64_t> counts, std::int64_t tile_rows);

// Rows (slots) per rank of a placement.
WB_API std::vector<std::int64_t> rows_per_rank(std::span<const std::int64_t> counts, const ExpertPlacement& placement);

// What a benchmark states beside its numbers.
struct LoadReport {
  std::string name;
  LoadSummary experts, ranks;  // ranks.hottest is the slowest rank
  std::int64_t real_rows = 0;
  std::int64_t padded_rows = 0;  // with every expert rounded up to tile_rows
};
WB_API LoadReport report_load(std::string name, std::span<const std::int64_t> counts, const ExpertPlacement& placement, std::int64_t tile_rows);
WB_API std::string describe(const LoadReport& report);

}  // namespace waybill
