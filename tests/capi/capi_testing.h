// SPDX-License-Identifier: Apache-2.0
// Short forms for tests of the C ABI.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "waybill/waybill.h"

namespace waybill::capi_testing {

#define EXPECT_WB_OK(call) EXPECT_EQ((call), WB_OK) << wb_last_error()
#define ASSERT_WB_OK(call) ASSERT_EQ((call), WB_OK) << wb_last_error()

// A zeroed struct with its size set.
template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

inline wb_tensor tensor(const void* data, std::int32_t dtype, std::initializer_list<std::int64_t> shape) {
  wb_tensor result{};
  result.data = const_cast<void*>(data);
  result.dtype = dtype;
  for (const std::int64_t size : shape) result.shape[result.rank++] = size;
  return result;
}

// A route with memory of its own.
struct RouteMemory {
  std::vector<std::int16_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> counts;
  wb_route route = sized<wb_route>();

  RouteMemory(std::int64_t T, std::int64_t K, std::int64_t E)
      : ids(static_cast<std::size_t>(T * K), -1), weights(static_cast<std::size_t>(T * K)), counts(static_cast<std::size_t>(E)) {
    route.T = T;
    route.K = K;
    route.E = E;
    route.id_dtype = WB_I16;
    route.ids = ids.data();
    route.weights = weights.data();
    route.counts = counts.data();
  }
  RouteMemory(const RouteMemory&) = delete;
  RouteMemory& operator=(const RouteMemory&) = delete;
};

// Runs body(fabric, rank) on P threads of the caller. A body that fails must abort its fabric itself.
inline void on_ranks(int P, const std::function<void(wb_fabric*, int)>& body, std::int64_t timeout_ms = 20000, std::int32_t ranks_per_node = 0) {
  wb_group* group = nullptr;
  ASSERT_WB_OK(wb_group_create(P, timeout_ms, ranks_per_node, &group));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < P; ++rank) {
    wb_fabric* fabric = nullptr;
    ASSERT_WB_OK(wb_group_fabric(group, rank, &fabric));
    threads.emplace_back([&body, fabric, rank] { body(fabric, rank); });
  }
  for (std::thread& thread : threads) thread.join();
  wb_group_destroy(group);
}

}  // namespace waybill::capi_testing
