// SPDX-License-Identifier: Apache-2.0
#include "waybill/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace waybill {
namespace {

TEST(ThreadPool, VisitsEveryItemOnce) {
  ThreadPool pool(4);
  for (const std::int64_t count : {0, 1, 7, 1000}) {
    std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
    pool.parallel_for(count, 3, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
    });
    for (const auto& visit : visits) EXPECT_EQ(visit.load(), 1);
  }
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.parallel_for(100, 1,
                                 [](std::int64_t begin, std::int64_t) {
                                   if (begin == 42) throw std::runtime_error("42");
                                 }),
               std::runtime_error);
  std::atomic<int> sum{0};
  pool.parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end) { sum += static_cast<int>(end - begin); });
  EXPECT_EQ(sum.load(), 10);
}

TEST(ThreadPool, ANestedCallRunsInTheCallingThread) {
  ThreadPool pool(2);
  std::atomic<int> total{0};
  pool.parallel_for(4, 1,
                    [&](std::int64_t, std::int64_t) { pool.parallel_for(5, 1, [&](std::int64_t b, std::int64_t e) { total += static_cast<int>(e - b); }); });
  EXPECT_EQ(total.load(), 20);
}

TEST(ThreadPool, ManySmallJobsFinish) {
  ThreadPool pool(2);
  std::atomic<std::int64_t> total{0};
  for (int i = 0; i < 5000; ++i) pool.parallel_for(4, 1, [&](std::int64_t b, std::int64_t e) { total += e - b; });
  EXPECT_EQ(total.load(), 20000);
}

}  // namespace
}  // namespace waybill
