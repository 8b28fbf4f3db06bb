// SPDX-License-Identifier: Apache-2.0
// Lines of the module benchmark: a table on the terminal, records as JSON lines.
#pragma once

#include <array>
#include <cstdio>
#include <string>

#include "bench/cuda/moe/runner.h"

namespace waybill::cuda::moe_bench {

struct Row {
  std::string variant;  // "sparse captured", "dense-map + local slice eager", ...
  bool captured = false;
  StepTimes times;
  int host_waits = 0;
  std::size_t bytes = 0, predicted_bytes = 0;  // device memory of the stack with x, d_out, out, dx; 0: not known
  std::size_t exact_bytes = 0;                 // predicted with budgets of exactly what the hottest rank receives
  std::int64_t computed_rows = 0, dropped = 0;
  StepCounts counts{};  // all 0: not known
  double error = 0;     // the largest relative norm of the check
  PhaseSums phases{};   // of eager steps; all 0: not measured
};

class Report {
 public:
  explicit Report(const std::string& path);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;
  void add(const Problem& problem, const Row& row, double dense_tflops);
  // A kernel by itself; calls: how many the median is of.
  void add_control(const std::string& op, const Problem& problem, const std::string& variant, double us, double spread, int calls, double flops);
  void add_rate(const std::string& op, const std::string& name, double value, const std::string& unit, int calls);

 private:
  std::FILE* file_;
};

}  // namespace waybill::cuda::moe_bench
