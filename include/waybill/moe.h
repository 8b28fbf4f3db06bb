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
  bool expert_bias = false;   // biases on both expert matmuls; the second is multiplied by the routing weight
  float bias_update_rate = 0;  // aux-free balancing: step of the router bias per optimizer step; 0 = no router bias
  bool bias_subtract_mean = false;
  float aux_coefficient = 0, sequence_coefficient = 0, global_coefficient = 0, z_coefficient = 0;
  AuxCounts aux_counts = AuxCounts::kDispatch;
  std::int64_t sequence_length = 0;
  ExchangeMode mode = ExchangeMode::kEager;
  double receive_factor = 0;  // 0 = default of the mode: worst case in eager, 1.5 in captured
  std::int64_t T_max = 0;
  CombineWire combine_wire = CombineWire::kF32;
  std::int64_t alignment = 1;
  Recompute recompute = Recompute::kNone;
  bool debug_checks = false;

  std::int64_t row_width() const { return latent > 0 ? latent : H; }
  std::int64_t inner_width() const { return activation_input_width(activation, F); }  // columns of the first matmul
};
// Every rule a layer needs, the exchange's and the router's included; P = ranks of the expert-parallel group.
WB_API void validate(const MoeConfig& config, int P);

// Parameters of one rank, in memory of the caller. The same struct holds gradients (fp32).
struct MoeTensors {
  TensorView gate;         // [E, H] fp32
  TensorView router_bias;  // [E] fp32, selection only, never a gradient; or null
  TensorView w1;           // [L, inner_width, row_width]; gate then up, concatenated
  TensorView w2;           // [L, row_width, F]
  TensorView b1;           // [L, inner_width] or null
  TensorView b2;           // [L, row_width] or null
  TensorView shared_w1;    // [shared inner_width, H] or null
  TensorView shared_w2;    // [H, shared_F] or null
  TensorView latent_down;  // [latent, H] or null
  TensorView latent_up;    // [H, latent] or null
};

// What one forward leaves for its backward and for statistics. One per micro-batch in flight.
struct MoeStep {
  struct Saved;
  MoeStep();
  ~MoeStep();
  MoeStep(MoeStep&&) noexcept;
  MoeStep& operator=(MoeStep&&) noexcept;

  std::unique_ptr<Saved> saved;
  Route route;                          // this rank's routes
  std::vector<std::int64_t> counts;     // [E] slots per expert over all ranks of the statistics group, this micro-batch
  double valid_tokens = 0;              // tokens those counts cover
  std::int64_t slots = 0, rows = 0;     // received on this rank
  RouterLosses losses;                  // this rank's share; summed over ranks = the loss
  double global_loss = 0;               // this rank's share of the global aux loss
  StatusWord status;
  bool valid = true;                    // false after an overflow on any rank: skip the update
  std::size_t saved_bytes = 0;          // memory kept for backward
};

struct MoeForwardOptions {
  TensorView padding_mask;              // [T] u8 or null
  const Route* replay = nullptr;        // take these routes
  bool training = true;                 // false: nothing is saved, no counter moves
  double loss_tokens = 0;               // tokens of the global batch that aux and z are averaged over (0 = this call's, all ranks)
  const std::vector<std::int64_t>* accumulated_counts = nullptr;  // [E] counts of earlier micro-batches of the step (global aux loss)
  double accumulated_tokens = 0;
  std::int64_t token_offset = 0;        // of row 0 in the global batch (forced balance)
};

class WB_API MoeLayer {
 public:
  // ep: the expert-parallel group. world: the group that counts and losses are reduced over (contains ep's ranks); may be ep.
  MoeLayer(const MoeConfig& config, Fabric& ep, Fabric& world, ThreadPool* pool = nullptr);
  ~MoeLayer();

  const MoeConfig& config() const;
  std::int64_t L() const;

  // out [T, H] = routed experts + shared expert. x [T, H] fp32; T may differ between ranks and may be 0. Collective.
  void forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, MoeStep& step, const MoeForwardOptions& options = {},
               PhaseTimes* times = nullptr);
  // dx [T, H] is written; gradients are accumulated (+=). Collective. loss_scale multiplies the auxiliary losses' gradients.
  void backward(const MoeTensors& parameters, const MoeTensors& gradients, const TensorView& x, const TensorView& d_out, const TensorView& dx, MoeStep& step,
                float loss_scale = 1.0f, PhaseTimes* times = nullptr);

  const ExchangeBytes& bytes() const;  // since construction
  StatusWord& status();
  double expert_flops() const;         // multiply-adds x 2 of expert matmuls so far, valid rows only, forward and backward

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace waybill
