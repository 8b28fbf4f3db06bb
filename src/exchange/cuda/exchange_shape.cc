// SPDX-License-Identifier: Apache-2.0
// Sizes and offsets of the GPU exchange: the one place where windows and handles are laid out.
#include "exchange/cuda/exchange_shape.h"

#include <algorithm>
#include <limits>

namespace waybill::cuda {
namespace {

constexpr std::int64_t kWindowAlignment = 256;

std::int64_t tiles_of(std::int64_t items, std::int64_t tile) { return std::max<std::int64_t>(1, (items + tile - 1) / tile); }

// Hands out consecutive parts.
struct Carver {
  std::uint64_t used = 0;
  std::uint64_t take(std::int64_t bytes) {
    const std::uint64_t offset = used;
    used += static_cast<std::uint64_t>(round_up(bytes, kWindowAlignment));
    return offset;
  }
};

}  // namespace

void check_device_config(const ExchangeConfig& config, int P, const MapRoom& map) {
  validate(config, P);
  WB_CHECK(P <= kMaxDevicePeers, "the GPU exchange takes up to {} ranks, got P = {}", kMaxDevicePeers, P);
  WB_CHECK(config.T_max > 0, "the GPU exchange has fixed sizes and needs T_max, the most tokens a rank may bring; got T_max = {}", config.T_max);
  WB_CHECK(config.H % 8 == 0, "the GPU exchange takes H in multiples of 8, got H = {}", config.H);
  WB_CHECK(config.K <= kMaxPlanK || map.enabled, "the GPU exchange takes up to {} experts a token, got K = {}", kMaxPlanK, config.K);
  WB_CHECK(config.hierarchy != Hierarchy::kTwoLevel, "hierarchy = two_level: DeviceExchange is flat; NodeExchange is the two-level exchange of GPUs");
  const ReceiveBudget budget = receive_budget(config, P);
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  WB_CHECK(std::max(budget.padded_slots, map.padded_slots) <= kMost && config.T_max * std::min<std::int64_t>(P, config.K) <= kMost &&
               config.T_max * config.K <= kMost,
           "the GPU exchange counts in 31 bits: {} padded slots, {} rows to send, {} routes", std::max(budget.padded_slots, map.padded_slots),
           config.T_max * std::min<std::int64_t>(P, config.K), config.T_max * config.K);
  const std::int64_t L = config.E / P;
  WB_CHECK(L * 4 <= 200 * 1024, "the GPU exchange sorts up to {} experts a rank in shared memory, got {}", 50 * 1024, L);
}

ExchangeShape make_shape(const ExchangeConfig& config, int P, const MapRoom& map) {
  const ReceiveBudget budget = receive_budget(config, P);
  ExchangeShape s{};
  s.P = P, s.K = static_cast<std::int32_t>(config.K), s.D = map.enabled ? P : static_cast<std::int32_t>(std::min<std::int64_t>(P, config.K));
  s.E = static_cast<std::int32_t>(config.E), s.L = static_cast<std::int32_t>(config.E / P), s.T_max = static_cast<std::int32_t>(config.T_max);
  s.id_bytes = static_cast<std::int32_t>(size_bytes(route_id_dtype(config.E)));
  s.local_id_bytes = static_cast<std::int32_t>(size_bytes(route_id_dtype(s.L)));
  s.alignment = static_cast<std::int32_t>(config.alignment);
  s.row_budget = static_cast<std::int32_t>(budget.rows), s.slot_budget = static_cast<std::int32_t>(budget.slots);
  s.padded_budget = static_cast<std::int32_t>(std::max(budget.padded_slots, map.padded_slots));
  s.plan_tiles = static_cast<std::int32_t>(round_up(tiles_of(config.T_max, kPlanTile), 4));
  s.send_weights = 1;
  for (s.chunk_shift = 5; (config.T_max - 1) >> s.chunk_shift >= kMaxChunks;) ++s.chunk_shift;
  s.layout_rows = static_cast<std::int64_t>(s.L) * 16 <= 96 * 1024 ? kLayoutTile : 32;
  s.layout_tiles = static_cast<std::int32_t>(round_up(tiles_of(budget.rows, s.layout_rows), 4));
  return s;
}

std::vector<WindowSize> window_sizes(const ExchangeShape& s, ExchangeWindows& w) {
  const std::int64_t P = s.P;
  return {{"exchange control", &w.control, static_cast<std::int64_t>(sizeof(ExchangeControl))},
          {"exchange counts", &w.counts, 2 * P * 2 * P * 4},
          {"exchange rows' metadata", &w.row_meta, static_cast<std::int64_t>(s.row_budget) * static_cast<std::int64_t>(sizeof(RowMeta))},
          {"exchange slots' ids", &w.slot_ids, static_cast<std::int64_t>(s.slot_budget) * s.local_id_bytes},
          {"exchange slots' weights", &w.slot_weights, static_cast<std::int64_t>(s.slot_budget) * 4},
          {"exchange slots' values", &w.slot_values, static_cast<std::int64_t>(s.slot_budget) * 4},
          {"exchange tile counts", &w.tile_counts, 2 * P * s.plan_tiles * 4},
          {"exchange expert counts", &w.expert_tiles, static_cast<std::int64_t>(s.L) * s.layout_tiles * 4}};
}

std::size_t lay_out_handle(ExchangeShape& s) {
  const std::int64_t P = s.P, L = s.L, rows = s.row_budget;
  Carver carver;
  carver.take(static_cast<std::int64_t>(sizeof(HandleHeader)));
  s.h_base = static_cast<std::uint32_t>(carver.take(2 * P * 4));
  s.h_row_offsets = static_cast<std::uint32_t>(carver.take((P + 1) * 4));
  s.h_expert_counts = static_cast<std::uint32_t>(carver.take(L * 4));
  s.h_expert_offsets = static_cast<std::uint32_t>(carver.take((L + 1) * 4));
  s.h_entries = carver.take(static_cast<std::int64_t>(s.T_max) * s.D * static_cast<std::int64_t>(sizeof(RowEntry)));
  s.h_row_slot_offsets = carver.take((rows + 1) * 4);
  s.h_row_entry = carver.take(rows * 4);
  s.h_slot_position = carver.take(static_cast<std::int64_t>(s.slot_budget) * 4);
  s.h_slot_row = carver.take(static_cast<std::int64_t>(s.padded_budget) * 4);
  s.h_slot_weight = carver.take(static_cast<std::int64_t>(s.padded_budget) * 4);
  return carver.used;
}

std::vector<WindowSize> map_window_sizes(const ExchangeShape& s, ExchangeWindows& w) {
  const std::int64_t P = s.P, cells = P * s.T_max * s.E;
  return {{"exchange dense map", &w.map.cells, cells},
          {"exchange dense map's weights", &w.map.weights, cells * 4},
          {"exchange dense map's totals", &w.map.totals, P * 2 * 4},
          {"exchange dense map's tiles", &w.map.tiles, 2 * P * P * s.plan_tiles * 4}};
}

std::vector<WindowSize> all_window_sizes(const ExchangeConfig& config, int P, const MapRoom& map, ExchangeWindows& windows) {
  check_device_config(config, P, map);
  const ExchangeShape shape = make_shape(config, P, map);
  std::vector<WindowSize> all = window_sizes(shape, windows);
  if (!map.enabled) return all;
  for (const WindowSize& window : map_window_sizes(shape, windows)) all.push_back(window);
  return all;
}

std::size_t exchange_window_bytes(const ExchangeConfig& config, int P, const MapRoom& map) {
  ExchangeWindows ignored;
  std::size_t bytes = 0;
  for (const WindowSize& window : all_window_sizes(config, P, map, ignored)) bytes += static_cast<std::size_t>(round_up(window.bytes, kWindowAlignment));
  return bytes;
}

std::size_t row_window_bytes(const ExchangeConfig& config, int P, std::size_t row_bytes) {
  return static_cast<std::size_t>(receive_budget(config, P).rows) * row_bytes;
}

std::size_t slot_window_bytes(const ExchangeConfig& config, int P, std::size_t row_bytes) {
  return static_cast<std::size_t>(config.T_max * std::min<std::int64_t>(P, config.K)) * row_bytes;
}

ExchangeWindows book_exchange_windows(const ExchangeConfig& config, int P, const BookWindow& book, const MapRoom& map) {
  ExchangeWindows windows;
  for (const WindowSize& window : all_window_sizes(config, P, map, windows)) {
    *window.offset = book(window.name, static_cast<std::size_t>(window.bytes));
  }
  return windows;
}

}  // namespace waybill::cuda
