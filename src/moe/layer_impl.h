// SPDX-License-Identifier: Apache-2.0
// The layer's state and its steps. forward() and backward() in layer_forward.cc and layer_backward.cc are the table of contents.
#pragma once

#include <memory>
#include <vector>

#include "moe/dense_mlp.h"
#include "moe/dense_path.h"
#include "moe/eligibility.h"
#include "moe/experts.h"
#include "moe/row_path.h"
#include "moe/saved.h"

namespace waybill {

struct MoeLayer::Impl {
  Impl(const MoeConfig& config, Fabric& ep, Fabric& world, ThreadPool* pool);

  // One call's inputs, handed from step to step.
  struct Forward {
    const MoeTensors& parameters;
    const TensorView& x;
    const TensorView& out;
    MoeStep& step;
    MoeStep::Saved& saved;  // the step's, or the layer's own when nothing is kept
    const MoeForwardOptions& options;
    PhaseTimes* times;
  };
  struct Backward {
    const MoeTensors& parameters;
    const MoeTensors& gradients;
    const TensorView& x;
    const TensorView& d_out;
    const TensorView& dx;
    MoeStep& step;
    MoeStep::Saved& saved;
    float loss_scale;
    PhaseTimes* times;
  };

  // layer.cc
  void build_paths();
  moe::RowPath& path(const MoeStep& step);
  TensorView expert_rows(const MoeTensors& parameters, const TensorView& x, PhaseTimes* times);  // x, or its latent projection
  moe::ExpertContext experts(const MoeTensors& parameters, const MoeStep::Saved& saved, PhaseTimes* times) const;
  moe::SharedExpert shared(const MoeTensors& parameters, const MoeStep::Saved& saved);
  RouterInputs router_inputs(const MoeTensors& parameters, const TensorView& logits, const MoeStep::Saved& saved) const;
  RouterLossConfig loss_config(bool global) const;
  RouterLossInputs loss_inputs(const MoeStep::Saved& saved, bool global) const;
  bool has_losses() const {
    return config.aux_coefficient != 0 || config.sequence_coefficient != 0 || config.global_coefficient != 0 || config.z_coefficient != 0;
  }
  bool two_aux_losses() const { return config.aux_coefficient != 0 && config.global_coefficient != 0; }
  // A buffer of the step where Recompute (up to `most`) keeps it, else the layer's scratch of the same name.
  Tensor& keep(MoeStep::Saved& saved, Tensor MoeStep::Saved::*member, Recompute most) { return (config.recompute <= most ? saved : unsaved).*member; }
  void count_bytes(moe::RowPath& used);

  // layer_forward.cc
  void forward(const Forward& f);
  void check_forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const MoeForwardOptions& options) const;
  MoeStep::Saved& prepare(MoeStep& step, const TensorView& x, const MoeForwardOptions& options);
  void choose(const Forward& f);
  void take_map(const Forward& f);
  void reduce_counts(const Forward& f);
  void compute_losses(const Forward& f);
  void plan(const Forward& f);
  moe::RowHandle plan_routes(const Forward& f);
  void run_experts(const Forward& f);
  void prepare_shared(const Forward& f);  // what needs no routed result; once a forward
  void add_shared(const Forward& f);
  void finish(const Forward& f);

  // layer_reserve.cc
  void reserve_captured(MoeStep::Saved& saved, bool training);

  // layer_backward.cc
  void backward(const Backward& b);
  void check_backward(const Backward& b) const;
  void recompute(const Backward& b);
  void backward_experts(const Backward& b);
  void return_weights(const Backward& b);
  void backward_shared_weights(const Backward& b);  // what needs no routed result; once a backward
  void add_shared_input_gradient(const Backward& b);
  void backward_router(const Backward& b);

  MoeConfig config;
  Fabric& ep;
  Fabric& world;
  Stream stream;
  std::int64_t L = 0;
  double factor = 0;  // receive factor in force
  std::uint32_t static_reasons = 0;
  std::vector<std::int32_t> rank_table, local_table;  // ETP placement
  ExpertPlacement placement;
  std::vector<std::int64_t> expert_ids;  // [L] global (expanded) ids of this rank's experts in local order
  std::unique_ptr<moe::CompactPath> compact;
  std::unique_ptr<moe::DensePath> dense;

  StatusWord status;
  ExchangeBytes bytes;
  double expert_flops = 0;
  std::int64_t dense_forwards = 0;

  // Scratch, reused by every call: nothing is allocated once the sizes have been seen.
  MoeStep::Saved unsaved;  // stands in for a step's Saved where nothing is kept
  moe::ExpertScratch expert_scratch;
  Tensor z, latent_in, logits, d_logits, d_latent_out, d_latent_in, dz, d_rows, d_slot_weight, d_weights, d_route_weights, shared_da, shared_dh;
  std::vector<std::int32_t> counts_unbiased;
  Route kept;      // capacity mode: the routes that fit
  Route expanded;  // ETP: e becomes e t + j
};

}  // namespace waybill
