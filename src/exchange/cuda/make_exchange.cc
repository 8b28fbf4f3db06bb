// SPDX-License-Identifier: Apache-2.0
#include "exchange/cuda/make_exchange.h"

#include "exchange/cuda/exchange_shape.h"
#include "exchange/cuda/node_exchange.h"

namespace waybill::cuda {

ExchangeConfig windows_config(const ExchangeConfig& config, const RankGroup& group) {
  WB_CHECK(group.nodes >= 1 && group.P % group.nodes == 0, "{} ranks cannot make {} nodes of equally many", group.P, group.nodes);
  if (group.nodes == 1) {
    ExchangeConfig flat = config;
    flat.hierarchy = Hierarchy::kFlat;
    if (config.hierarchy == Hierarchy::kTwoLevel) flat.combine_wire = CombineWire::kF32;  // what the CPU engine does where nothing crosses nodes
    return flat;
  }
  WB_CHECK(config.hierarchy != Hierarchy::kFlat, "hierarchy = flat needs all ranks in one NVLink domain; the group has {} nodes of {}: two_level or auto",
           group.nodes, group.per_node());
  return node_config(config, group.nodes);
}

std::size_t exchange_handle_bytes(const ExchangeConfig& config, const RankGroup& group, const MapRoom& map) {
  ExchangeShape shape = make_shape(windows_config(config, group), group.per_node(), map);
  return lay_out_handle(shape) + (group.nodes > 1 ? NodePlan(config, group.nodes).bytes : 0);
}

std::size_t exchange_scratch_bytes(const ExchangeConfig& config, const RankGroup& group) {
  return group.nodes > 1 ? 3 * NodePlan(config, group.nodes).scratch_bytes : 0;
}

std::unique_ptr<DeviceExchange> make_exchange(const ExchangeConfig& config, const ExpertPlacement& placement, Rail* rail, const LocalRanks& ranks, int device,
                                              const ExchangeWindows& windows, const ExchangeTuning& tuning, const MapRoom& map) {
  const int nodes = rail == nullptr ? 1 : rail->num_nodes();
  const ExchangeConfig inside = windows_config(config, {nodes * ranks.table.size, nodes});
  if (nodes == 1) return std::make_unique<DeviceExchange>(inside, placement, ranks, device, windows, tuning, map);
  if (map.enabled) WB_FAIL(ErrorCode::kUnsupported, "plans from dense maps go within one NVLink domain, this group has {} nodes", nodes);
  if (placement.rank_table != nullptr) {
    WB_FAIL(ErrorCode::kUnsupported, "an exchange between {} nodes takes consecutive experts a rank, not a placement by tables", nodes);
  }
  return std::make_unique<NodeExchange>(config, *rail, ranks, device, windows, tuning);
}

}  // namespace waybill::cuda
