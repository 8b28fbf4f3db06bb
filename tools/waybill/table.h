// SPDX-License-Identifier: Apache-2.0
// A plain text table: columns as wide as their widest cell, numbers to the right.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace waybill::cli {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void add(std::vector<std::string> cells);  // as many as the header has
  std::string text() const;
  void print(std::FILE* stream) const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// "1.23 GB", "456 B"; decimal units.
std::string format_bytes(double bytes);

}  // namespace waybill::cli
