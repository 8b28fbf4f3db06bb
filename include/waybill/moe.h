// SPDX-License-Identifier: Apache-2.0
// The MoE layer: gate, router, dispatch, grouped expert MLP, combine, and the exact backward of all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "waybill/activation.h"
#include "waybill/exchange.h"
#include "waybill/fabric.h"
#include "waybill/phase.h"
#include "waybill/recipe.h"
#include "waybill/router.h"

namespace waybill {

enum class AuxCounts : std::uint8_t { kDispatch = 0, kUnbiased = 1 };
enum class Recompute : std::uint8_t {
  kNone = 0,
  kActivation = 1,  // the activation output is recomputed in backward
  kLayer = 2,       // everything but the routes: dispatch and first matmul again; routing is never decided twice
};

struct MoeConfig {
  std::int64_t H = 0;         // model width
  std::int64_t E = 0, K = 0;  // experts, experts per token (copied into `router`)
  std::int64_t F = 0;         // expert inner width
  std::int64_t latent = 0;    // 0 = none; else experts see rows of this width: down-projection before dispatch, up after combine
  std::int64_t shared_F = 0;  // 0 = no shared expert; inner width of the shared expert (it stays on H)
  RouterConfig router{};
  ActivationConfig activation{};
  RecipeConfig recipe{};       // operands of the routed and shared experts' matmuls; the gate and latent projections are fp32
  bool expert_bias = false;    // biases on both expert matmuls; the second is multiplied by the routing weight
  float bias_update_rate = 0;  // aux-free balancing: step of the router bias per optimizer step; 0 = no router bias
  bool bias_subtract_mean = false;
  float aux_coefficient = 0, sequence_coefficient = 0, global_coefficient = 0, z_coefficient = 0;
  AuxCounts aux_counts = AuxCounts::kDispatch;
  std::int64_t sequence_length = 0;
  ExchangeMode mode = ExchangeMode::kEager;
  double receive_factor = 0;  // 0 = default of the mode: worst case in eager, 1.5 in captured
  std::int64_t T_max = 0;
  CombineWire combine_wire = CombineWire::kF32;
  Hierarchy hierarchy = Hierarchy::kFlat;  // of the exchange
  // The shared expert's matmuls that need no routed result run between the halves of dispatch, in forward and backward. Same bits.
  bool overlap_shared = true;
  std::int64_t alignment = 1;
  Recompute recompute = Recompute::kNone;
  bool debug_checks = false;
  // ETP: F is split over t ranks. The group's ranks are (P / t) x t, the slice j = rank % t is innermost; a rank holds slice j of
  // L = E t / P consecutive experts. b2 is used on slice 0 only (it must count once).
  int expert_tensor_parallel = 1;
  // Compact routes that are not legal (see DenseMapReason) take the dense-map path, with a log line, or are refused.
  bool allow_dense_map = true;
  bool force_dense_map = false;  // take the dense-map path always: the older design, to compare with
  // Capacity mode, the alternative to dropless: an expert takes at most ceil(capacity_factor * T * K / E) routes of a rank's T valid
  // tokens, first choices first; the others are dropped (MoeStep::dropped_routes). Padding to it takes the dense-map path.
  double capacity_factor = 0;  // 0 = dropless
  bool pad_to_capacity = false;

  std::int64_t row_width() const { return latent > 0 ? latent : H; }
  std::int64_t local_F() const { return F / expert_tensor_parallel; }
  std::int64_t inner_width() const { return activation_input_width(activation, local_F()); }  // columns of a rank's first matmul
  std::int64_t shared_inner_width() const { return activation_input_width(activation, shared_F); }
  std::int64_t L(int P) const { return E * expert_tensor_parallel / P; }
};
// Every rule a layer needs, the exchange's and the router's included; P = ranks of the expert-parallel group.
WB_API void validate(const MoeConfig& config, int P);

// Why a batch cannot use compact routes. Bits of a mask; describe() lists them in words.
enum DenseMapReason : std::uint32_t {
  kDenseMapNone = 0,
  kDenseMapDuplicateIds = 1u << 0,   // a replayed row names an expert twice
  kDenseMapForced = 1u << 1,         // MoeConfig::force_dense_map
  kDenseMapTopK = 1u << 2,           // K (x ETP) above what compact plans can number
  kDenseMapFabric = 1u << 3,         // the fabric engine has no compact exchange
  kDenseMapPadToCapacity = 1u << 4,  // every expert gets exactly its capacity
  kDenseMapCallerMap = 1u << 5,      // the caller gave a dense map instead of routes
};
WB_API std::string describe_dense_map(std::uint32_t reasons);

// Parameters of one rank, in memory of the caller, fp32 and contiguous. The same struct holds gradients.
struct MoeTensors {
  TensorView gate;         // [E, H]
  TensorView router_bias;  // [E], selection only, never a gradient; or null
  TensorView w1;           // [L, inner_width, row_width]; gate then up, concatenated
  TensorView w2;           // [L, row_width, local_F]
  TensorView b1;           // [L, inner_width] or null
  TensorView b2;           // [L, row_width] or null
  TensorView shared_w1;    // [shared inner_width, H] or null
  TensorView shared_w2;    // [H, shared_F] or null
  TensorView latent_down;  // [latent, H] or null
  TensorView latent_up;    // [H, latent] or null
};

// What one forward leaves for its backward and for statistics. One per micro-batch in flight; reuse keeps its memory.
// Kept for backward (saved_bytes): the routes, both sides' plans and, by Recompute,
//                kNone                                  kActivation     kLayer
//   logits       [T, E]                                 yes             gate matmul again
//   rows         [R, row_width] received                yes             dispatched again with the saved plan
//   h            [S, inner_width] first matmul          yes             again
//   a            [S, local_F] weight * activation       again           again
//   shared_h     [T, shared inner_width]                yes             again
//   shared_a     [T, shared_F]                          again           again
//   latent_out   [T, latent] combined, latent only      yes             yes
// The caller keeps x. Routing is never decided twice.
struct WB_API MoeStep {
  struct Saved;
  MoeStep();
  ~MoeStep();
  MoeStep(MoeStep&&) noexcept;
  MoeStep& operator=(MoeStep&&) noexcept;

  std::unique_ptr<Saved> saved;
  Route route;                            // this rank's routes
  std::vector<std::int64_t> counts;       // [E] routes per expert over all ranks of the statistics group, this micro-batch
  std::vector<std::int64_t> loss_counts;  // [E] the counts the losses use: `counts`, or those of AuxCounts::kUnbiased
  double valid_tokens = 0;                // tokens those counts cover
  std::int64_t slots = 0, rows = 0;       // received on this rank (no padding)
  // Captured mode: the largest demand of any rank of ep; a factor of max_slot_demand / (T_max * K * ETP) would have held it.
  std::int64_t max_slot_demand = 0, max_row_demand = 0;
  std::int64_t dropped_routes = 0;                  // this rank's, capacity mode only; `route` and `counts` are the router's decision before the drop
  RouterLosses losses;                              // this rank's share; summed over ranks = the loss. 0 when not training
  double global_loss = 0;                           // this rank's share of the global aux loss
  StatusWord status;                                // of this forward
  bool valid = true;                                // false after an overflow on any rank of the EP group: skip the update
  std::uint32_t dense_map_reasons = kDenseMapNone;  // not none: this batch took the dense-map path
  Tensor d_dense_map;                               // [T, E] after a backward, where the forward was given a dense map
  std::size_t saved_bytes = 0;                      // memory kept for backward
};

struct MoeForwardOptions {
  TensorView padding_mask;        // [T] u8, 1 = padding, or null
  const Route* replay = nullptr;  // take these routes' ids (weights come from the logits); given on every rank or on none
  // The caller's own routing: probabilities [T, E] fp32, 0 = not routed; given on every rank or on none. Takes the dense-map path;
  // the gate and the router take no part (no losses, no gate gradient), and backward leaves MoeStep::d_dense_map.
  TensorView dense_map;
  bool training = true;                                           // false: nothing is saved, no loss is computed, no counter moves
  double loss_tokens = 0;                                         // tokens of the global batch that aux and z are averaged over (0 = this call's, all ranks)
  double loss_sequences = 0;                                      // sequences of the global batch (0 = this call's, all ranks)
  const std::vector<std::int64_t>* accumulated_counts = nullptr;  // [E] sum of loss_counts of earlier micro-batches (global aux loss)
  double accumulated_tokens = 0;
  std::int64_t token_offset = 0;  // of row 0 in the global batch (forced balance)
  // Random numbers of the recipe (stochastic rounding, Hadamard signs), for this forward's backward too. One seed a layer, step and
  // micro-batch, the same on every rank of ep: the numbers of a routed expert are then a function of seed, expert and slot at any P.
  std::uint64_t rounding_seed = 0;
};

class WB_API MoeLayer {
 public:
  // ep: the expert-parallel group. world: the group that counts and losses are reduced over (contains ep's ranks); may be ep.
  // Both must outlive the layer. Collective over ep. Every forward makes one collective call on world (counts), whatever happens in ep.
  MoeLayer(const MoeConfig& config, Fabric& ep, Fabric& world, ThreadPool* pool = nullptr);
  ~MoeLayer();

  const MoeConfig& config() const;
  std::int64_t L() const;

  // out [T, H] = routed experts + shared expert. x [T, H] fp32; T may differ between ranks and may be 0. Collective. The routed part
  // of a padding token is exactly 0; the shared expert sees every row.
  // After an overflow (captured mode; step.valid is false on every rank of ep) out is written as 0 and means nothing.
  void forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, MoeStep& step, const MoeForwardOptions& options = {},
               PhaseTimes* times = nullptr);
  // dx [T, H] is written; gradients are accumulated (+=). Collective. loss_scale multiplies the auxiliary losses' gradients.
  // A step that is not valid leaves the gradients alone and writes dx = 0. A step may be used for one backward.
  void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx, MoeStep& step,
                float loss_scale = 1.0f, PhaseTimes* times = nullptr);

  // Skip and rerun: after an overflow read step.status (demand and capacity) and step.max_slot_demand, clear status(), raise the
  // factor and run the same batch again. 0 = worst case. Between steps only, collective over ep; eager mode has no budget to change.
  void set_receive_factor(double factor);
  double receive_factor() const;  // in force: 1.5 where captured mode was left at its default, 0 = worst case
  ReceiveBudget budget() const;

  // Counters of training forwards and backwards (evaluation moves none).
  const ExchangeBytes& bytes() const;  // since construction
  StatusWord& status();                // sticky: every forward's faults until clear()
  double expert_flops() const;         // multiply-adds x 2 of expert matmuls so far, valid rows only, forward and backward, no recompute
  std::int64_t num_dense_map_forwards() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace waybill
