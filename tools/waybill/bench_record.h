// SPDX-License-Identifier: Apache-2.0
// One measured number with all that is needed to compare it: load, rows, spread, floor, implementation, and whether it was checked.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_loads.h"
#include "bench_measure.h"

namespace waybill::cli {

struct BenchRecord {
  std::string op, variant;
  Timing timing;
  double floor_us = 0;          // 0 = none stated
  std::string floor_kind;       // "memory read" or "matmul rate": what the floor divides by
  double bytes = 0, flops = 0;  // moved and computed by one call, by formula; 0 = not counted
  bool plan_included = false;
  std::string implementation;
  LoadSummary load;
  // Anything that is not a time has its own name, unit and value, and no timing.
  std::string metric = "time", unit = "us";
  double value = 0;
  std::string evidence;  // empty: "distributed op" over ranks, "kernel" on one
};

// Collects the records of one command, prints them as a table and writes them as JSON.
class BenchReport {
 public:
  BenchReport(const BenchOptions& options, const BenchShape& shape, int threads);
  void add(BenchRecord record) { records_.push_back(std::move(record)); }
  void set_checked(bool checked) { checked_ = checked; }
  nlohmann::json to_json() const;
  void finish() const;  // table to stdout (not with --json -), file when asked for

 private:
  nlohmann::json record_json(const BenchRecord& record) const;
  const BenchOptions& options_;
  BenchShape shape_;
  int threads_;
  bool checked_ = false;
  std::vector<BenchRecord> records_;
};

// Runs `probe` while listening to the library's selection log: which implementation of `op` took the call. Not while ranks run.
std::string chosen_implementation(const std::string& op, const std::function<void()>& probe);

}  // namespace waybill::cli
