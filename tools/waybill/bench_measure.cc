// SPDX-License-Identifier: Apache-2.0
#include "bench_measure.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>

#include "waybill/thread_pool.h"

namespace waybill::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kWarmUps = 2;
constexpr std::int64_t kMaxIterations = 100000;

double micros_since(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

}  // namespace

double percentile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(position));
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Timing summarise(std::vector<double> samples_us) {
  std::sort(samples_us.begin(), samples_us.end());
  Timing timing;
  timing.iterations = static_cast<std::int64_t>(samples_us.size());
  timing.min_us = samples_us.empty() ? 0 : samples_us.front();
  timing.p10_us = percentile(samples_us, 0.10);
  timing.p50_us = percentile(samples_us, 0.50);
  timing.p90_us = percentile(samples_us, 0.90);
  timing.p99_us = percentile(samples_us, 0.99);
  return timing;
}

Timing measure(const BenchOptions& options, const std::function<void()>& body) {
  for (int i = 0; i < kWarmUps; ++i) body();
  std::vector<double> samples;
  const auto start = Clock::now();
  while (static_cast<std::int64_t>(samples.size()) < options.iterations ||
         (micros_since(start) < options.seconds * 1e6 && static_cast<std::int64_t>(samples.size()) < kMaxIterations)) {
    const auto begin = Clock::now();
    body();
    samples.push_back(micros_since(begin));
  }
  return summarise(std::move(samples));
}

std::vector<Timing> measure_ranks(const BenchOptions& options, Fabric& fabric, const std::vector<std::function<void()>>& bodies) {
  struct Samples {
    std::vector<double> us;
    std::map<int, std::int64_t> last_count;
  };
  std::vector<Samples> all(bodies.size());
  std::vector<double> times(static_cast<std::size_t>(fabric.size()));
  for (const auto& body : bodies) {
    for (int i = 0; i < kWarmUps; ++i) body();
  }
  const auto start = Clock::now();
  std::int64_t rounds = 0;
  for (bool more = true; more;) {
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      fabric.barrier("bench");
      const auto begin = Clock::now();
      bodies[i]();
      const double mine = micros_since(begin);
      fabric.all_gather(&mine, times.data(), sizeof(mine), "bench times");
      const auto slowest = std::max_element(times.begin(), times.end());
      all[i].us.push_back(*slowest);
      ++all[i].last_count[static_cast<int>(slowest - times.begin())];
    }
    ++rounds;
    // Rank 0 decides, so that all ranks stop together.
    const double wanted_us = options.seconds * 1e6 * static_cast<double>(bodies.size());
    std::int64_t go_on = rounds < options.iterations || (micros_since(start) < wanted_us && rounds < kMaxIterations);
    fabric.broadcast(&go_on, sizeof(go_on), 0, "bench go on");
    more = go_on != 0;
  }
  std::vector<Timing> timings;
  for (Samples& samples : all) {
    Timing& timing = timings.emplace_back(summarise(std::move(samples.us)));
    timing.slowest_rank =
        std::max_element(samples.last_count.begin(), samples.last_count.end(), [](const auto& a, const auto& b) { return a.second < b.second; })->first;
  }
  return timings;
}

Timing measure_ranks(const BenchOptions& options, Fabric& fabric, const std::function<void()>& body) {
  return measure_ranks(options, fabric, std::vector<std::function<void()>>{body}).front();
}

namespace {

double measure_memory_read_rate(int threads) {
  constexpr std::int64_t kWords = std::int64_t{1} << 25;  // 256 MB a thread, beyond any cache
  ThreadPool pool(threads);
  std::vector<std::vector<std::uint64_t>> buffers(static_cast<std::size_t>(threads), std::vector<std::uint64_t>(static_cast<std::size_t>(kWords), 1));
  std::atomic<std::uint64_t> sink{0};
  double best = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto begin = Clock::now();
    pool.parallel_for(threads, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        std::uint64_t sum = 0;
        for (const std::uint64_t word : buffers[static_cast<std::size_t>(i)]) sum += word;
        sink += sum;
      }
    });
    best = std::max(best, static_cast<double>(threads) * static_cast<double>(kWords) * 8 / (micros_since(begin) * 1e-6));
  }
  return best;
}

}  // namespace

double memory_read_rate(int threads) {
  static std::mutex mutex;
  static std::map<int, double> rates;
  const std::lock_guard lock(mutex);
  const auto [rate, is_new] = rates.try_emplace(threads, 0);
  if (is_new) rate->second = measure_memory_read_rate(threads);
  return rate->second;
}

double memory_floor_us(double bytes, double bytes_per_us) {
  constexpr double kUnknownCache = 64e6;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > (cache > 0 ? static_cast<double>(cache) : kUnknownCache) ? bytes / bytes_per_us : 0;
}

}  // namespace waybill::cli
