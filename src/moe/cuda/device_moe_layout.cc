// SPDX-License-Identifier: Apache-2.0
#include "moe/cuda/device_moe_layout.h"

#include <algorithm>

#include "core/cuda/dense_matmul.h"
#include "exchange/cuda/exchange_shape.h"
#include "moe/capacity.h"
#include "moe/cuda/device_moe_recipe.h"
#include "moe/cuda/sent_routes.h"
#include "ops/gemm/cuda/fp8_run.h"
#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Hands out consecutive parts of a memory whose size is not known yet.
struct Carver {
  std::size_t used = 0;
  std::uint64_t take(std::int64_t elements, std::size_t element_bytes) {
    const std::uint64_t offset = used;
    used += aligned(static_cast<std::size_t>(elements) * element_bytes);
    return offset;
  }
  std::uint64_t take_if(bool wanted, std::int64_t elements, std::size_t element_bytes) { return wanted ? take(elements, element_bytes) : kNoPart; }
};

}  // namespace

std::int64_t padded_capacity(const MoeConfig& c) { return c.pad_to_capacity ? moe::expert_capacity(c.capacity_factor, c.T_max, c.K, c.E) : 0; }

ExchangeConfig device_exchange_config(const MoeConfig& c) {
  ExchangeConfig exchange;
  const int t = c.expert_tensor_parallel;
  exchange.H = c.row_width(), exchange.E = c.E * t, exchange.K = c.K * t, exchange.T_max = c.T_max;
  exchange.mode = ExchangeMode::kCaptured;  // fixed budgets in both modes; what differs is their default
  exchange.receive_factor = c.receive_factor == 0 && c.mode == ExchangeMode::kCaptured ? 1.5 : c.receive_factor;
  exchange.combine_wire = c.combine_wire, exchange.hierarchy = c.hierarchy, exchange.alignment = c.alignment, exchange.debug_checks = c.debug_checks;
  return exchange;
}

bool combines_beside(const MoeConfig& c, const DeviceMoeOptions& options) {
  // fp8: the shared expert's gradients, which come before the combine, use the scratch in which the operands of dW1 lie.
  const bool is_taken = c.recipe.kind == Recipe::kFP8 && c.shared_F > 0;
  return options.policy.combine_sms > 0 && options.nodes == 1 && !options.resend_rows && options.column_blocks == 1 && !is_taken;
}

DeviceMoeOptions decided(const MoeConfig& c, int P, DeviceMoeOptions options) {
  constexpr std::int64_t kWideRow = 2048;
  if (options.column_blocks != 0) return options;
  const bool can = !c.recipe.is_blocked() && !c.expert_bias && is_home(c, {P, options.nodes}) && options.policy.combine_sms == 0;
  const bool pays = options.exact_sizes && c.shared_F == 0 && c.row_width() >= kWideRow && c.T_max * c.K > kShortGroup * c.L(P);
  options.column_blocks = can && pays ? 2 : 1;
  return options;
}

std::int64_t y_columns(const MoeConfig& c, const DeviceMoeOptions& options) {
  const std::int64_t W = c.row_width(), blocks = options.column_blocks;
  return std::min(W, ((W + blocks - 1) / blocks + kLeastColumns - 1) / kLeastColumns * kLeastColumns);
}

std::int64_t x_columns(const MoeConfig& c) {
  const std::int64_t F = c.local_F(), unit = F >= 256 ? 256 : kLeastColumns;  // tiles of the matmul
  return std::min(c.row_width(), F / unit * unit);
}

namespace {

// d_logits lie there once dh is used up.
std::int64_t h_bytes(const MoeConfig& c, std::int64_t S) { return std::max(S * c.inner_width() * 2, c.T_max * c.E * 4); }

}  // namespace

SlotBytes bytes_of_slots(const MoeConfig& c, std::int64_t S, const DeviceMoeOptions& options) {
  const std::int64_t base = c.T_max * c.H * 4, logits = c.T_max * c.E * 4;
  const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  return {bytes(h_bytes(c, S)), bytes(std::max(S * c.local_F() * 2, base)), bytes(std::max({S * y_columns(c, options) * 2, base, logits})),
          bytes(copies_whole_x(c, options) ? S * c.row_width() * 2 : 0)};
}

std::uint32_t device_dense_reasons(const MoeConfig& c, const DeviceMoeOptions& options) {
  std::uint32_t reasons = kDenseMapNone;
  if (c.force_dense_map) reasons |= kDenseMapForced;
  if (c.pad_to_capacity) reasons |= kDenseMapPadToCapacity;
  if (c.K * c.expert_tensor_parallel > kMaxPlanK) reasons |= kDenseMapTopK;
  if (!options.compact_fabric) reasons |= kDenseMapFabric;
  return reasons;
}

MapRoom device_map_room(const MoeConfig& c, const DeviceMoeOptions& options) {
  // L experts of P capacities each.
  return {options.dense_map || device_dense_reasons(c, options) != kDenseMapNone, c.E * c.expert_tensor_parallel * padded_capacity(c)};
}

std::int64_t device_slots(const MoeConfig& c, int P) {
  return std::max(receive_budget(device_exchange_config(c), P).padded_slots, c.E * c.expert_tensor_parallel * padded_capacity(c));
}

DeviceMoeStepLayout step_layout(const MoeConfig& c, int P, const DeviceMoeOptions& options) {
  const bool exact_sizes = options.exact_sizes;
  const std::int64_t S = device_slots(c, P), T = c.T_max;
  Carver carver;
  DeviceMoeStepLayout s{};
  s.ids = carver.take(T * c.K, size_bytes(route_id_dtype(c.E)));
  s.weights = carver.take(T * c.K, 4), s.counts = carver.take(c.E, 4), s.weight_factors = carver.take(T, 4);
  s.logits = carver.take_if(c.recompute <= Recompute::kActivation, T * c.E, 4);
  s.h = carver.take_if(!exact_sizes && c.recompute <= Recompute::kActivation, h_bytes(c, S), 1);
  s.a = carver.take_if(!exact_sizes && c.recompute <= Recompute::kNone, S * c.local_F(), 2);
  s.shared_h = carver.take_if(c.recompute <= Recompute::kActivation, c.shared_F > 0 ? T * c.shared_inner_width() : 0, 2);
  s.shared_a = carver.take_if(c.recompute <= Recompute::kNone, T * c.shared_F, 2);
  s.latent_out = carver.take(T * c.latent, 2);
  s.totals = carver.take(num_totals(c), 4), s.global_totals = carver.take(c.global_coefficient != 0 ? c.E : 0, 4), s.dense_offsets = carver.take(2, 4);
  const std::int64_t t = c.expert_tensor_parallel;
  s.sent_ids = carver.take_if(changes_routes(c), T * c.K * t, size_bytes(route_id_dtype(c.E * t)));
  s.sent_weights = carver.take_if(changes_routes(c), T * c.K * t, 4);
  s.cells = carver.take_if(device_map_room(c, options).enabled, T * c.E * t, 1);
  s.bytes = carver.used;
  return s;
}

DeviceMoeScratchLayout scratch_layout(const MoeConfig& c, int P, const DeviceMoeOptions& options) {
  const std::int64_t S = device_slots(c, P), T = c.T_max, W = c.row_width();
  const bool exact_sizes = options.exact_sizes;
  Carver carver;
  DeviceMoeScratchLayout s{};
  s.logits = carver.take_if(c.recompute > Recompute::kActivation, T * c.E, 4);
  s.h = carver.take_if(!exact_sizes && c.recompute > Recompute::kActivation, h_bytes(c, S), 1);
  s.a = carver.take_if(!exact_sizes && c.recompute > Recompute::kNone, S * c.local_F(), 2);
  s.shared_h = carver.take_if(c.recompute > Recompute::kActivation, c.shared_F > 0 ? T * c.shared_inner_width() : 0, 2);
  s.shared_a = carver.take_if(c.recompute > Recompute::kNone, T * c.shared_F, 2);
  const std::int64_t base = T * c.H * 4, turned_x = static_cast<std::int64_t>(recipe_y_bytes(c, S, c.L(P)));
  const bool is_apart = turned_x > 0 && combines_beside(c, options);
  s.y = carver.take_if(!exact_sizes, std::max({S * y_columns(c, options) * 2, base, T * c.E * 4, is_apart ? 0 : turned_x}), 1);
  s.x = carver.take_if(!exact_sizes && (copies_whole_x(c, options) || is_apart), is_apart ? turned_x : S * W * 2, 1);
  const DType wire = wire_dtype(c, {P, options.nodes});
  s.wire_base = carver.take(c.shared_F > 0 && c.latent == 0 && wire == DType::kBF16 ? T * c.H : 0, 2);
  // With a shared expert or a latent width it is a sum of f32.
  const std::int64_t own_base = T * c.H * (c.latent > 0 || c.shared_F > 0 ? 4 : static_cast<std::int64_t>(size_bytes(wire)));
  s.base = carver.take_if(copies_x_in_blocks(c, options) || (!exact_sizes && S * c.local_F() * 2 < base), copies_x_in_blocks(c, options) ? own_base : base, 1);
  s.latent_rows = carver.take(T * c.latent, 2), s.latent_gradient = carver.take(T * c.latent, 2);
  s.own_counts = carver.take(num_totals(c), 4), s.node_counts = carver.take(options.nodes > 1 ? options.nodes * num_totals(c) : 0, 4);
  s.score_sums = carver.take(has_losses(c) ? c.E + 1 : 0, 8), s.losses = carver.take(6, 8);
  s.d_slot_weight = carver.take(S, 4);
  s.d_weights = carver.take(T * c.K, 4);
  const bool is_sliced = c.expert_tensor_parallel > 1, is_cut = c.capacity_factor > 0;
  s.kept_ids = carver.take(is_sliced && is_cut ? T * c.K : 0, size_bytes(route_id_dtype(c.E))),
  s.kept_weights = carver.take(is_sliced && is_cut ? T * c.K : 0, 4);
  s.keep_places = carver.take(is_cut ? static_cast<std::int64_t>(keep_places(T, c.K, c.E)) : 0, 4);
  s.d_expanded = carver.take(is_sliced ? T * c.K * c.expert_tensor_parallel : 0, 4);
  s.d_logits_more = carver.take(has_two_aux_losses(c) || (has_losses(c) && looks_for_duplicates(c, options)) ? T * c.E : 0, 4), s.dropped = carver.take(3, 4);
  s.d_map = carver.take(device_map_room(c, options).enabled ? T * c.E * c.expert_tensor_parallel : 0, 4);
  s.recipe = carver.take(static_cast<std::int64_t>(recipe_layout(c, P).bytes), 1);
  s.bytes = carver.used;
  return s;
}

std::size_t counts_window_bytes(const MoeConfig& config, int per_node) { return static_cast<std::size_t>(2 * per_node * num_totals(config)) * 4; }

int num_row_windows(const MoeConfig& config, const RankGroup& group, const DeviceMoeOptions& options) {
  if (options.resend_rows || is_home(config, group)) return 0;
  return config.recompute <= Recompute::kActivation ? options.num_steps : 1;
}

std::size_t DeviceMoeLayer::arena_bytes(const MoeConfig& config, int P, const DeviceMoeOptions& given) {
  check_device_moe(config, P, given);
  const DeviceMoeOptions options = decided(config, P, given);
  const RankGroup group{P, options.nodes};
  const int G = group.per_node();
  const ExchangeConfig exchange = windows_config(device_exchange_config(config), group);
  const auto W = static_cast<std::size_t>(config.row_width());
  const std::size_t rows = aligned(row_window_bytes(exchange, G, 2 * W)),
                    partials = has_partials(config, group) ? aligned(row_window_bytes(exchange, G, W * size_bytes(partials_dtype(config, group)))) : 0;
  constexpr std::size_t kControl = 128 * 1024;  // what a group keeps at the start of its arenas
  return exchange_window_bytes(exchange, G, device_map_room(config, options)) + partials +
         rows * static_cast<std::size_t>(num_row_windows(config, group, options)) + aligned(counts_window_bytes(config, G)) +
         (looks_for_duplicates(config, options) ? aligned(static_cast<std::size_t>(2 * G) * 4) : 0) + kControl;
}

namespace {

// Partial tiles of weight gradients [m, n] of many rows, where a group alone does not fill the GPU: as ops/gemm/cuda/grouped_run.cc and fp8_run.cc cut them,
// whose tiles differ.
struct PartialTiles {
  std::int64_t clusters;
  bool is_fp8;
  std::size_t bytes(std::int64_t m, std::int64_t n, std::int64_t rows) const {
    Fp8Problem problem{};
    problem.form = GemmForm::kTN, problem.m = m, problem.n = n, problem.rows = rows, problem.groups = 1;
    const GemmTuning bf16;
    const Fp8Tuning fp8 = choose_fp8_tuning(problem, static_cast<int>(2 * clusters));
    const std::int64_t bf16_width = n <= 128 ? 128 : 256, width = is_fp8 ? fp8.tile.block_n : bf16_width;
    const std::int64_t height = is_fp8 ? fp8_limits::block_m(fp8.tile) : gemm_limits::kBlockM;
    const std::int64_t block = is_fp8 ? fp8_limits::kBlockK : gemm_limits::kBlockK;
    const int slices = is_fp8 ? fp8.slices_per_cluster : bf16.slices_per_cluster, least = is_fp8 ? fp8.min_slice_blocks : bf16.min_slice_blocks;
    const std::int64_t m_tiles = (m + height - 1) / height, n_tiles = (n + width - 1) / width;
    const std::int64_t units = m_tiles / 2 * n_tiles + m_tiles % 2 * ((n_tiles + 1) / 2);
    if (units >= slices * clusters || rows < 2 * block * least) return 0;
    return static_cast<std::size_t>(2 * gemm_limits::max_split_units(static_cast<int>(clusters), slices) * height * width * 4);
  }
};

}  // namespace

std::size_t operations_bytes(const MoeConfig& c, std::int64_t S, int num_sms) {
  const std::int64_t T = c.T_max, W = c.row_width();
  const PartialTiles tiles{num_sms / 2, c.recipe.kind == Recipe::kFP8};
  const std::size_t gate = aligned(static_cast<std::size_t>(T * 2 * c.E * 2)) + aligned(static_cast<std::size_t>(2 * c.E * c.H * 2)) +
                           aligned(static_cast<std::size_t>(2 * c.E * c.H * 4));
  std::size_t partials = std::max(tiles.bytes(c.inner_width(), W, S), tiles.bytes(W, c.local_F(), S));
  if (c.shared_F > 0) partials = std::max({partials, tiles.bytes(c.shared_inner_width(), c.H, T), tiles.bytes(c.H, c.shared_F, T)});
  return std::max(kDenseWorkspaceBytes + gate, partials);  // one after the other (core/cuda/work_room.h)
}

DeviceMoeMemory DeviceMoeLayer::memory(const MoeConfig& config, int P, const DeviceMoeOptions& given, std::int64_t exact_slots, int num_sms) {
  const DeviceMoeOptions options = decided(config, P, given);
  DeviceMoeMemory memory;
  memory.windows = arena_bytes(config, P, options);
  std::int64_t S = device_slots(config, P);
  const RankGroup group{P, options.nodes};
  const ExchangeConfig exchange = device_exchange_config(config);
  memory.scratch = scratch_layout(config, P, options).bytes + exchange_scratch_bytes(exchange, group);
  memory.step = step_layout(config, P, options).bytes + exchange_handle_bytes(exchange, group, device_map_room(config, options));
  if (options.exact_sizes) {
    constexpr std::size_t kUnit = std::size_t{2} << 20;  // GrowableBuffer's
    const std::int64_t mean = config.T_max * config.K, L = config.L(P);
    S = std::min(S, (exact_slots > 0 ? exact_slots : mean) + L * (config.alignment - 1));
    const auto grown = [](std::size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; };
    const SlotBytes slots = bytes_of_slots(config, S, options);
    (config.recompute <= Recompute::kActivation ? memory.step : memory.scratch) += grown(slots.h);
    (config.recompute <= Recompute::kNone ? memory.step : memory.scratch) += grown(slots.a);
    memory.scratch += grown(slots.y) + grown(slots.x);
  }
  memory.operations = operations_bytes(config, S, num_sms);
  return memory;
}

}  // namespace waybill::cuda
