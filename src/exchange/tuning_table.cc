// SPDX-License-Identifier: Apache-2.0
#include "exchange/tuning_table.h"

#include <array>
#include <cstdlib>
#include <fstream>
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

RowTuning parse_row(std::istringstream& line, const std::string& where) {
  RowTuning row;
  std::string rest;
  WB_CHECK(line >> row.row_bytes && row.row_bytes > 0, "{}: row_bytes must be a positive whole number", where);
  for (const Field& field : kFields) {
    WB_CHECK(line >> row.*field.member, "{}: {} is missing or no whole number", where, field.name);
    WB_CHECK(row.*field.member >= field.least && row.*field.member <= field.most, "{}: {} = {} is outside [{}, {}]", where, field.name, row.*field.member,
             field.least, field.most);
  }
  WB_CHECK(!(line >> rest), "{}: \"{}\" behind the last number", where, rest);
  return row;
}

TuningTable read_table() {
  const char* file = std::getenv("WAYBILL_EXCHANGE_TUNING");
  if (file == nullptr || *file == '\0') return built_in_tuning();
  std::ifstream in(file);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) WB_FAIL(ErrorCode::kIo, "cannot read {}, named by WAYBILL_EXCHANGE_TUNING", file);
  return parse_tuning(text.str(), file);
}

}  // namespace

// Measured on two H200s (docs/perf/exchange.md). 14 CTAs fill the link with rows of 8 KB and more, 18 to 24 do not; beside a permute that fills the
// memory 24 are best. Below 4 KB the reduction needs all SMs: no fused combine.
const TuningTable& built_in_tuning() {
  static const TuningTable table{{4095, 20, 24, 32, 16, 2, 4, 0, 2}, {8191, 16, 24, 32, 16, 2, 6, 32, 2}, {16384, 14, 24, 32, 16, 2, 6, 32, 2}};
  return table;
}

const TuningTable& tuning_table() {
  static const TuningTable table = read_table();
  return table;
}

const RowTuning& tuning_for(const TuningTable& table, std::int64_t row_bytes) {
  for (const RowTuning& row : table) {
    if (row_bytes <= row.row_bytes) return row;
  }
  return table.back();
}

TuningTable parse_tuning(std::string_view text, const std::string& name) {
  TuningTable table;
  std::istringstream lines{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    std::istringstream words(line);
    const std::string where = fmt::format("{}:{}", name, number);
    table.push_back(parse_row(words, where));
    WB_CHECK(table.size() < 2 || table[table.size() - 2].row_bytes < table.back().row_bytes, "{}: row_bytes = {} behind {}; rows must ascend", where,
             table.back().row_bytes, table[table.size() - 2].row_bytes);
  }
  WB_CHECK(!table.empty(), "{}: a table of tuning without a row", name);
  return table;
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
