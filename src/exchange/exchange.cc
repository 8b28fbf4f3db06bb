// SPDX-License-Identifier: Apache-2.0
// Configuration: what is refused, what the budgets are, and the check that all ranks mean the same exchange.
#include "waybill/exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "exchange/impl.h"
#include "waybill/random.h"

namespace waybill {
namespace {

// What the ranks compare, field by field. Plain data of one size on every rank.
struct ConfigRecord {
  std::int64_t E, K, H, T_max, mode, combine_wire, hierarchy, alignment, debug_checks;
  double receive_factor;
  std::uint64_t placement, nodes;
};
static_assert(std::is_trivially_copyable_v<ConfigRecord>);

std::uint64_t placement_hash(const ExpertPlacement& placement) {
  std::uint64_t hash = 1;
  for (std::int64_t e = 0; e < placement.E; ++e) {
    const auto place = static_cast<std::uint64_t>(placement.rank_of(e)) << 32 | static_cast<std::uint64_t>(placement.local_of(e));
    hash = mix64(hash ^ place);
  }
  return hash;
}

std::uint64_t node_hash(const NodeMap& nodes) {
  std::uint64_t hash = 1;
  for (const int node : nodes.node_of) hash = mix64(hash ^ static_cast<std::uint64_t>(node));
  return hash;
}

template <class T>
void compare(const char* name, T first, T other, std::size_t rank) {
  WB_CHECK(first == other, "the ranks of an exchange must have one config: {} is {} on rank 0, but {} on rank {}", name, first, other, rank);
}

}  // namespace

void compare_configs(Fabric& fabric, const ExchangeConfig& config, const ExpertPlacement& placement, const NodeMap& nodes) {
  const ConfigRecord mine{config.E,
                          config.K,
                          config.H,
                          config.T_max,
                          static_cast<std::int64_t>(config.mode),
                          static_cast<std::int64_t>(config.combine_wire),
                          static_cast<std::int64_t>(config.hierarchy),
                          config.alignment,
                          config.debug_checks ? 1 : 0,
                          config.receive_factor,
                          placement_hash(placement),
                          node_hash(nodes)};
  std::vector<ConfigRecord> all(static_cast<std::size_t>(fabric.size()));
  fabric.all_gather(&mine, all.data(), sizeof(mine), "exchange config");
  for (std::size_t p = 1; p < all.size(); ++p) {
    const ConfigRecord &a = all[0], &b = all[p];
    compare("E", a.E, b.E, p);
    compare("K", a.K, b.K, p);
    compare("H", a.H, b.H, p);
    compare("T_max", a.T_max, b.T_max, p);
    compare("mode (0 eager, 1 captured)", a.mode, b.mode, p);
    compare("combine_wire (0 fp32, 1 bf16)", a.combine_wire, b.combine_wire, p);
    compare("hierarchy (0 flat, 1 two_level, 2 auto)", a.hierarchy, b.hierarchy, p);
    compare("alignment", a.alignment, b.alignment, p);
    compare("debug_checks", a.debug_checks, b.debug_checks, p);
    compare("receive_factor", a.receive_factor, b.receive_factor, p);
    compare("the hash of the expert placement", a.placement, b.placement, p);
    compare("the hash of the nodes' boundaries", a.nodes, b.nodes, p);
  }
}

void validate(const ExchangeConfig& config, int P) {
  block_placement(config.E, P);
  WB_CHECK(config.H >= 1, "exchange: H must be at least 1, got H = {}", config.H);
  WB_CHECK(config.K >= 1 && config.K <= config.E, "exchange: K must be in [1, E = {}], got K = {}", config.E, config.K);
  WB_CHECK(config.alignment >= 1, "exchange: alignment must be at least 1, got {}", config.alignment);
  WB_CHECK(config.T_max >= 0, "exchange: T_max must not be negative, got {}", config.T_max);
  WB_CHECK(std::isfinite(config.receive_factor) && config.receive_factor >= 0, "exchange: receive_factor must be finite and not negative, got {}",
           config.receive_factor);
  WB_CHECK(config.mode == ExchangeMode::kEager || config.T_max > 0,
           "exchange: captured mode has fixed sizes and needs T_max, the most tokens a rank may bring; got T_max = {}", config.T_max);
}

ReceiveBudget receive_budget(const ExchangeConfig& config, int P) {
  validate(config, P);
  const std::int64_t L = config.E / P;
  const std::int64_t tokens = P * config.T_max;
  ReceiveBudget budget;
  budget.slots = tokens * std::min(config.K, L);
  if (config.mode == ExchangeMode::kCaptured && config.receive_factor > 0) {
    const double slots = std::ceil(config.receive_factor * static_cast<double>(config.T_max) * static_cast<double>(config.K));
    if (slots < static_cast<double>(budget.slots)) budget.slots = static_cast<std::int64_t>(slots);
  }
  budget.rows = std::min(tokens, budget.slots);
  // At most min(L, slots) experts have slots, and each adds at most alignment - 1 rows; an expert has at most one slot a token.
  const std::int64_t by_slots = budget.slots + (config.alignment - 1) * std::min(L, budget.slots);
  budget.padded_slots = std::min(by_slots / config.alignment * config.alignment, L * round_up(tokens, config.alignment));
  return budget;
}

Exchange::Impl::Impl(const ExchangeConfig& c, const ExpertPlacement& where, Fabric& f, ThreadPool* threads)
    : config(c), placement(where), fabric(f), pool(threads), nodes(f.topology()) {
  validate(config, fabric.size());
  validate(placement);
  WB_CHECK(placement.E == config.E, "exchange: the placement has E = {} experts, the config E = {}", placement.E, config.E);
  WB_CHECK(placement.P == fabric.size(), "exchange: the placement is for P = {} ranks, the fabric has {}", placement.P, fabric.size());
  if (where.rank_table != nullptr) {
    rank_table.assign(where.rank_table, where.rank_table + where.E);
    local_table.assign(where.local_table, where.local_table + where.E);
    placement.rank_table = rank_table.data();
    placement.local_table = local_table.data();
  }
  compare_configs(fabric, config, placement, nodes);
  two_level = config.hierarchy == Hierarchy::kTwoLevel || (config.hierarchy == Hierarchy::kAuto && nodes.has_two_levels());
  budget = receive_budget(config, placement.P);
  send.resize(P());
  receive.resize(P());
}

std::byte* Exchange::Impl::buffer_bytes(Tensor& buffer, std::size_t count) {
  buffer.resize(DType::kU8, {static_cast<std::int64_t>(count)});
  return static_cast<std::byte*>(buffer.view().data);
}

void Exchange::Impl::check_idle(const char* call) const {
  WB_CHECK(!pending, "exchange: {} was called while a dispatch or combine is on its way; finish() it first", call);
}

void Exchange::Impl::count_distance() {
  for (std::size_t p = 0; p < P(); ++p) {
    if (nodes.node_of[p] != nodes.node_of[rank()]) bytes.between_nodes += static_cast<std::int64_t>(send[p].bytes);
  }
}

void Exchange::Impl::count_gather(std::size_t bytes_per_rank) {
  const std::size_t neighbours = nodes.ranks_of(nodes.node_of[rank()]).size();
  bytes.counts += static_cast<std::int64_t>((P() - 1) * bytes_per_rank);
  bytes.between_nodes += static_cast<std::int64_t>((P() - neighbours) * bytes_per_rank);
}

std::unique_ptr<ExchangeRequest> Exchange::Impl::start_rows(const char* name, std::int64_t& kind) {
  auto request = fabric.all_to_all_start(send, receive, name);
  for (std::size_t p = 0; p < P(); ++p) kind += p == rank() ? 0 : static_cast<std::int64_t>(send[p].bytes);
  count_distance();
  return request;
}

void Exchange::Impl::wait_rows(ExchangeRequest& request, Phase phase, PhaseTimes* times) {
  const auto start = std::chrono::steady_clock::now();
  request.wait();
  if (times == nullptr) return;
  times->wait_seconds[static_cast<std::size_t>(phase)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Exchange::Impl::all_to_all(const char* name, Phase phase, PhaseTimes* times) {
  const auto request = fabric.all_to_all_start(send, receive, name);
  count_distance();
  wait_rows(*request, phase, times);
}

void check_rows(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns) {
  WB_CHECK(view.rank == 2 && view.shape[0] == rows && view.shape[1] == columns && view.device.type == DeviceType::kCpu &&
               (view.dtype == DType::kF32 || view.dtype == DType::kBF16) && (view.size() == 0 || columns == 1 || view.stride[1] == 1),
           "{} must be f32 or bf16 [{}, {}] on cpu with contiguous columns, got {}", name, rows, columns, view.describe());
}

Exchange::Exchange(const ExchangeConfig& config, const ExpertPlacement& placement, Fabric& fabric, ThreadPool* pool)
    : impl_(std::make_unique<Impl>(config, placement, fabric, pool)) {}
Exchange::~Exchange() = default;

const ExchangeConfig& Exchange::config() const { return impl_->config; }
const ExpertPlacement& Exchange::placement() const { return impl_->placement; }
ReceiveBudget Exchange::budget() const { return impl_->budget; }
bool Exchange::two_level() const { return impl_->two_level; }
StatusWord& Exchange::status() { return impl_->status; }
const ExchangeBytes& Exchange::bytes() const { return impl_->bytes; }
void Exchange::reset_bytes() { impl_->bytes = {}; }

DispatchHandle Exchange::plan(const RouteView& route, PhaseTimes* times) {
  impl_->check_idle("plan");
  const PhaseScope scope(times, Phase::kPlan);
  return impl_->plan(route, times);
}
void Exchange::dispatch(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) {
  dispatch_start(handle, x, rows, times).finish(times);
}
void Exchange::combine(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) {
  combine_start(handle, z, out, times).finish(times);
}
void Exchange::return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) {
  impl_->check_idle("return_slot_values");
  const PhaseScope scope(times, Phase::kCombine);
  impl_->return_slot_values(handle, slot_values, d_weights, times);
}

}  // namespace waybill
