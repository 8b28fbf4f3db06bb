// SPDX-License-Identifier: Apache-2.0
// Tuning of the GPU exchange as data: a row of numbers for each size of row. Speed only, never results. `bench_cuda_exchange OUT.jsonl --tune` sweeps
// them and writes a table; WAYBILL_EXCHANGE_TUNING names the file of one that replaces the built-in table (H200).
//
// A file has a line for each row, numbers in the order of the members, rows by ascending row_bytes; # starts a comment.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace waybill {

struct RowTuning {
  std::int64_t row_bytes = 0;  // for rows of up to so many bytes; the last one for larger rows, too
  // CTAs of each rank; the launch is cut to what the GPU holds at a time.
  int dispatch_ctas = 0;
  int chunk_ctas = 0;  // dispatch_chunks
  int combine_ctas = 0, combine_warps = 0, combine_stages = 0;
  int reduce_stages = 0;
  int fused_combine_ctas = 0, fused_stages = 0;  // reduce_and_combine; 0 CTAs: two launches

  bool operator==(const RowTuning&) const = default;
};
using TuningTable = std::vector<RowTuning>;

const TuningTable& built_in_tuning();
// The table of WAYBILL_EXCHANGE_TUNING or the built-in one; read once.
const TuningTable& tuning_table();
const RowTuning& tuning_for(const TuningTable& table, std::int64_t row_bytes);

// kInvalidArgument naming `name` and the line: not nine whole numbers, sizes that do not ascend, numbers out of range, no row at all.
TuningTable parse_tuning(std::string_view text, const std::string& name);
std::string format_tuning(const TuningTable& table);

}  // namespace waybill
