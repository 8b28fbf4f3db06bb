// SPDX-License-Identifier: Apache-2.0
// Timing of repeated calls and its statistics.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bench_problem.h"
#include "waybill/fabric.h"

namespace waybill::cli {

struct Timing {
  double min_us = 0, p10_us = 0, p50_us = 0, p90_us = 0, p99_us = 0;
  std::int64_t iterations = 0;
  int slowest_rank = 0;  // the rank that was last most often

  double spread() const { return p50_us > 0 ? (p90_us - p10_us) / p50_us : 0; }
};

// Value at the share q of sorted samples, between neighbours linear; 0 without samples.
double percentile(const std::vector<double>& sorted, double q);
Timing summarise(std::vector<double> samples_us);

// Warm calls on this thread after 2 untimed ones.
Timing measure(const BenchOptions& options, const std::function<void()>& body);

// Collective: every rank calls it with its body. Each iteration starts behind a barrier; its time is that of the slowest rank. Equal on
// every rank.
Timing measure_ranks(const BenchOptions& options, Fabric& fabric, const std::function<void()>& body);
// Several bodies in turn, one call each a round, so that what disturbs the machine for a while disturbs them alike.
std::vector<Timing> measure_ranks(const BenchOptions& options, Fabric& fabric, const std::vector<std::function<void()>>& bodies);

// Bytes per second that `threads` threads of this process read from memory, measured once (a 256 MB buffer each, best of 3).
double memory_read_rate(int threads);

// Least time for `bytes` at that rate; 0 (no floor) for data that fits the last-level cache, which memory speed does not bound.
double memory_floor_us(double bytes, double bytes_per_us);

}  // namespace waybill::cli
