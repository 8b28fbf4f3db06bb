// SPDX-License-Identifier: Apache-2.0
#include "exchange/tuning_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>

#include "waybill/error.h"

namespace waybill {
namespace {

struct Field {
  const char* name;
  int RowTuning::*member;
  int least, most;
};
constexpr std::array<Field, 8> kFields{{{"dispatch_ctas", &RowTuning::dispatch_ctas, 1, 1024},
                                        {"chunk_ctas", &RowTuning::chunk_ctas, 1, 1024},
                                        {"combine_ctas", &RowTuning::combine_ctas, 1, 1024},
                                        {"combine_warps", &RowTuning::combine_warps, 1, 16},
                                        {"combine_stages", &RowTuning::combine_stages, 1, 16},
                                        {"reduce_stages", &RowTuning::reduce_stages, 1, 6},
                                        {"fused_combine_ctas", &RowTuning::fused_combine_ctas, 0, 1024},
                                        {"fused_stages", &RowTuning::fused_stages, 1, 6}}};

struct CpuField {
  const char* name;
  int CpuTuning::*member;
};
constexpr std::array<CpuField, 3> kCpuFields{
    {{"copy_rows", &CpuTuning::copy_rows}, {"permute_rows", &CpuTuning::permute_rows}, {"sum_tokens", &CpuTuning::sum_tokens}}};
constexpr int kMostGrain = 1 << 20;
constexpr const char* kCpu = "cpu";

void expect_end(std::istringstream& line, const std::string& where) {
  std::string rest;
  WB_CHECK(!(line >> rest), "{}: \"{}\" behind the last number", where, rest);
}

void parse_number(std::istringstream& line, const std::string& where, const char* name, int least, int most, int& value) {
  WB_CHECK(line >> value, "{}: {} is missing or no whole number", where, name);
  WB_CHECK(value >= least && value <= most, "{}: {} = {} is outside [{}, {}]", where, name, value, least, most);
}

RowTuning parse_row(std::istringstream& line, const std::string& where) {
  RowTuning row;
  WB_CHECK(line >> row.row_bytes && row.row_bytes > 0, "{}: row_bytes must be a positive whole number, or the line one of \"cpu\": {}", where, line.str());
  for (const Field& field : kFields) parse_number(line, where, field.name, field.least, field.most, row.*field.member);
  expect_end(line, where);
  return row;
}

struct TuningFile {
  TuningTable rows;
  std::optional<CpuTuning> cpu;
};

TuningFile parse_file(std::string_view text, const std::string& name) {
  TuningFile file;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = fmt::format("{}:{}", name, number);
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == kCpu) {
      WB_CHECK(!file.cpu, "{}: a second line \"cpu\"", where);
      file.cpu.emplace();
      for (const CpuField& field : kCpuFields) parse_number(words, where, field.name, 1, kMostGrain, (*file.cpu).*field.member);
      expect_end(words, where);
      continue;
    }
    words = std::istringstream(line);
    TuningTable& rows = file.rows;
    rows.push_back(parse_row(words, where));
    WB_CHECK(rows.size() < 2 || rows[rows.size() - 2].row_bytes < rows.back().row_bytes, "{}: row_bytes = {} behind {}; rows must ascend", where,
             rows.back().row_bytes, rows[rows.size() - 2].row_bytes);
  }
  WB_CHECK(!file.rows.empty() || file.cpu, "{}: a table of tuning without a row", name);
  return file;
}

TuningFile read_file() {
  const char* file = std::getenv("WAYBILL_EXCHANGE_TUNING");
  if (file == nullptr || *file == '\0') return {};
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) WB_FAIL(ErrorCode::kIo, "cannot read {}, named by WAYBILL_EXCHANGE_TUNING", file);
  return parse_file(text.str(), file);
}
const TuningFile& this_file() {
  static const TuningFile file = read_file();
  return file;
}

// Three numbers that ranks read while they run.
struct CpuNumbers {
  std::atomic<int> value[kCpuFields.size()];
  CpuNumbers() { set(this_file().cpu.value_or(CpuTuning{})); }
  void set(const CpuTuning& tuning) {
    for (std::size_t i = 0; i < kCpuFields.size(); ++i) value[i].store(tuning.*kCpuFields[i].member, std::memory_order_relaxed);
  }
};
CpuNumbers& cpu_numbers() {
  static CpuNumbers numbers;
  return numbers;
}

}  // namespace

// Measured on two H200s (docs/perf/exchange.md). 14 CTAs fill the link with rows of 8 KB and more, 18 to 24 do not; beside a permute that fills the
// memory 24 are best. Below 4 KB the reduction needs all SMs: no fused combine; at 4 KB it wants deeper rings and more CTAs that combine.
const TuningTable& built_in_tuning() {
  static const TuningTable table{
      {4095, 18, 24, 32, 16, 3, 4, 0, 2}, {4096, 14, 32, 24, 16, 3, 3, 24, 2}, {8191, 16, 32, 24, 16, 3, 2, 16, 4}, {16384, 14, 32, 16, 16, 4, 2, 16, 4}};
  return table;
}

const TuningTable& tuning_table() { return this_file().rows.empty() ? built_in_tuning() : this_file().rows; }

CpuTuning cpu_tuning() {
  CpuTuning tuning;
  for (std::size_t i = 0; i < kCpuFields.size(); ++i) tuning.*kCpuFields[i].member = cpu_numbers().value[i].load(std::memory_order_relaxed);
  return tuning;
}

void set_cpu_tuning(const CpuTuning& tuning) {
  for (const CpuField& field : kCpuFields) {
    WB_CHECK(tuning.*field.member >= 1 && tuning.*field.member <= kMostGrain, "{} = {} is outside [1, {}]", field.name, tuning.*field.member, kMostGrain);
  }
  cpu_numbers().set(tuning);
}

const RowTuning& tuning_for(const TuningTable& table, std::int64_t row_bytes) {
  for (const RowTuning& row : table) {
    if (row_bytes <= row.row_bytes) return row;
  }
  return table.back();
}

TuningTable with_row(TuningTable table, const RowTuning& row) {
  const auto place = std::lower_bound(table.begin(), table.end(), row.row_bytes, [](const RowTuning& r, std::int64_t bytes) { return r.row_bytes < bytes; });
  if (place != table.end() && place->row_bytes == row.row_bytes) {
    *place = row;
  } else {
    table.insert(place, row);
  }
  return table;
}

TuningTable parse_tuning(std::string_view text, const std::string& name) {
  TuningTable rows = parse_file(text, name).rows;
  return rows.empty() ? built_in_tuning() : rows;
}

CpuTuning parse_cpu_tuning(std::string_view text, const std::string& name) { return parse_file(text, name).cpu.value_or(CpuTuning{}); }

std::string format_tuning(const CpuTuning& tuning) {
  std::string names = "# cpu", line = kCpu;
  for (const CpuField& field : kCpuFields) names += fmt::format(" {}", field.name), line += fmt::format(" {}", tuning.*field.member);
  return names + '\n' + line + '\n';
}

std::string format_tuning(const TuningTable& table) {
  std::string text = "# row_bytes";
  for (const Field& field : kFields) text += fmt::format(" {}", field.name);
  text += '\n';
  for (const RowTuning& row : table) {
    text += fmt::format("{}", row.row_bytes);
    for (const Field& field : kFields) text += fmt::format(" {}", row.*field.member);
    text += '\n';
  }
  return text;
}

}  // namespace waybill
