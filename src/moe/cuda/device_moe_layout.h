// SPDX-License-Identifier: Apache-2.0
// Where things lie: the windows, scratch and saved memory of one rank, by config alone. The one place that knows sizes; the prediction of memory
// and the allocations both come from it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/cuda/device_moe.h"

namespace waybill::cuda {

// Refuses, by name, what the layer on GPUs does not do.
void check_device_moe(const MoeConfig& config, int P, const DeviceMoeOptions& options);

ExchangeConfig device_exchange_config(const MoeConfig& config);
// Room of the exchange for plans from dense maps.
MapRoom device_map_room(const MoeConfig& config, const DeviceMoeOptions& options);
// Slots of an expert-ordered buffer.
std::int64_t device_slots(const MoeConfig& config, int P);
// Reasons of the dense-map path that config and options give: known before any batch.
std::uint32_t device_dense_reasons(const MoeConfig& config, const DeviceMoeOptions& options);
// Routes that an expert takes from a rank of T_max tokens; 0: no padding to it.
std::int64_t padded_capacity(const MoeConfig& config);
// Of DeviceExchange::wire(): within one node nothing of two levels is rounded.
inline DType wire_dtype(const MoeConfig& config, const RankGroup& group) {
  const bool crosses = group.P > 1 && (group.nodes > 1 || config.hierarchy != Hierarchy::kTwoLevel);
  return config.combine_wire == CombineWire::kBF16 && crosses ? DType::kBF16 : DType::kF32;
}
// Of partials in their window: within a node of several they are f32.
inline DType partials_dtype(const MoeConfig& config, const RankGroup& group) { return group.nodes > 1 ? DType::kF32 : wire_dtype(config, group); }

inline constexpr std::uint64_t kNoPart = ~std::uint64_t{0};

// Offsets into the memory that a step owns on one rank.
struct DeviceMoeStepLayout {
  std::uint64_t ids, weights, counts, weight_factors;  // the route
  std::uint64_t logits;                                // f32 [T, E]
  std::uint64_t h, a;                                  // bf16 [S, inner] (or f32 [T, E]), [S, F]; kNoPart: scratch of the layer, or SlotMemory
  std::uint64_t shared_h, shared_a;                    // bf16 [T, shared inner], [T, shared_F]; the same
  std::uint64_t latent_out;                            // bf16 [T, latent]
  // i32: [E] counts of all ranks, then [E] those of AuxCounts::kUnbiased; [E] with the accumulated ones (global loss).
  std::uint64_t totals, global_totals;
  std::uint64_t sent_ids, sent_weights;  // the routes as they travel, [T, K t]; kNoPart: the route itself
  std::uint64_t cells;                   // bytes [T, E t]: the dense map
  std::uint64_t dense_offsets;           // i32 [2]: 0, and the rows that the shared expert sees: T, or 0 of an invalid step
  std::size_t bytes;
};
// The same of the layer's scratch. What a recompute mode keeps in no step lies here.
struct DeviceMoeScratchLayout {
  std::uint64_t logits, h, a, shared_h, shared_a;  // kNoPart where the steps have them
  std::uint64_t y;                                 // bf16 [S, W] (or a block of its columns), or f32 [T, H]; kNoPart: SlotMemory
  std::uint64_t x;                                 // bf16 [S, W]: rows of x in expert order (fp8: turned), where y is the rows' gradient then; the same
  std::uint64_t base;                              // f32 or bf16 [T, H]; kNoPart where the memory of `a` holds it
  std::uint64_t wire_base;                         // bf16 [T, H]: that sum rounded for the wire, where it is one
  std::uint64_t latent_rows, latent_gradient;      // bf16 [T, latent]: what is dispatched; d_latent_in
  std::uint64_t own_counts;                        // i32 [E] twice: this rank's, and of kUnbiased
  std::uint64_t node_counts;                       // i32 [nodes][num_totals]: of the other nodes
  std::uint64_t score_sums, losses;                // f64 [E + 1], [2][3]: the second where there are two auxiliary losses
  std::uint64_t d_slot_weight;                     // f32 [S]
  std::uint64_t d_weights;                         // f32 [T, K]
  std::uint64_t kept_ids, kept_weights;            // [T, K]: capacity mode with slices of F
  std::uint64_t keep_places;                       // i32, by keep_places(): capacity mode
  std::uint64_t d_expanded;                        // f32 [T, K t]: with slices of F
  std::uint64_t d_logits_more;                     // f32 [T, E]: of the global loss beside an aux loss; of losses beside duplicate ids
  std::uint64_t dropped;                           // i32 [3]: routes dropped; the capacity; whether a replayed row names an expert twice
  std::uint64_t d_map;                             // f32 [T, E t]: dense-map path
  std::uint64_t recipe;                            // by RecipeLayout (device_moe_recipe.h); recipes of blocks
  std::size_t bytes;
};
inline bool has_losses(const MoeConfig& c) {
  return c.aux_coefficient != 0 || c.sequence_coefficient != 0 || c.global_coefficient != 0 || c.z_coefficient != 0;
}
inline bool has_two_aux_losses(const MoeConfig& c) { return c.aux_coefficient != 0 && c.global_coefficient != 0; }
// The routes that travel are not those of the router.
inline bool changes_routes(const MoeConfig& c) { return c.capacity_factor > 0 || c.expert_tensor_parallel > 1; }
inline bool reduces_counts(const MoeConfig& c) { return has_losses(c) || c.bias_update_rate != 0; }
inline std::int64_t num_totals(const MoeConfig& c) { return reduces_counts(c) ? c.E * (c.aux_counts == AuxCounts::kUnbiased ? 2 : 1) : 0; }

DeviceMoeStepLayout step_layout(const MoeConfig& config, int P, const DeviceMoeOptions& options);
DeviceMoeScratchLayout scratch_layout(const MoeConfig& config, int P, const DeviceMoeOptions& options);

// What the gate and the matmuls take of the stream's work room, on a GPU of so many SMs.
std::size_t operations_bytes(const MoeConfig& config, std::int64_t S, int num_sms);

// Bytes of what has a row a slot, at S slots in expert order. `a` and y hold f32 [T, H] too, h and y the gradient of the logits, f32 [T, E].
struct SlotBytes {
  std::size_t h = 0, a = 0, y = 0, x = 0;
  std::size_t total() const { return h + a + y + x; }
};
SlotBytes bytes_of_slots(const MoeConfig& config, std::int64_t S, const DeviceMoeOptions& options);
// Of y: the row width, or that of a block of columns.
std::int64_t y_columns(const MoeConfig& config, const DeviceMoeOptions& options);
// The combine of dx runs beside the gradient of the first weights, and where that one's rows are then: in a buffer of their own, or in blocks of x_columns() in
// the memory of `a`, which leaves no room there for the base.
bool combines_beside(const MoeConfig& config, const DeviceMoeOptions& options);
inline bool copies_x_beside(const MoeConfig& config, const DeviceMoeOptions& options) {
  return combines_beside(config, options) && options.policy.gradient != DeviceMoePolicy::Rows::kGather && !config.recipe.is_blocked();
}
inline constexpr std::int64_t kLeastColumns = 64;  // of a block
// Weights' gradients in blocks of columns read copies of the rows; of shorter groups, on average, a list.
inline constexpr std::int64_t kShortGroup = 512;
// The options with what they leave to policy decided.
DeviceMoeOptions decided(const MoeConfig& config, int P, DeviceMoeOptions options);
inline bool copies_whole_x(const MoeConfig& config, const DeviceMoeOptions& options) {
  return copies_x_beside(config, options) && (options.policy.whole_x || config.local_F() < kLeastColumns);
}
inline bool copies_x_in_blocks(const MoeConfig& config, const DeviceMoeOptions& options) {
  return copies_x_beside(config, options) && !copies_whole_x(config, options);
}
std::int64_t x_columns(const MoeConfig& config);

// One rank is the whole group: nothing crosses a link. Matmuls read x and d_out themselves, results go from expert order to tokens at once; there are no
// windows of rows, and partials only where a shared expert's result is added to them in forward. A latent width keeps the general path, whose windows hold the
// projected rows.
inline bool is_home(const MoeConfig& config, const RankGroup& group) { return group.P == 1 && config.latent == 0; }
inline bool has_partials(const MoeConfig& config, const RankGroup& group) { return !is_home(config, group) || config.shared_F > 0; }

// Row windows beside those of the exchange: partials, which in backward hold the gradients of rows first, and the rows that steps keep (one for all of
// them where they are dispatched again).
struct DeviceMoeWindows {
  std::uint64_t partials = 0, gradients = 0, counts = 0;  // with resend_rows the rows are there as well
  std::uint64_t votes = 0;                                // [2 parities][P] i32: duplicate ids seen; where batches choose between the paths
};
// Batches choose between the paths: replayed routes are looked at first.
inline bool looks_for_duplicates(const MoeConfig& c, const DeviceMoeOptions& options) {
  return options.dense_map && c.mode == ExchangeMode::kEager && device_dense_reasons(c, options) == 0;
}
std::size_t counts_window_bytes(const MoeConfig& config, int per_node);  // [2 parities][per_node][num_totals] i32
int num_row_windows(const MoeConfig& config, const RankGroup& group, const DeviceMoeOptions& options);

}  // namespace waybill::cuda
