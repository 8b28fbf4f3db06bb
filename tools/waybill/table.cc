// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <fmt/format.h>

#include <algorithm>

#include "waybill/error.h"

namespace waybill::cli {
namespace {

bool is_number(const std::string& cell) { return !cell.empty() && (cell.find_first_of("0123456789") == 0 || cell[0] == '-' || cell[0] == '+'); }

}  // namespace

void Table::add(std::vector<std::string> cells) {
  WB_ASSERT(cells.size() == header_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::text() const {
  std::vector<std::size_t> widths(header_.size());
  std::vector<bool> right(header_.size(), !rows_.empty());
  for (std::size_t column = 0; column < header_.size(); ++column) {
    widths[column] = header_[column].size();
    for (const auto& row : rows_) {
      widths[column] = std::max(widths[column], row[column].size());
      right[column] = right[column] && (is_number(row[column]) || row[column].empty());
    }
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (std::size_t column = 0; column < cells.size(); ++column) {
      if (column > 0) out += "  ";
      out += right[column] ? fmt::format("{:>{}}", cells[column], widths[column]) : fmt::format("{:<{}}", cells[column], widths[column]);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    return out + "\n";
  };
  std::string out = line(header_);
  for (const auto& row : rows_) out += line(row);
  return out;
}

void Table::print(std::FILE* stream) const { fmt::print(stream, "{}", text()); }

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, units[unit]);
}

}  // namespace waybill::cli
