// SPDX-License-Identifier: Apache-2.0
// The exchange that a group's topology needs: over windows where all ranks are in one NVLink domain, over windows within a node and the rail between nodes
// where they are not. What callers do with it is the same.
#pragma once

#include <memory>

#include "exchange/cuda/device_exchange.h"
#include "fabric/cuda_local/rail.h"

namespace waybill::cuda {

// The ranks of a group: `nodes` of equally many, one behind the other; a launch's windows and peer table are those of one node.
struct RankGroup {
  int P = 1;  // all
  int nodes = 1;
  int per_node() const { return P / nodes; }
};

// The exchange of a node, for sizing and booking its windows with P = per_node(); one node: config itself, flat (two_level: with an fp32 wire, which is what
// two levels come to there). Refuses, with the values: P that nodes does not divide; several nodes: hierarchy flat, E that nodes does not divide, K above
// E / nodes. Budgets of rows and slots are those of config and P.
ExchangeConfig windows_config(const ExchangeConfig& config, const RankGroup& group);

// Of DeviceExchange::handle_bytes(), before there is one; the second: what it allocates for a rank beside windows and handles.
std::size_t exchange_handle_bytes(const ExchangeConfig& config, const RankGroup& group, const MapRoom& map = {});
std::size_t exchange_scratch_bytes(const ExchangeConfig& config, const RankGroup& group);

// config: of the whole group. rail: null, or of one node, where all ranks are in `ranks`' table; else outlives the exchange. Several nodes take the
// consecutive placement alone and no maps (kUnsupported). windows: booked with windows_config().
std::unique_ptr<DeviceExchange> make_exchange(const ExchangeConfig& config, const ExpertPlacement& placement, Rail* rail, const LocalRanks& ranks, int device,
                                              const ExchangeWindows& windows, const ExchangeTuning& tuning = {}, const MapRoom& map = {});

}  // namespace waybill::cuda
