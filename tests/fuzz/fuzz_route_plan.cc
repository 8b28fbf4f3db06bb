// SPDX-License-Identifier: Apache-2.0
// Any ids: either refused, or the plan holds every valid route once and the receive layout every slot.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "waybill/error.h"
#include "waybill/route_plan.h"
#include "waybill/route_stats.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace waybill;
  if (size < 3) return 0;
  const std::int64_t K = 1 + data[0] % 8, L = 1 + data[1] % 9;
  const int P = 1 + data[2] % 5;
  const std::int64_t E = L * P, T = static_cast<std::int64_t>(size - 3) / K;
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < T * K; ++i) ids.push_back(static_cast<std::int8_t>(data[3 + i]));
  try {
    const Route route = Route::from_ids(T, K, E, ids);
    const RouteStats stats = route_stats(route.view(), block_placement(E, P));
    const RoutePlan plan = make_route_plan(route.view(), block_placement(E, P));
    if (plan.num_slots() != stats.num_routes || plan.num_rows() > plan.num_slots()) std::abort();
    // One rank's rows as if it were the only source.
    std::vector<std::int64_t> row_offsets(static_cast<std::size_t>(P) + 1, plan.row_offsets[1]),
        slots(plan.slot_offsets.begin(), plan.slot_offsets.begin() + plan.row_offsets[1] + 1);
    row_offsets[0] = 0;
    const std::int64_t num_slots = slots.back();
    const ReceiveLayout layout = make_receive_layout(P, L, row_offsets, slots, plan.slot_expert.data(), plan.slot_weight.data(), 1 + data[0] % 3);
    if (layout.S() != num_slots || layout.S_padded() < num_slots) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
