// SPDX-License-Identifier: Apache-2.0
#include "train/cuda/device_trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "model/cuda/device_memory.h"
#include "waybill/balance.h"
#include "waybill/error.h"
#include "waybill/trainer.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kStatusEvery = 20;  // steps between reads of the layers' sticky row counters, which wait for the GPU

// Free memory of the first GPUs, with the context and the kernels of this program loaded.
std::vector<std::size_t> free_bytes(std::int64_t gpus) {
  std::vector<std::size_t> all;
  for (int device = 0; device < static_cast<int>(gpus); ++device) {
    const DeviceGuard guard(device);
    std::size_t free = 0, total = 0;
    WB_TRY_CUDA(cudaFree(nullptr));
    WB_TRY_CUDA(cudaMemGetInfo(&free, &total));
    all.push_back(free);
  }
  return all;
}

ModelConfig with_one_rank(ModelConfig config) {
  for (LayerConfig& layer : config.layers) layer.P = 1;
  return config;
}

std::int64_t sequences_of(const RunConfig& config) { return config.train.global_batch / (config.train.micro_batches * config.parallel.W()); }

// Operations of the expert matmuls, forward and backward, a slot.
double slot_flops(const MoeConfig& m) { return 6.0 * static_cast<double>(m.row_width()) * static_cast<double>(m.inner_width() + m.F); }

}  // namespace

DeviceModelOptions DeviceTrainer::model_options(const RunConfig& config) {
  DeviceModelOptions options;
  options.devices.resize(static_cast<std::size_t>(config.train.gpus));
  std::iota(options.devices.begin(), options.devices.end(), 0);
  options.B = sequences_of(config), options.micro_batches = config.train.micro_batches;
  options.steps_in_flight = static_cast<int>(config.train.overflow_check_every);
  options.receive_factor = initial_info(config).receive_factor;
  return options;
}

// The prediction is within 3% (docs/perf/moe-memory.md); what cuBLASLt and the exchange's group take beside it is small.
DeviceModelOptions DeviceTrainer::options_here() const {
  constexpr double kUsable = 0.95;
  DeviceModelOptions options = model_options(config_);
  options.memory = static_cast<std::size_t>(kUsable * static_cast<double>(*std::min_element(free_before_.begin(), free_before_.end())));
  return options;
}

DeviceTrainer::DeviceTrainer(const RunConfig& config, Fabric& world, ThreadPool* pool)
    : config_(config),
      world_(world),
      pool_(pool),
      one_rank_(with_one_rank(config.model)),
      list_(model::make_parameters(one_rank_, 0, config.train.seed, pool)),
      states_(make_optimizer_states(list_.parameters)),
      B_(sequences_of(config)),
      free_before_(free_bytes(config.train.gpus)),
      model_(config.model, config.parallel.W(), list_, options_here()),
      info_(initial_info(config)) {
  for (std::size_t i = 0; i < config.model.layers.size(); ++i) {
    if (!config.model.layers[i].is_moe) continue;
    loads_.push_back(Tensor::zeros(DType::kI64, {config.model.layers[i].moe.E}));
    load_layers_.push_back(static_cast<std::int64_t>(i));
  }
  predicted_bytes_ = static_cast<std::int64_t>(device_model_memory(config.model, config.parallel.W(), options_here()).total());
  model_.upload(states_, 0);
  model_.set_phase_observer([this](Phase phase, cudaStream_t stream) { timer_.mark(phase, stream); });
}

void DeviceTrainer::queue(const Dataset& data, std::int64_t step) {
  DeviceLanguageModel::Batches batches;
  Tensor tokens(DType::kI32, {B_, config_.model.seq_len + 1});
  for (std::int64_t m = 0; m < config_.train.micro_batches; ++m) {
    std::vector<model::TokenBatch>& ranks = batches.emplace_back();
    for (int r = 0; r < config_.parallel.W(); ++r) {
      fill_micro_batch(data, config_.train.seed, step, m, r, config_.parallel.W(), tokens);
      ranks.push_back(model::split_tokens(tokens, config_.model.seq_len));
    }
  }
  const double rate = learning_rate_at(config_.train, step);
  // Phases are timed where the host is about to read the step anyhow.
  const bool is_timed = static_cast<std::int64_t>(model_.in_flight()) + 1 >= config_.train.overflow_check_every;
  if (is_timed) timer_.start();
  model_.queue_step(batches, {config_.train.optimizer, static_cast<float>(rate), config_.train.clip_norm, rounding_seed_of_step(config_.train.seed, step)});
  timer_.stop();
  queued_.push_back({step, rate, is_timed});
}

std::vector<StepMetrics> DeviceTrainer::advance(const Dataset& data, std::int64_t step) {
  queue(data, step);
  info_.step = step + 1;
  if (static_cast<std::int64_t>(model_.in_flight()) < config_.train.overflow_check_every) return {};
  if (config_.train.overflow_check_every > 1) return settle();
  // The host sees every step: one that overflowed is computed again before the next.
  std::int64_t reruns = 0;
  double milliseconds = 0;
  for (;;) {
    const Queued queued = queued_.front();
    queued_.pop_front();
    const DeviceStepResult result = model_.finish_step();
    milliseconds += result.milliseconds;
    if (result.update.budgets_held != 0) {
      std::vector<StepMetrics> done{finish(result, queued)};
      done[0].reruns = reruns;
      done[0].step_ms = milliseconds;
      done[0].tokens_per_s = static_cast<double>(done[0].tokens) / milliseconds * 1e3;
      read_row_counters(done[0]), note_memory(done[0]);
      return done;
    }
    ++info_.reruns;
    raise_receive_factor(result, ++reruns);
    queue(data, step);
  }
}

std::vector<StepMetrics> DeviceTrainer::settle() {
  std::vector<StepMetrics> done;
  DeviceStepResult overflowed;
  while (!queued_.empty()) {
    const Queued queued = queued_.front();
    queued_.pop_front();
    const DeviceStepResult result = model_.finish_step();
    done.push_back(finish(result, queued));
    if (result.update.budgets_held == 0) overflowed = result;
  }
  if (!overflowed.layers.empty()) raise_receive_factor(overflowed, 1);
  if (!done.empty()) read_row_counters(done.back()), note_memory(done.back());
  return done;
}

// Rows that were not finite or short of candidates since the last read.
void DeviceTrainer::read_row_counters(StepMetrics& newest) {
  if (newest.step % kStatusEvery != 0) return;
  const std::vector<StatusWord> words = model_.take_status();
  for (std::size_t i = 0; i < words.size(); ++i) {
    newest.layers[i].nonfinite_rows = words[i].num_nonfinite_rows, newest.layers[i].short_rows = words[i].num_short_rows;
  }
}

// Nothing is allocated inside of a step but in the first ones and after a raised budget: this is the most that was held. Other programs' memory on the
// GPU is in it where it changed meanwhile.
void DeviceTrainer::note_memory(StepMetrics& newest) {
  const std::vector<std::size_t> now = free_bytes(config_.train.gpus);
  for (std::size_t d = 0; d < now.size(); ++d) {
    peak_bytes_ = std::max(peak_bytes_, static_cast<std::int64_t>(free_before_[d]) - static_cast<std::int64_t>(now[d]));
  }
  newest.peak_bytes = peak_bytes_, newest.predicted_bytes = predicted_bytes_;
}

// As RankTrainer: demand over capacity of the fullest rank and layer; W times balanced load always suffices.
void DeviceTrainer::raise_receive_factor(const DeviceStepResult& result, std::int64_t attempt) {
  const double worst_case = config_.parallel.W();
  double grow = 1.05;
  for (std::size_t i = 0; i < result.layers.size(); ++i) {
    const ReceiveBudget budget = model_.budget(i);
    const DeviceLayerResult& layer = result.layers[i];
    if (!layer.overflowed) continue;
    grow = std::max({grow, static_cast<double>(layer.max_slot_demand) / static_cast<double>(budget.slots),
                     static_cast<double>(layer.max_row_demand) / static_cast<double>(budget.rows)});
  }
  WB_CHECK(info_.receive_factor < worst_case, "a receive budget overflowed though the receive factor {} is the worst case", info_.receive_factor);
  info_.receive_factor = attempt > config_.train.max_reruns ? worst_case : std::min(info_.receive_factor * grow, worst_case);
  model_.set_receive_factor(info_.receive_factor);
  DeviceModelOptions options = options_here();
  options.receive_factor = info_.receive_factor;
  predicted_bytes_ = static_cast<std::int64_t>(device_model_memory(config_.model, config_.parallel.W(), options).total());
}

StepMetrics DeviceTrainer::finish(const DeviceStepResult& result, const Queued& queued) {
  StepMetrics metrics;
  metrics.step = queued.step + 1;
  metrics.learning_rate = queued.learning_rate;
  metrics.loss = result.update.loss, metrics.grad_norm = result.update.norm, metrics.clip_scale = result.update.clip_scale;
  metrics.valid = result.update.valid != 0, metrics.overflowed = result.update.budgets_held == 0;
  updates_ = result.update.updates;
  skipped_ += metrics.valid ? 0 : 1;
  info_.tokens += result.tokens;
  metrics.tokens = result.tokens, metrics.total_tokens = info_.tokens;
  metrics.total_reruns = info_.reruns, metrics.total_skipped = skipped_, metrics.receive_factor = info_.receive_factor;
  metrics.step_ms = result.milliseconds;
  metrics.tokens_per_s = result.milliseconds > 0 ? static_cast<double>(result.tokens) / result.milliseconds * 1e3 : 0;
  if (queued.is_timed) metrics.times = timer_.read();
  double& other = metrics.times.seconds[static_cast<std::size_t>(Phase::kOther)];
  const double claimed = std::accumulate(metrics.times.seconds.begin(), metrics.times.seconds.end(), 0.0);
  other += std::max(0.0, result.milliseconds * 1e-3 - claimed);
  add_layers(result, metrics);
  for (std::size_t i = 0; i < loads_.size() && metrics.valid; ++i) {
    auto* load = loads_[i].as<std::int64_t>();
    for (std::size_t e = 0; e < result.layers[i].counts.size(); ++e) load[e] += result.layers[i].counts[e];
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  metrics.peak_rss_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  return metrics;
}

void DeviceTrainer::add_layers(const DeviceStepResult& result, StepMetrics& metrics) const {
  double flops = 0;
  for (const DeviceLayerResult& layer : result.layers) {
    MoeLayerStats stats;
    stats.layer = layer.layer, stats.counts = layer.counts;
    stats.aux = layer.aux, stats.sequence = layer.sequence, stats.global = layer.global, stats.z = layer.z;
    for (const RankRecord& rank : layer.ranks) stats.rank_slots.push_back(rank.slots);
    LayerMetrics& to = metrics.layers.emplace_back(layer_metrics(stats));
    to.min_expert_rows = layer.ranks.front().min_expert_rows;
    for (const RankRecord& rank : layer.ranks) {
      to.rank_rows.push_back(rank.rows);
      to.min_expert_rows = std::min(to.min_expert_rows, rank.min_expert_rows), to.max_expert_rows = std::max(to.max_expert_rows, rank.max_expert_rows);
      flops += static_cast<double>(rank.slots) * slot_flops(config_.model.layers[static_cast<std::size_t>(layer.layer)].moe);
    }
    const auto W = static_cast<std::size_t>(config_.parallel.W());
    for (std::size_t r = 0; r < W; ++r) {
      std::vector<double>& row = to.wait_us.emplace_back();
      for (std::size_t p = 0; p < W; ++p) row.push_back(static_cast<double>(layer.wait_ns.at(r * W + p)) * 1e-3);
    }
    to.slot_demand = layer.max_slot_demand, to.row_demand = layer.max_row_demand;
    metrics.aux_loss += layer.aux + layer.sequence + layer.global + layer.z;
  }
  const double seconds = metrics.times.seconds[static_cast<std::size_t>(Phase::kExpertGemm)];
  metrics.expert_tflops = seconds > 0 ? flops / seconds * 1e-12 : 0;
}

DeviceLanguageModel::Evaluation DeviceTrainer::evaluate_batch(const std::vector<model::TokenBatch>& ranks) {
  constexpr double kGrowth = 1.5;
  for (;;) {
    const DeviceLanguageModel::Evaluation evaluation = model_.evaluate(ranks);
    const double worst_case = config_.parallel.W();
    if (!evaluation.overflowed) return evaluation;
    WB_CHECK(info_.receive_factor < worst_case, "evaluation: a receive budget overflowed though the receive factor {} is the worst case", info_.receive_factor);
    info_.receive_factor = std::min(kGrowth * info_.receive_factor, worst_case);
    model_.set_receive_factor(info_.receive_factor);
  }
}

double DeviceTrainer::evaluate(const Dataset& data, std::int64_t count) {
  const std::int64_t all = data.num_held_out_sequences(), W = config_.parallel.W(), length = config_.model.seq_len + 1;
  const std::int64_t n = count <= 0 ? all : std::min(count, all);
  Tensor tokens(DType::kI32, {B_, length});
  double sum = 0;
  for (std::int64_t begin = 0; begin < n; begin += B_ * W) {
    std::vector<model::TokenBatch> ranks;
    for (std::int64_t r = 0; r < W; ++r) {
      for (std::int64_t b = 0; b < B_; ++b) {
        const std::int64_t index = begin + r * B_ + b;
        const std::span<std::int32_t> row(tokens.as<std::int32_t>() + b * length, static_cast<std::size_t>(length));
        if (index < n)
          data.held_out_sequence(index, n, row);
        else
          std::fill(row.begin(), row.end(), -1);  // padding
      }
      ranks.push_back(model::split_tokens(tokens, config_.model.seq_len));
    }
    const DeviceLanguageModel::Evaluation evaluation = evaluate_batch(ranks);
    sum += evaluation.loss_sum / static_cast<double>(std::max<std::int64_t>(evaluation.tokens, 1)) * static_cast<double>(std::min(B_ * W, n - begin));
  }
  return sum / static_cast<double>(n);
}

void DeviceTrainer::record_routes(const std::string&, std::int64_t) { WB_FAIL(ErrorCode::kUnsupported, "routes are recorded on the CPU only"); }

void DeviceTrainer::download() {
  if (downloaded_ == info_.step) return;
  model_.download(states_);
  downloaded_ = info_.step;
}

bool DeviceTrainer::is_finite() {
  download();
  return all_finite(list_.parameters);
}

std::string DeviceTrainer::save(const std::string& folder) {
  download();
  info_.updates = updates_;
  info_.skipped = skipped_;
  return save_checkpoint(folder, info_, tensors(), world_, static_cast<int>(config_.train.keep_checkpoints));
}

void DeviceTrainer::load(const std::string& path) {
  load_checkpoint(path, tensors(), world_);
  const CheckpointInfo saved = read_checkpoint_info(path);
  info_.step = saved.step, info_.tokens = saved.tokens, info_.reruns = saved.reruns;
  updates_ = saved.updates, skipped_ = saved.skipped;
  model_.upload(states_, updates_);
  downloaded_ = info_.step;
  if (saved.receive_factor > info_.receive_factor && info_.receive_factor > 0) {
    info_.receive_factor = std::min(saved.receive_factor, static_cast<double>(config_.parallel.W()));
    model_.set_receive_factor(info_.receive_factor);
  }
}

LanguageModel& DeviceTrainer::model() {
  download();
  if (sampling_ == nullptr) sampling_ = std::make_unique<LanguageModel>(one_rank_, world_, config_.train.seed, pool_);
  std::vector<Parameter>& to = sampling_->parameters();
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::copy_n(list_.parameters[i].value.as<float>(), list_.parameters[i].value.size(), to[i].value.as<float>());
  }
  return *sampling_;
}

std::string DeviceTrainer::device() const {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "cuda";
  return config_.train.gpus > 1 ? fmt::format("{} x {}", config_.train.gpus, properties.name) : properties.name;
}

}  // namespace waybill::cuda
