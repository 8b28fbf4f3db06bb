// SPDX-License-Identifier: Apache-2.0
// DeviceExchange's plan from dense maps.
#include "core/cuda/cuda_error.h"
#include "exchange/cuda/device_exchange.h"
#include "exchange/cuda/map_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kBarrierPhase = 300;  // wait errors of the barriers around the maps

}  // namespace

void DeviceExchange::plan_map(DeviceHandle& handle, std::span<const DeviceMap> maps, cudaStream_t stream) const {
  check_one_node("plan_map()");
  WB_CHECK(map_.enabled, "plan_map: the exchange was made without room for maps");
  WB_CHECK(maps.size() == static_cast<std::size_t>(num_ranks()), "plan_map: {} ranks of this launch, got {} maps", num_ranks(), maps.size());
  for (std::size_t i = 0; i < maps.size(); ++i) {
    const DeviceMap& m = maps[i];
    WB_CHECK(m.T >= 0 && m.T <= config_.T_max, "plan_map: T = {} tokens on rank {} are outside [0, T_max = {}]", m.T, rank(static_cast<int>(i)), config_.T_max);
    WB_CHECK(m.T == 0 || m.cells != nullptr || (m.route.ids != nullptr && m.route.weights != nullptr),
             "plan_map: rank {} brings {} tokens and neither a map nor ids and weights", rank(static_cast<int>(i)), m.T);
  }
  for (std::size_t i = 0; i < maps.size(); ++i) handle.T_.at(i) = maps[i].T;
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < maps.size(); ++i) {
    q.call[i].a = maps[i].cells != nullptr ? nullptr : maps[i].route.ids, q.call[i].b = maps[i].route.weights;
    q.call[i].c = const_cast<float*>(maps[i].cells), q.call[i].d = const_cast<std::int32_t*>(maps[i].capacity);
  }
  launch_group_barrier_kernel(params_.ranks, kBarrierPhase, 1, stream);  // the peers have read the former maps, and rows of the former plan
  check_launch("group_barrier");
  launch_map_push(q, map_windows_, stream);
  check_launch("exchange_map_push");
  launch_group_barrier_kernel(params_.ranks, kBarrierPhase + 1, 1, stream);
  check_launch("group_barrier");
  launch_map_count(q, map_windows_, stream);
  check_launch("exchange_map_count");
  launch_map_scan(q, map_windows_, stream);
  check_launch("exchange_map_scan");
  launch_map_fill(q, map_windows_, stream);
  check_launch("exchange_map_fill");
}

const std::uint8_t* DeviceExchange::map_cells(int index) const {
  return params_.ranks.table.base[rank(index)] + map_windows_.cells + static_cast<std::int64_t>(rank(index)) * config_.T_max * config_.E;
}

void DeviceExchange::return_map_values(const DeviceHandle& handle, std::span<const std::uint8_t* const> cells, std::span<const float* const> values,
                                       std::span<float* const> d_map, cudaStream_t stream) const {
  const auto count = static_cast<std::size_t>(num_ranks());
  WB_CHECK(cells.size() == count && values.size() == count && d_map.size() == count, "return_map_values: {} ranks of this launch, got {} values, {} d_map",
           count, values.size(), d_map.size());
  ExchangeParams q = with(handle);
  for (std::size_t i = 0; i < count; ++i) q.call[i].a = values[i];
  launch_slot_values_gather(q, tuning_.overlap_launches, stream);
  check_launch("exchange_slot_values_gather");
  for (std::size_t i = 0; i < count; ++i) q.call[i].b = cells[i], q.call[i].c = d_map[i];
  launch_map_values(q, spinning_ctas(map_values_kernel(), kRowThreads, 0, tuning_.value_ctas), stream);
  check_launch("exchange_map_values");
}

void DeviceExchange::return_map_routes(std::span<const DeviceRoute> routes, std::span<const float* const> d_map, std::span<float* const> d_weights,
                                       cudaStream_t stream) const {
  const auto count = static_cast<std::size_t>(num_ranks());
  WB_CHECK(routes.size() == count && d_map.size() == count && d_weights.size() == count,
           "return_map_routes: {} ranks of this launch, got {} routes, {} d_map, {} d_weights", count, routes.size(), d_map.size(), d_weights.size());
  ExchangeParams q = params_;
  for (std::size_t i = 0; i < count; ++i) {
    q.call[i].T = static_cast<std::int32_t>(routes[i].T), q.call[i].a = routes[i].ids, q.call[i].b = d_map[i], q.call[i].c = d_weights[i];
  }
  launch_map_routes(q, stream);
  check_launch("exchange_map_routes");
}

}  // namespace waybill::cuda
