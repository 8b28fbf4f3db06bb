// SPDX-License-Identifier: Apache-2.0
// A fixed budget per expert and source rank. Padded: sizes do not depend on the routes at all, so counts need not be read by anyone.
#include <algorithm>
#include <vector>

#include "baselines/padded_stack.h"
#include "moe/capacity.h"

namespace waybill::baselines {
namespace {

// kept = the `capacity` largest weights of each expert; ties: earlier token, earlier slot. Returns how many routes were dropped.
std::int64_t drop_smallest(const RouteView& route, std::int64_t capacity, Route& kept) {
  if (kept.T() != route.T || kept.K() != route.K || kept.E() != route.E) kept = Route(route.T, route.K, route.E);
  const RouteView& out = kept.view();
  std::vector<std::vector<std::int64_t>> slots(static_cast<std::size_t>(route.E));
  for (std::int64_t i = 0; i < route.T * route.K; ++i) {
    out.set_id(i / route.K, i % route.K, -1);
    out.weights[i] = 0.0f;
    const std::int32_t id = route.id(i / route.K, i % route.K);
    if (is_route(id, route.E)) slots[static_cast<std::size_t>(id)].push_back(i);
  }
  std::int64_t dropped = 0;
  for (std::size_t e = 0; e < slots.size(); ++e) {
    std::vector<std::int64_t>& mine = slots[e];
    const std::int64_t keep = std::min<std::int64_t>(capacity, static_cast<std::int64_t>(mine.size()));
    const auto before = [&](std::int64_t a, std::int64_t b) { return route.weights[a] != route.weights[b] ? route.weights[a] > route.weights[b] : a < b; };
    if (keep < static_cast<std::int64_t>(mine.size())) std::nth_element(mine.begin(), mine.begin() + keep, mine.end(), before);
    dropped += static_cast<std::int64_t>(mine.size()) - keep;
    for (std::int64_t i = 0; i < keep; ++i) {
      const std::int64_t slot = mine[static_cast<std::size_t>(i)];
      out.set_id(slot / route.K, slot % route.K, static_cast<std::int32_t>(e));
      out.weights[slot] = route.weights[slot];
    }
  }
  kept.recount();
  return dropped;
}

class CapacityStack final : public BatchedStack {
 public:
  using BatchedStack::BatchedStack;
  const Route& kept_route() const override { return kept_; }

 private:
  const RouteView& routes_to_send(std::int64_t& pad_rows) override {
    const std::int64_t capacity = moe::expert_capacity(config_.capacity_factor, route_.T(), config_.moe.K, config_.moe.E);
    counters_.dropped_routes +=
        config_.drop_order == DropOrder::kPosition ? moe::drop_over_capacity(route_, capacity, kept_) : drop_smallest(route_, capacity, kept_);
    counters_.slots_visited += route_.T() * config_.moe.K;
    if (config_.pad_to_capacity) pad_rows = capacity;
    return kept_.view();
  }
  ExpertRows lay_out(std::vector<std::int64_t> counts) const override { return tight_rows(std::move(counts)); }

  Route kept_;
};

}  // namespace

std::unique_ptr<MoeStack> make_capacity_stack(const MoeStackConfig& config, Fabric& ep, ThreadPool* pool) {
  return std::make_unique<CapacityStack>(config, ep, pool);
}

}  // namespace waybill::baselines
