// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "moe/capacity.h"
#include "moe/etp.h"
#include "moe/layer_impl.h"
#include "moe/tensors.h"
#include "waybill/log.h"

namespace waybill {
namespace {

void fill_zero(const TensorView& view) { std::fill_n(view.as<float>(), view.size(), 0.0f); }

// Totals as the router wants them; a step of 2^31 routes to one expert is refused, not wrapped.
std::vector<std::int32_t> narrow(const std::vector<std::int64_t>& totals, const std::vector<std::int64_t>* more) {
  std::vector<std::int32_t> counts(totals.size());
  for (std::size_t e = 0; e < totals.size(); ++e) {
    const std::int64_t total = totals[e] + (more != nullptr ? (*more)[e] : 0);
    WB_CHECK(total >= 0 && total <= std::numeric_limits<std::int32_t>::max(), "expert {} has {} routes over the step: more than the losses can count", e,
             total);
    counts[e] = static_cast<std::int32_t>(total);
  }
  return counts;
}

std::int64_t valid_tokens(const MoeStep::Saved& saved) {
  return saved.T - std::count_if(saved.padding_mask.begin(), saved.padding_mask.end(), [](std::uint8_t masked) { return masked != 0; });
}

// Sequences with at least one token that is not padding.
std::int64_t num_sequences(const std::vector<std::uint8_t>& mask, std::int64_t T, std::int64_t length) {
  if (length <= 0) return 0;
  if (mask.empty()) return T / length;
  std::int64_t count = 0;
  for (auto first = mask.begin(); mask.end() - first >= length; first += length) count += std::find(first, first + length, 0) != first + length ? 1 : 0;
  return count;
}

}  // namespace

void MoeLayer::Impl::forward(const Forward& f) {
  if (f.options.dense_map)
    take_map(f);
  else
    choose(f);
  reduce_counts(f);
  if (f.options.training && has_losses() && !f.options.dense_map) compute_losses(f);
  plan(f);
  if (f.step.valid) {
    run_experts(f);
    if (config.shared_F > 0) add_shared(f);
  } else {
    fill_zero(f.out);
  }
  finish(f);
}

void MoeLayer::Impl::check_forward(const MoeTensors& parameters, const TensorView& x, const TensorView& out, const MoeForwardOptions& options) const {
  moe::check_tensors(config, L, parameters, "parameter");
  const std::int64_t T = x.shape[0];
  moe::check_activations(x, T, config.H, "x");
  moe::check_activations(out, T, config.H, "out");
  WB_CHECK(config.mode == ExchangeMode::kEager || T <= config.T_max, "captured mode: T = {} tokens exceed T_max = {}", T, config.T_max);
  if (options.padding_mask) {
    const TensorView& mask = options.padding_mask;
    WB_CHECK(mask.dtype == DType::kU8 && mask.rank == 1 && mask.shape[0] == T && mask.is_contiguous(), "padding_mask must be u8 [T = {}], got {}", T,
             mask.describe());
  }
  if (options.replay != nullptr) {
    const Route& replay = *options.replay;
    WB_CHECK(replay.T() == T && replay.K() == config.K && replay.E() == config.E, "replayed routes are [T={}, K={}] over E={}, expected [T={}, K={}] over E={}",
             replay.T(), replay.K(), replay.E(), T, config.K, config.E);
  }
  if (options.dense_map) {
    const TensorView& map = options.dense_map;
    WB_CHECK(map.dtype == DType::kF32 && map.rank == 2 && map.shape[0] == T && map.shape[1] == config.E && map.is_contiguous(),
             "dense_map must be f32 [T = {}, E = {}], got {}", T, config.E, map.describe());
    WB_CHECK(options.replay == nullptr && config.capacity_factor == 0 && config.expert_tensor_parallel == 1,
             "a dense map excludes replayed routes ({}), capacity_factor ({}) and expert_tensor_parallel ({})", options.replay != nullptr ? "given" : "none",
             config.capacity_factor, config.expert_tensor_parallel);
  }
  if (options.training && config.sequence_coefficient > 0) {
    WB_CHECK(T % config.sequence_length == 0, "T = {} is not a multiple of sequence_length = {}", T, config.sequence_length);
  }
  WB_CHECK(options.loss_tokens >= 0 && options.loss_sequences >= 0 && options.accumulated_tokens >= 0,
           "loss_tokens = {}, loss_sequences = {}, accumulated_tokens = {} must not be negative", options.loss_tokens, options.loss_sequences,
           options.accumulated_tokens);
  if (options.accumulated_counts != nullptr) {
    WB_CHECK(static_cast<std::int64_t>(options.accumulated_counts->size()) == config.E, "accumulated_counts has {} entries, expected E = {}",
             options.accumulated_counts->size(), config.E);
  }
}

MoeStep::Saved& MoeLayer::Impl::prepare(MoeStep& step, const TensorView& x, const MoeForwardOptions& options) {
  const std::int64_t T = x.shape[0];
  step.status.clear();
  step.valid = true;
  step.losses = {};
  step.global_loss = 0;
  step.slots = step.rows = step.max_slot_demand = step.max_row_demand = step.dropped_routes = 0;
  step.dense_map_reasons = kDenseMapNone;
  step.saved_bytes = 0;
  if (step.route.T() != T || step.route.K() != config.K || step.route.E() != config.E) step.route = Route(T, config.K, config.E);
  if (!options.training) {
    step.saved.reset();
  } else if (step.saved == nullptr) {
    step.saved = std::make_unique<MoeStep::Saved>();
  }
  MoeStep::Saved& saved = options.training ? *step.saved : unsaved;
  saved.T = T;
  saved.rounding_seed = options.rounding_seed;
  saved.ready = false;
  reserve_captured(saved, options.training);
  saved.padding_mask.clear();
  if (options.padding_mask) saved.padding_mask.assign(options.padding_mask.as<std::uint8_t>(), options.padding_mask.as<std::uint8_t>() + T);
  return saved;
}

void MoeLayer::Impl::choose(const Forward& f) {
  Tensor& kept_logits = keep(f.saved, &MoeStep::Saved::logits, Recompute::kActivation);
  kept_logits.resize(DType::kF32, {f.saved.T, config.E});
  {
    const PhaseScope scope(f.times, Phase::kGate);
    moe::project(f.x, f.parameters.gate, kept_logits, /*accumulate=*/false, stream);
  }
  const PhaseScope scope(f.times, Phase::kRouter);
  RouterInputs inputs = router_inputs(f.parameters, kept_logits, f.saved);
  inputs.token_offset = f.options.token_offset;
  if (f.options.replay != nullptr) {
    const RouteView& replay = f.options.replay->view();
    inputs.replay_ids = TensorView(replay.ids, replay.id_dtype, {replay.T, replay.K});
  }
  RouterOutputs outputs;
  outputs.route = f.step.route.view();
  outputs.status = &f.step.status;
  if (config.aux_counts == AuxCounts::kUnbiased) {
    counts_unbiased.assign(static_cast<std::size_t>(config.E), 0);
    outputs.counts_unbiased = counts_unbiased.data();
  }
  router_forward(config.router, inputs, outputs, stream);
}

// The caller's map stands in for the router: the route holds its counts and no ids.
void MoeLayer::Impl::take_map(const Forward& f) {
  const PhaseScope scope(f.times, Phase::kRouter);
  f.step.route = Route(f.saved.T, config.K, config.E);
  counts_unbiased.assign(static_cast<std::size_t>(config.E), 0);
  const float* map = f.options.dense_map.as<float>();
  for (std::int64_t i = 0; i < f.options.dense_map.size(); ++i) f.step.route.view().counts[i % config.E] += map[i] != 0.0f ? 1 : 0;
}

// One integer all-reduce over the world: counts, tokens, sequences, and whether any rank needs the dense-map path.
void MoeLayer::Impl::reduce_counts(const Forward& f) {
  const PhaseScope scope(f.times, Phase::kPlan);
  const auto E = static_cast<std::size_t>(config.E);
  const bool unbiased = config.aux_counts == AuxCounts::kUnbiased;
  const std::int32_t* counts = f.step.route.view().counts;
  std::vector<std::int64_t> totals(counts, counts + E);
  if (unbiased) totals.insert(totals.end(), counts_unbiased.begin(), counts_unbiased.end());
  totals.push_back(valid_tokens(f.saved));
  totals.push_back(num_sequences(f.saved.padding_mask, f.saved.T, config.sequence_length));
  totals.push_back(f.options.dense_map ? 1 : 0);
  totals.push_back(f.options.replay != nullptr && moe::has_duplicate_ids(f.step.route) ? 1 : 0);
  world.all_reduce(totals, ReduceOp::kSum, "moe counts");

  MoeStep& step = f.step;
  const std::int64_t maps = totals[totals.size() - 2], duplicates = totals.back();
  WB_CHECK(maps == 0 || maps == world.size(), "a dense map was given on {} of {} ranks: give it on every rank or on none", maps, world.size());
  step.counts.assign(totals.begin(), totals.begin() + config.E);
  step.loss_counts.assign(totals.begin() + (unbiased ? config.E : 0), totals.begin() + (unbiased ? 2 : 1) * config.E);
  step.valid_tokens = static_cast<double>(totals[totals.size() - 4]);
  step.dense_map_reasons = static_reasons | (duplicates > 0 ? kDenseMapDuplicateIds : kDenseMapNone) | (maps > 0 ? kDenseMapCallerMap : kDenseMapNone);
  MoeStep::Saved& saved = f.saved;
  saved.aux_tokens = step.valid_tokens;
  saved.loss_tokens = f.options.loss_tokens > 0 ? f.options.loss_tokens : step.valid_tokens;
  saved.loss_sequences = f.options.loss_sequences > 0 ? f.options.loss_sequences : static_cast<double>(totals[totals.size() - 3]);
  saved.global_tokens = step.valid_tokens + f.options.accumulated_tokens;
  if (config.aux_coefficient != 0) saved.aux_counts = narrow(step.loss_counts, nullptr);
  if (config.global_coefficient != 0) saved.global_counts = narrow(step.loss_counts, f.options.accumulated_counts);
}

void MoeLayer::Impl::compute_losses(const Forward& f) {
  const PhaseScope scope(f.times, Phase::kRouter);
  const RouterInputs inputs = router_inputs(f.parameters, keep(f.saved, &MoeStep::Saved::logits, Recompute::kActivation), f.saved);
  const bool global = config.global_coefficient != 0;
  const bool global_only = global && !two_aux_losses();
  f.step.losses = router_losses(config.router, loss_config(global_only), inputs, f.step.route, loss_inputs(f.saved, global_only), stream);
  if (global_only) {
    f.step.global_loss = f.step.losses.aux;
    f.step.losses.aux = 0;
  } else if (global) {
    f.step.global_loss = router_losses(config.router, loss_config(true), inputs, f.step.route, loss_inputs(f.saved, true), stream).aux;
  }
}

// The routes as they travel: cut to capacity, then expanded over the slices of F.
moe::RowHandle MoeLayer::Impl::plan_routes(const Forward& f) {
  const RouteView* route = &f.step.route.view();
  std::int64_t pad_capacity = -1;  // 0 is a capacity: a rank without tokens takes part
  if (config.capacity_factor > 0) {
    const std::int64_t capacity = moe::expert_capacity(config.capacity_factor, valid_tokens(f.saved), config.K, config.E);
    f.step.dropped_routes = moe::drop_over_capacity(*route, capacity, kept);
    route = &kept.view();
    if (config.pad_to_capacity) pad_capacity = capacity;
  }
  if (config.expert_tensor_parallel > 1) {
    moe::expand_route(*route, config.expert_tensor_parallel, expanded);
    route = &expanded.view();
  }
  return path(f.step).plan(*route, pad_capacity, f.times);
}

void MoeLayer::Impl::plan(const Forward& f) {
  if (f.step.dense_map_reasons != kDenseMapNone) {
    const std::string reasons = describe_dense_map(f.step.dense_map_reasons);
    if (!config.allow_dense_map) WB_FAIL(ErrorCode::kUnsupported, "compact routes are not legal and allow_dense_map is off: {}", reasons);
    warn_once("moe.dense_map:" + reasons, "MoE layer takes the dense-map path, which is slow: " + reasons);
    if (f.options.training) ++dense_forwards;
  }
  f.saved.handle = f.options.dense_map ? dense->plan_map(f.options.dense_map, f.times) : plan_routes(f);
  f.step.valid = f.saved.handle.exchange.valid;
  f.step.max_slot_demand = f.saved.handle.exchange.max_slot_demand;
  f.step.max_row_demand = f.saved.handle.exchange.max_row_demand;
  if (compact != nullptr) {
    f.step.status.merge(compact->exchange().status());
    compact->exchange().status().clear();
  }
  f.step.slots = f.saved.handle.layout().S();
  f.step.rows = f.saved.handle.layout().R();
}

void MoeLayer::Impl::run_experts(const Forward& f) {
  const TensorView sent = expert_rows(f.parameters, f.x, f.times);
  moe::RowPath& rows_path = path(f.step);
  Tensor& rows = keep(f.saved, &MoeStep::Saved::rows, Recompute::kActivation);
  Tensor& h = keep(f.saved, &MoeStep::Saved::h, Recompute::kActivation);
  Tensor& a = keep(f.saved, &MoeStep::Saved::a, Recompute::kNone);
  PendingRows pending = rows_path.dispatch_start(f.saved.handle, sent, rows, f.times);
  if (config.overlap_shared) prepare_shared(f);
  pending.finish(f.times);
  const moe::ExpertContext context = experts(f.parameters, f.saved, f.times);
  moe::experts_first_matmul(context, rows, expert_scratch, h);
  moe::experts_activation(context, h, a);
  moe::experts_second_matmul(context, a, expert_scratch, z);
  if (config.latent == 0) {
    rows_path.combine(f.saved.handle, z, f.out, f.times);
    return;
  }
  f.saved.latent_out.resize(DType::kF32, {f.saved.T, config.latent});
  rows_path.combine(f.saved.handle, z, f.saved.latent_out, f.times);
  const PhaseScope scope(f.times, Phase::kShared);
  moe::project(f.saved.latent_out, f.parameters.latent_up, f.out, /*accumulate=*/false, stream);
}

void MoeLayer::Impl::prepare_shared(const Forward& f) {
  if (config.shared_F == 0) return;
  const PhaseScope scope(f.times, Phase::kShared);
  Tensor& h = keep(f.saved, &MoeStep::Saved::shared_h, Recompute::kActivation);
  const moe::SharedExpert expert = shared(f.parameters, f.saved);
  expert.hidden(f.x, h);
  expert.activate(h, keep(f.saved, &MoeStep::Saved::shared_a, Recompute::kNone));
}

void MoeLayer::Impl::add_shared(const Forward& f) {
  if (!config.overlap_shared) prepare_shared(f);
  const PhaseScope scope(f.times, Phase::kShared);
  shared(f.parameters, f.saved).add_output(keep(f.saved, &MoeStep::Saved::shared_a, Recompute::kNone), f.out);
}

void MoeLayer::Impl::finish(const Forward& f) {
  StatusWord seen = f.step.status;
  if (!f.options.training) {
    seen.num_nonfinite_rows = seen.num_short_rows = 0;  // counters belong to training steps; an overflow is never silent
    path(f.step).reset_bytes();
  }
  status.merge(seen);
  if (!f.options.training) return;
  count_bytes(path(f.step));
  expert_flops += moe::expert_forward_flops(config, f.step.slots);
  f.saved.ready = true;
  f.step.saved_bytes = f.saved.bytes() + static_cast<std::size_t>(f.saved.T * config.K) * (size_bytes(f.step.route.view().id_dtype) + sizeof(float)) +
                       static_cast<std::size_t>(config.E) * sizeof(std::int32_t);
}

}  // namespace waybill
