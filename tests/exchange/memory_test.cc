// SPDX-License-Identifier: Apache-2.0
// No [T, E], [R, E] or other expert-wide memory in plan, dispatch and combine: every allocation of the program is watched, those
// of std::vector included.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "exchange/group.h"

namespace {
std::atomic<bool> g_watch{false};
std::atomic<std::size_t> g_largest{0}, g_count{0};

void* watched(std::size_t bytes) {
  if (g_watch.load(std::memory_order_relaxed)) {
    ++g_count;
    std::size_t seen = g_largest.load();
    while (bytes > seen && !g_largest.compare_exchange_weak(seen, bytes)) {
    }
  }
  void* pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}
}  // namespace

void* operator new(std::size_t bytes) { return watched(bytes); }
void* operator new[](std::size_t bytes) { return watched(bytes); }
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete[](void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { std::free(pointer); }

namespace waybill {
namespace {

using namespace testing_support;

struct Peak {
  std::size_t tensors = 0, vectors = 0;
};

// The largest single allocation of a forward and a backward step on 2 ranks.
Peak peak_of_a_step(std::int64_t T, std::int64_t K, std::int64_t E, std::int64_t H, ExchangeMode mode) {
  std::vector<Route> routes;
  for (std::uint64_t p = 0; p < 2; ++p) routes.push_back(random_route(T, K, E, {.seed = 70 + p}));
  AllocationTrace trace;
  g_largest = 0;
  g_count = 0;
  g_watch = true;
  run_ranks(2, [&](Fabric& fabric) {
    const auto p = static_cast<std::size_t>(fabric.rank());
    ExchangeConfig config;
    config.H = H;
    config.E = E;
    config.K = K;
    config.T_max = T;
    config.mode = mode;
    Exchange exchange(config, block_placement(E, 2), fabric);
    const Tensor x = Tensor::zeros(DType::kF32, {T, H});
    const DispatchHandle handle = exchange.plan(routes[p]);
    Tensor rows, out(DType::kF32, {T, H}), d_weights(DType::kF32, {T, K});
    exchange.dispatch(handle, x, rows);
    exchange.combine(handle, rows, out);
    exchange.dispatch(handle, x, rows);
    exchange.combine(handle, rows, out);
    exchange.return_slot_values(handle, handle.layout.slot_weight.data(), d_weights.as<float>());
  });
  g_watch = false;
  EXPECT_GT(g_count.load(), 0u);
  EXPECT_GT(trace.count(), 0u);
  return Peak{trace.largest_bytes(), g_largest.load()};
}

// T * K slots of 8 bytes bound every list; a byte map [T, E] or [R, E] would be larger than that by far.
TEST(ExchangeMemory, NothingExpertWideIsAllocated) {
  const std::int64_t T = 512, K = 4, E = 16384, H = 8;
  for (const ExchangeMode mode : {ExchangeMode::kEager, ExchangeMode::kCaptured}) {
    const Peak peak = peak_of_a_step(T, K, E, H, mode);
    const auto slots = static_cast<std::size_t>(2 * T * K);  // one rank may receive all of both
    const std::size_t list = std::max(slots * 16, static_cast<std::size_t>(E) * 8);
    EXPECT_LE(peak.vectors, list);
    EXPECT_LE(peak.tensors, std::max(list, static_cast<std::size_t>(2 * T * H) * 4));
    EXPECT_LT(list, static_cast<std::size_t>(T * E) / 8);  // even a bit map [T, E] would exceed the bound
  }
}

// Doubling E adds nothing that grows with T * E: the peak grows by at most what [E] lists grow.
TEST(ExchangeMemory, ThePeakDoesNotGrowWithTTimesE) {
  const Peak narrow = peak_of_a_step(2048, 4, 256, 8, ExchangeMode::kEager), wide = peak_of_a_step(2048, 4, 8192, 8, ExchangeMode::kEager);
  EXPECT_LE(wide.vectors, narrow.vectors * 2 + 8192 * 8);
  EXPECT_LE(wide.tensors, narrow.tensors * 2);
}

}  // namespace
}  // namespace waybill
