// SPDX-License-Identifier: Apache-2.0
// plan: sizes travel first (and with them faults, so that every rank refuses alike), then slots per row, local ids and weights.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "exchange/impl.h"

namespace waybill {

// What a rank tells each peer before anything else. 24 bytes.
struct Exchange::Impl::Header {
  std::int64_t rows;  // that will come
  std::int64_t slots;
  std::int32_t fault;      // 1: the sender refuses this call; its text follows in an all_gather
  std::int32_t node_rows;  // two-level: rows that come to the receiver as gateway
};

namespace {

// A message to one rank: [slots] fp32 weights, [slots] local ids, [rows] u16 slots per row, and for a gateway the set of ranks that
// each of its rows goes on to. One message, one rendezvous.
struct MessageLayout {
  std::int64_t rows = 0, slots = 0;
  std::size_t id_bytes = 2;
  std::size_t weights_bytes() const { return static_cast<std::size_t>(slots) * sizeof(float); }
  std::size_t ids_bytes() const { return static_cast<std::size_t>(slots) * id_bytes; }
  std::size_t counts_bytes() const { return static_cast<std::size_t>(rows) * sizeof(std::uint16_t); }
  std::size_t masks_bytes = 0;
  std::size_t bytes() const { return weights_bytes() + ids_bytes() + counts_bytes() + masks_bytes; }
};

std::size_t align_up(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

template <class Id>
void narrow_ids(const std::int32_t* ids, std::int64_t count, std::byte* target) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Id id = static_cast<Id>(ids[i]);
    std::memcpy(target + static_cast<std::size_t>(i) * sizeof(Id), &id, sizeof(Id));
  }
}

template <class Id>
void widen_ids(const std::byte* source, std::int64_t count, std::int32_t* ids) {
  for (std::int64_t i = 0; i < count; ++i) {
    Id id;
    std::memcpy(&id, source + static_cast<std::size_t>(i) * sizeof(Id), sizeof(Id));
    ids[i] = id;
  }
}

void pack_message(const RoutePlan& plan, std::size_t to, const MessageLayout& layout, std::span<const std::byte> masks, std::byte* target) {
  const std::int64_t first_row = plan.row_offsets[to];
  const std::int64_t first_slot = plan.slot_offsets[static_cast<std::size_t>(first_row)];
  if (layout.slots > 0) std::memcpy(target, plan.slot_weight.data() + first_slot, layout.weights_bytes());
  target += layout.weights_bytes();
  if (layout.id_bytes == 2)
    narrow_ids<std::int16_t>(plan.slot_expert.data() + first_slot, layout.slots, target);
  else
    narrow_ids<std::int32_t>(plan.slot_expert.data() + first_slot, layout.slots, target);
  target += layout.ids_bytes();
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    const auto row = static_cast<std::size_t>(first_row + r);
    const auto count = static_cast<std::uint16_t>(plan.slot_offsets[row + 1] - plan.slot_offsets[row]);
    std::memcpy(target + static_cast<std::size_t>(r) * sizeof(count), &count, sizeof(count));
  }
  if (!masks.empty()) std::memcpy(target + layout.counts_bytes(), masks.data(), masks.size());
}

// Arrived metadata in row order, over all source ranks.
struct RowMetadata {
  std::vector<std::int64_t> row_slot_offsets;
  std::vector<std::int32_t> slot_expert;
  std::vector<float> slot_weight;
};

// Appends one message. The sender's slots per row must add up to the slots it announced.
void unpack_message(const std::byte* source, const MessageLayout& layout, std::size_t from, RowMetadata& metadata) {
  const std::size_t first = metadata.slot_expert.size();
  metadata.slot_expert.resize(first + static_cast<std::size_t>(layout.slots));
  metadata.slot_weight.resize(metadata.slot_expert.size());
  if (layout.slots > 0) std::memcpy(metadata.slot_weight.data() + first, source, layout.weights_bytes());
  source += layout.weights_bytes();
  if (layout.id_bytes == 2)
    widen_ids<std::int16_t>(source, layout.slots, metadata.slot_expert.data() + first);
  else
    widen_ids<std::int32_t>(source, layout.slots, metadata.slot_expert.data() + first);
  source += layout.ids_bytes();
  std::int64_t end = static_cast<std::int64_t>(first);
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    std::uint16_t count;
    std::memcpy(&count, source + static_cast<std::size_t>(r) * sizeof(count), sizeof(count));
    end += count;
    metadata.row_slot_offsets.push_back(end);
  }
  if (end != static_cast<std::int64_t>(metadata.slot_expert.size())) {
    WB_FAIL(ErrorCode::kInternal, "plan: rank {} announced {} slots, its rows name {}", from, layout.slots, end - static_cast<std::int64_t>(first));
  }
}

std::int64_t row_slots(const RoutePlan& plan, std::size_t p) {
  return plan.slot_offsets[static_cast<std::size_t>(plan.row_offsets[p + 1])] - plan.slot_offsets[static_cast<std::size_t>(plan.row_offsets[p])];
}

}  // namespace

DispatchHandle Exchange::Impl::plan(const RouteView& route, PhaseTimes* times) {
  WB_CHECK(route.E == config.E && route.K == config.K, "plan: the route has E = {}, K = {}, the exchange E = {}, K = {}", route.E, route.K, config.E, config.K);
  DispatchHandle handle;
  handle.plan = make_route_plan(route, placement);
  const std::string fault = local_fault(route, handle.plan);
  if (two_level) plan_node_rows(handle.plan, nodes, static_cast<int>(rank()), handle.nodes, node_masks);
  const std::vector<Header> headers = exchange_headers(handle, fault, times);
  throw_faults(headers, fault);
  status.num_bad_ids += handle.plan.num_bad_ids;
  if (handle.plan.num_bad_ids > 0) status.flags |= kStatusBadId;
  handle.valid = config.mode == ExchangeMode::kEager || agree_on_budget(handle, headers, times);
  if (handle.valid) {
    exchange_metadata(handle, headers, times);
    count_plan(route, handle);
  } else {
    handle.layout = make_receive_layout(placement.P, placement.L(), std::vector<std::int64_t>(P() + 1, 0), {0}, nullptr, nullptr, config.alignment);
  }
  if (config.debug_checks) check_dropless(route, handle, times);
  return handle;
}

// Why this rank cannot take part; empty where it can.
std::string Exchange::Impl::local_fault(const RouteView& route, const RoutePlan& plan) const {
  if (config.mode == ExchangeMode::kCaptured && route.T > config.T_max) return fmt::format("T = {} tokens exceed T_max = {}", route.T, config.T_max);
  if (!config.debug_checks) return {};
  try {
    validate(route);
  } catch (const Error& error) {
    return error.what();
  }
  if (plan.num_bad_ids > 0) return fmt::format("{} ids are outside [-1, {})", plan.num_bad_ids, config.E);
  return {};
}

std::vector<Exchange::Impl::Header> Exchange::Impl::exchange_headers(const DispatchHandle& handle, const std::string& fault, PhaseTimes* times) {
  const RoutePlan& plan = handle.plan;
  std::vector<Header> mine(P()), theirs(P());
  for (std::size_t p = 0; p < P(); ++p) {
    const std::int64_t node_rows = two_level ? handle.nodes.send_offsets[p + 1] - handle.nodes.send_offsets[p] : 0;
    mine[p] = Header{plan.row_offsets[p + 1] - plan.row_offsets[p], row_slots(plan, p), fault.empty() ? 0 : 1, static_cast<std::int32_t>(node_rows)};
    send[p] = {&mine[p], sizeof(Header)};
    receive[p] = {&theirs[p], sizeof(Header)};
  }
  all_to_all("plan sizes", Phase::kPlan, times);
  bytes.counts += static_cast<std::int64_t>((P() - 1) * sizeof(Header));
  return theirs;
}

// One rank's refusal is every rank's refusal, with the same text.
void Exchange::Impl::throw_faults(const std::vector<Header>& headers, const std::string& fault) {
  if (std::none_of(headers.begin(), headers.end(), [](const Header& header) { return header.fault != 0; })) return;
  std::array<char, 256> mine{};
  fault.copy(mine.data(), mine.size() - 1);
  std::vector<std::array<char, 256>> texts(P());
  fabric.all_gather(mine.data(), texts.data(), sizeof(mine), "plan refusal");
  for (std::size_t p = 0; p < P(); ++p) WB_CHECK(headers[p].fault == 0, "plan refused by rank {}: {}", p, texts[p].data());
}

// Captured mode. True where every rank's demand fits its budget.
bool Exchange::Impl::agree_on_budget(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times) {
  std::array<std::int64_t, 2> demand{};  // slots, rows
  for (const Header& header : headers) {
    demand[0] += header.slots;
    demand[1] += header.rows;
  }
  std::vector<std::array<std::int64_t, 2>> demands(P());
  const auto start = std::chrono::steady_clock::now();
  fabric.all_gather(demand.data(), demands.data(), sizeof(demand), "plan demand");
  if (times != nullptr) {
    times->wait_seconds[static_cast<std::size_t>(Phase::kPlan)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  count_gather(sizeof(demand));
  bool fits = true;
  for (const auto& [slots, rows] : demands) {
    handle.max_slot_demand = std::max(handle.max_slot_demand, slots);
    handle.max_row_demand = std::max(handle.max_row_demand, rows);
    fits = fits && slots <= budget.slots && rows <= budget.rows;
  }
  if (demand[0] > budget.slots) status.flags |= kStatusSlotOverflow;
  if (demand[1] > budget.rows) status.flags |= kStatusRowOverflow;
  if (demand[0] > budget.slots || demand[1] > budget.rows) {
    status.slot_demand = std::max(status.slot_demand, demand[0]);
    status.row_demand = std::max(status.row_demand, demand[1]);
    status.slot_capacity = budget.slots;
    status.row_capacity = budget.rows;
  }
  return fits;
}

void Exchange::Impl::exchange_metadata(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times) {
  const std::size_t id_bytes = size_bytes(route_id_dtype(placement.L()));
  std::vector<MessageLayout> to(P()), from(P());
  const std::size_t own_mask = two_level ? nodes.mask_bytes(nodes.node_of[rank()]) : 0;
  std::size_t send_size = 0, receive_size = 0;
  for (std::size_t p = 0; p < P(); ++p) {
    to[p] =
        MessageLayout{handle.plan.row_offsets[p + 1] - handle.plan.row_offsets[p], row_slots(handle.plan, p), id_bytes, two_level ? node_masks[p].size() : 0};
    from[p] = MessageLayout{headers[p].rows, headers[p].slots, id_bytes, static_cast<std::size_t>(headers[p].node_rows) * own_mask};
    send_size += align_up(to[p].bytes());
    receive_size += align_up(from[p].bytes());
  }
  std::byte* outgoing = send_bytes(send_size);
  std::byte* incoming = receive_bytes(receive_size);
  for (std::size_t p = 0; p < P(); ++p) {
    pack_message(handle.plan, p, to[p], two_level ? std::span<const std::byte>(node_masks[p]) : std::span<const std::byte>(), outgoing);
    send[p] = {outgoing, to[p].bytes()};
    receive[p] = {incoming, from[p].bytes()};
    outgoing += align_up(to[p].bytes());
    incoming += align_up(from[p].bytes());
    if (p == rank()) continue;
    bytes.weights += static_cast<std::int64_t>(to[p].weights_bytes());
    bytes.ids += static_cast<std::int64_t>(to[p].ids_bytes());
    bytes.counts += static_cast<std::int64_t>(to[p].counts_bytes() + to[p].masks_bytes);
  }
  all_to_all("plan slots", Phase::kPlan, times);

  RowMetadata metadata;
  metadata.row_slot_offsets.push_back(0);
  std::vector<std::int64_t> row_offsets(P() + 1, 0), node_rows(P());
  std::vector<const std::byte*> masks(P());
  for (std::size_t p = 0; p < P(); ++p) {
    row_offsets[p + 1] = row_offsets[p] + from[p].rows;
    const auto* message = static_cast<const std::byte*>(receive[p].data);
    unpack_message(message, from[p], p, metadata);
    node_rows[p] = headers[p].node_rows;
    masks[p] = message + (from[p].bytes() - from[p].masks_bytes);
  }
  if (two_level) plan_forwards(node_rows, masks, nodes, static_cast<int>(rank()), handle.nodes);
  handle.layout = make_receive_layout(placement.P, placement.L(), std::move(row_offsets), std::move(metadata.row_slot_offsets), metadata.slot_expert.data(),
                                      metadata.slot_weight.data(), config.alignment);
}

void Exchange::Impl::count_plan(const RouteView& route, const DispatchHandle& handle) {
  const RoutePlan& plan = handle.plan;
  const std::int64_t remote = plan.num_rows() - (plan.row_offsets[rank() + 1] - plan.row_offsets[rank()]);
  const std::vector<std::int64_t>& sent = two_level ? handle.nodes.send_offsets : plan.row_offsets;
  for (std::size_t p = 0; p < P(); ++p) {
    const std::int64_t rows = sent[p + 1] - sent[p];
    if (nodes.node_of[p] != nodes.node_of[rank()]) bytes.rows_between_nodes += rows;
    if (p != rank()) bytes.rows += rows;
    if (two_level && p != rank()) bytes.rows += handle.nodes.forward_offsets[p + 1] - handle.nodes.forward_offsets[p];
  }
  bytes.dense_route_map += route.T * config.E;
  bytes.compact_route += route.T * config.K * static_cast<std::int64_t>(size_bytes(route.id_dtype));
  bytes.dense_probability_row += remote * config.E * 4;
  bytes.local_probability_slice += remote * placement.L() * 4;
}

// Every valid route of every rank is a slot on exactly one rank (or none anywhere, after an overflow).
void Exchange::Impl::check_dropless(const RouteView& route, const DispatchHandle& handle, PhaseTimes*) {
  std::int64_t routes = 0;
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) routes += is_route(route.id(t, k), route.E) ? 1 : 0;
  }
  std::array<std::int64_t, 2> sums = {routes, handle.layout.S()};
  fabric.all_reduce(std::span<std::int64_t>(sums), ReduceOp::kSum, "plan dropless");
  count_gather(sizeof(sums));
  if (handle.valid && sums[0] != sums[1]) {
    WB_FAIL(ErrorCode::kInternal, "dropless does not hold: {} routes became {} slots over {} ranks", sums[0], sums[1], P());
  }
}

}  // namespace waybill
