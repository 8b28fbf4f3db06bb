// SPDX-License-Identifier: Apache-2.0
// The search that fills a table of exchange/tuning_table.h: one row of it from measurements of one shape.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/cuda/exchange_group.h"
#include "exchange/tuning_table.h"

namespace waybill::cuda {

// What one step of the search has come to.
struct TuneChoice {
  std::string what, numbers;  // the row of the table
  StepTime us;                // of the one that was taken
  double fastest_us = 0;
  std::size_t candidates = 0;
  std::int64_t iterations = 0;
};

inline void print_choice(const TuneChoice& c) {
  fmt::print("tune {:<20} {:.1f} us, fastest of {} {:.1f}: {}\n", c.what, c.us.p50, c.candidates, c.fastest_us, c.numbers);
}

class RowSearch {
 public:
  using Part = ExchangeGroup::Part;
  // row_bytes: what the row of the table is for.
  RowSearch(ExchangeGroup& group, std::int64_t row_bytes, std::function<void(const TuneChoice&)> tell = print_choice) : group_(group), tell_(std::move(tell)) {
    row_ = tuning_for(built_in_tuning(), row_bytes), row_.row_bytes = row_bytes;
  }

  // SMs are one budget: of the candidates within 1% of the fastest the one with the fewest CTAs, which come first, is taken. Steps later in the
  // list run with what the earlier ones chose.
  RowTuning find() {
    const ExchangeTuning saved = group_.tuning();
    choose("dispatch", ctas(&RowTuning::dispatch_ctas, {10, 12, 14, 16, 18, 20, 22, 24}),
           [&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.dispatch(p, i, true, s); });
    std::vector<RowTuning> combines;
    for (const int count : {16, 20, 24, 32, 48}) {
      for (const auto& [warps, stages] : {std::pair{16, 2}, std::pair{16, 3}, std::pair{16, 4}, std::pair{8, 4}}) {
        combines.push_back(row_);
        combines.back().combine_ctas = count, combines.back().combine_warps = warps, combines.back().combine_stages = stages;
      }
    }
    choose("combine", combines, [&](Part& p, int, cudaStream_t s) { group_.combine(p, s); });
    choose("reduction, stages", ctas(&RowTuning::reduce_stages, {2, 3, 4, 5, 6}), [&](Part& p, int, cudaStream_t s) { group_.unpermute(p, s); });
    if (group_.parts[0]->exchange.supports_chunks()) {
      choose("chunks", ctas(&RowTuning::chunk_ctas, {14, 16, 20, 24, 32, 48}),
             [&](Part& p, int i, cudaStream_t s) { group_.plan(p, i, s), group_.dispatch_and_permute_chunks(p, i, s); });
    }
    std::vector<RowTuning> fused;
    for (const int count : {0, 16, 24, 32, 40, 48}) {
      for (const int stages : {2, 4}) {
        fused.push_back(row_);
        fused.back().fused_combine_ctas = count, fused.back().fused_stages = stages;
        if (count == 0) break;
      }
    }
    choose("reduce and combine", fused, [&](Part& p, int, cudaStream_t s) { group_.reduce_and_combine(p, s); });
    group_.set_tuning(saved);
    return row_;
  }

 private:
  std::vector<RowTuning> ctas(int RowTuning::*member, std::initializer_list<int> values) const {
    std::vector<RowTuning> rows;
    for (const int value : values) rows.push_back(row_), rows.back().*member = value;
    return rows;
  }
  void apply(const RowTuning& row) {
    ExchangeTuning t = group_.tuning();
    t.dispatch_ctas = row.dispatch_ctas, t.chunk_ctas = row.chunk_ctas, t.combine_ctas = row.combine_ctas, t.combine_warps = row.combine_warps;
    t.combine_stages = row.combine_stages, t.reduce_stages = row.reduce_stages, t.fused_stages = row.fused_stages;
    t.fused_combine_ctas = row.fused_combine_ctas == 0 ? -1 : row.fused_combine_ctas;
    group_.set_tuning(t);
  }
  void choose(const char* what, const std::vector<RowTuning>& candidates, const ExchangeGroup::Step& step) {
    constexpr int kSteps = 6, kReplays = 9;
    std::vector<StepTime> us;
    for (const RowTuning& candidate : candidates) apply(candidate), us.push_back(group_.time(step, kSteps, kReplays));
    const double best = std::min_element(us.begin(), us.end(), [](const StepTime& a, const StepTime& b) { return a.p50 < b.p50; })->p50;
    std::size_t taken = 0;
    while (us[taken].p50 > 1.01 * best) ++taken;
    row_ = candidates[taken];
    const std::string table = format_tuning(TuningTable{row_});
    tell_({what, table.substr(table.find('\n') + 1, table.rfind('\n') - table.find('\n') - 1), us[taken], best, us.size(), kSteps * kReplays});
  }

  ExchangeGroup& group_;
  std::function<void(const TuneChoice&)> tell_;
  RowTuning row_;
};

}  // namespace waybill::cuda
