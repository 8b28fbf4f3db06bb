// SPDX-License-Identifier: Apache-2.0
// Tuning of the exchange as data: grains of the CPU engine, and for GPUs a row of numbers for each size of row. Speed only, never results. `waybill bench
// exchange --tune FILE` searches them on this machine and writes a table (`bench_cuda_exchange OUT.jsonl --tune`: its four sizes of row);
// WAYBILL_EXCHANGE_TUNING names the file of one that replaces what is built in (GPUs: H200).
//
// A file has a line "cpu" with the numbers of CpuTuning, and a line of RowTuning for each size of row, numbers in the order of the members, rows by ascending
// row_bytes; either kind may be missing. # starts a comment.
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
// Rows that a task of the thread pool takes at a time.
struct CpuTuning {
  int copy_rows = 64;     // dispatch
  int permute_rows = 32;  // permute, its counterpart and its backward
  int sum_tokens = 32;    // combine

  bool operator==(const CpuTuning&) const = default;
};
using TuningTable = std::vector<RowTuning>;

const TuningTable& built_in_tuning();
// The table of WAYBILL_EXCHANGE_TUNING or the built-in one; read once.
const TuningTable& tuning_table();
// The CPU engine's: of WAYBILL_EXCHANGE_TUNING or built in, until set_cpu_tuning() replaces it (before ranks run).
CpuTuning cpu_tuning();
void set_cpu_tuning(const CpuTuning& tuning);
const RowTuning& tuning_for(const TuningTable& table, std::int64_t row_bytes);

// The table with `row` in its place, instead of one of the same size.
TuningTable with_row(TuningTable table, const RowTuning& row);

// kInvalidArgument naming `name` and the line: not nine whole numbers (cpu: three), sizes that do not ascend, two cpu lines, numbers out of range, a file
// without any line. What a file does not have is built in.
TuningTable parse_tuning(std::string_view text, const std::string& name);
CpuTuning parse_cpu_tuning(std::string_view text, const std::string& name);
std::string format_tuning(const TuningTable& table);
std::string format_tuning(const CpuTuning& tuning);

}  // namespace waybill
