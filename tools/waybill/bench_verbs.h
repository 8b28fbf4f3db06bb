// SPDX-License-Identifier: Apache-2.0
// The parts of `waybill bench`, one file each, and what they share.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <vector>

#include "bench_problem.h"
#include "waybill/random.h"
#include "waybill/thread_pool.h"

namespace waybill::cli {

void register_bench_router(CLI::App& bench);
void register_bench_gemm(CLI::App& bench);
void register_bench_exchange(CLI::App& bench);
void register_bench_moe(CLI::App& bench);

inline int threads_per_rank(const BenchOptions& options, int P) { return options.threads > 0 ? options.threads : std::max(1, num_usable_cores() / P); }

inline std::vector<float> random_floats(std::int64_t count, std::uint64_t key, float scale = 1.0f) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = scale * random_normal(key, i);
  return values;
}

}  // namespace waybill::cli
