// SPDX-License-Identifier: Apache-2.0
#include "rank_trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "run_folder.h"
#include "waybill/error.h"
#include "waybill/random.h"
#include "waybill/route_io.h"
#include "waybill/trainer.h"

namespace waybill {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

RankTrainer::RankTrainer(const RunConfig& config, Fabric& world, ThreadPool* pool)
    : config_(config), world_(world), pool_(pool), model_(config.model, world, config.train.seed, pool), states_(make_optimizer_states(model_.parameters())) {
  info_ = initial_info(config);
  predicted_bytes_ = static_cast<std::int64_t>(cpu_memory(config).total() + cpu_memory(config).scratch);
  const std::int64_t B = config.train.global_batch / (config.train.micro_batches * world.size());
  for (std::int64_t m = 0; m < config.train.micro_batches; ++m)
    micro_batches_.emplace_back(DType::kI32, std::initializer_list<std::int64_t>{B, config.model.seq_len + 1});
  for (std::size_t i = 0; i < config.model.layers.size(); ++i) {
    if (!config.model.layers[i].is_moe) continue;
    loads_.push_back(Tensor::zeros(DType::kI64, {config.model.layers[i].moe.E}));
    load_layers_.push_back(static_cast<std::int64_t>(i));
  }
}

StepMetrics RankTrainer::step(const Dataset& data, std::int64_t step) {
  const auto start = Clock::now();
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.learning_rate = learning_rate_at(config_.train, step);
  StepStats stats = forward_backward(data, step, metrics);
  {
    PhaseScope scope(&stats.times, Phase::kOptimizer);
    update(stats, metrics);
  }
  info_.step = step + 1;
  info_.tokens += stats.tokens;
  metrics.tokens = stats.tokens;
  metrics.total_tokens = info_.tokens;
  metrics.total_reruns = info_.reruns;
  metrics.total_skipped = skipped_;
  metrics.receive_factor = info_.receive_factor;
  reduce_metrics(stats, seconds_since(start), world_, metrics);
  metrics.predicted_bytes = predicted_bytes_;
  return metrics;
}

StepStats RankTrainer::forward_backward(const Dataset& data, std::int64_t step, StepMetrics& metrics) {
  std::vector<TensorView> views;
  for (std::size_t m = 0; m < micro_batches_.size(); ++m) {
    fill_micro_batch(data, config_.train.seed, step, static_cast<std::int64_t>(m), world_.rank(), world_.size(), micro_batches_[m]);
    views.push_back(micro_batches_[m]);
  }
  for (;;) {
    StepStats stats = model_.forward_backward(views, rounding_seed_of_step(config_.train.seed, step));
    std::int64_t invalid[] = {stats.valid ? 0 : 1};
    world_.all_reduce(std::span<std::int64_t>(invalid), ReduceOp::kMax, "train.valid");
    if (invalid[0] == 0) return stats;
    ++metrics.reruns;
    ++info_.reruns;
    raise_receive_factor(stats.status, metrics.reruns);
  }
}

// Demand over capacity of the fullest rank and layer says how much larger the budgets must be. The demand of later layers is not known
// after an overflow, so a step may be raised several times; P times balanced load always suffices.
void RankTrainer::raise_receive_factor(const StatusWord& status, std::int64_t attempt) {
  const auto ratio = [](std::int64_t demand, std::int64_t capacity) {
    return capacity > 0 ? static_cast<double>(demand) / static_cast<double>(capacity) : 0.0;
  };
  double grow[] = {std::max(ratio(status.slot_demand, status.slot_capacity), ratio(status.row_demand, status.row_capacity))};
  world_.all_reduce(std::span<double>(grow), ReduceOp::kMax, "train.demand");
  const double worst_case = world_.size();
  WB_CHECK(info_.receive_factor < worst_case, "a receive budget overflowed ({}) though the receive factor {} is the worst case", describe(status),
           info_.receive_factor);
  const double raised = info_.receive_factor * std::max(grow[0], 1.05);
  info_.receive_factor = attempt > config_.train.max_reruns ? worst_case : std::min(raised, worst_case);
  model_.set_receive_factor(info_.receive_factor);
}

void RankTrainer::update(const StepStats& stats, StepMetrics& metrics) {
  metrics.loss = stats.loss;
  metrics.aux_loss = stats.aux_loss;
  metrics.grad_norm = model_.gradient_norm();
  metrics.clip_scale = clip_scale(metrics.grad_norm, config_.train.clip_norm);
  metrics.valid = std::isfinite(metrics.grad_norm) && std::isfinite(metrics.loss);
  if (!metrics.valid) {
    ++skipped_;
    return;
  }
  ++updates_;
  adamw_step(config_.train.optimizer, static_cast<float>(metrics.learning_rate), static_cast<float>(metrics.clip_scale), updates_, model_.parameters(), states_,
             Stream::cpu(pool_));
  model_.update_router_bias(stats);
  for (std::size_t i = 0; i < loads_.size(); ++i) {
    const std::vector<std::int64_t>& counts = stats.layers[i].counts;
    auto* load = loads_[i].as<std::int64_t>();
    for (std::size_t e = 0; e < counts.size(); ++e) load[e] += counts[e];
  }
}

void RankTrainer::record_routes(const std::string& run_dir, std::int64_t every) {
  model_.set_route_observer([this, run_dir, every](int layer, std::size_t micro_batch, const Route& route) {
    const std::int64_t step = info_.step + 1;
    if (step != 1 && step % every != 0) return;
    const std::string folder = route_folder(run_dir, step, layer, static_cast<std::int64_t>(micro_batch));
    std::error_code error;
    std::filesystem::create_directories(folder, error);  // every rank tries; save_route says what is wrong
    save_route(fmt::format("{}/rank_{:03}.route", folder, world_.rank()), route);
  });
}

// An evaluation says that it overflowed, on every rank alike, but not by how much. The loss does not depend on the budget.
double RankTrainer::evaluate_batch(const TensorView& tokens) {
  constexpr double kGrowth = 1.5;
  for (;;) {
    try {
      return model_.evaluate(tokens);
    } catch (const Error& error) {
      const double worst_case = world_.size();
      if (error.code() != ErrorCode::kOverflow || info_.receive_factor >= worst_case) throw;
      info_.receive_factor = std::min(kGrowth * info_.receive_factor, worst_case);
      model_.set_receive_factor(info_.receive_factor);
    }
  }
}

double RankTrainer::evaluate(const Dataset& data, std::int64_t count) {
  const std::int64_t all = data.num_held_out_sequences(), W = world_.size();
  const std::int64_t n = count <= 0 ? all : std::min(count, all);
  const std::int64_t B = micro_batches_[0].dim(0), length = micro_batches_[0].dim(1);
  Tensor tokens(DType::kI32, {B, length});
  double sum = 0;
  for (std::int64_t begin = 0; begin < n; begin += B * W) {
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t index = begin + world_.rank() * B + b;
      const std::span<std::int32_t> row(tokens.as<std::int32_t>() + b * length, static_cast<std::size_t>(length));
      if (index < n)
        data.held_out_sequence(index, n, row);
      else
        std::fill(row.begin(), row.end(), -1);  // padding
    }
    sum += evaluate_batch(tokens) * static_cast<double>(std::min(B * W, n - begin));
  }
  return sum / static_cast<double>(n);
}

bool RankTrainer::is_finite() {
  std::int64_t bad[] = {all_finite(model_.parameters()) ? 0 : 1};
  world_.all_reduce(std::span<std::int64_t>(bad), ReduceOp::kMax, "train.finite");
  return bad[0] == 0;
}

std::string RankTrainer::save(const std::string& folder) {
  info_.updates = updates_;
  info_.skipped = skipped_;
  return save_checkpoint(folder, info_, tensors(), world_, static_cast<int>(config_.train.keep_checkpoints));
}

void RankTrainer::load(const std::string& path) {
  load_checkpoint(path, tensors(), world_);
  const CheckpointInfo saved = read_checkpoint_info(path);
  info_.step = saved.step;
  info_.tokens = saved.tokens;
  info_.reruns = saved.reruns;
  updates_ = saved.updates;
  skipped_ = saved.skipped;
  if (saved.receive_factor > info_.receive_factor && info_.receive_factor > 0) {
    info_.receive_factor = std::min(saved.receive_factor, static_cast<double>(world_.size()));
    model_.set_receive_factor(info_.receive_factor);
  }
}

}  // namespace waybill
