// SPDX-License-Identifier: Apache-2.0
#include "model/cuda/device_language_model.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/cuda/cuda_error.h"
#include "model/cuda/device_memory.h"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

void refuse_if(bool is_refused, const std::string& what) {
  if (is_refused) WB_FAIL(ErrorCode::kUnsupported, "training on the GPU does not do {}", what);
}

}  // namespace

MoeConfig device_moe_config(const ModelConfig& config, const LayerConfig& layer, const DeviceModelOptions& options) {
  MoeConfig m = model::moe_config(config, layer);
  m.T_max = options.B * config.seq_len;
  m.receive_factor = std::min(options.receive_factor, static_cast<double>(layer.P));  // the worst case of P ranks
  m.mode = ExchangeMode::kEager;                                                      // budgets are fixed in both modes; what 0 means is decided here
  if (m.recipe.kind == Recipe::kF32) m.recipe.kind = Recipe::kBF16;
  return m;
}

namespace {

bool names_a_gpu_twice(const std::vector<int>& devices) { return std::set<int>(devices.begin(), devices.end()).size() < devices.size(); }

DeviceShare share_of(int W, const std::vector<int>& devices, std::size_t index) {
  const int each = W / static_cast<int>(devices.size());
  return {devices[index], static_cast<int>(index), static_cast<int>(devices.size()), static_cast<int>(index) * each, each, W};
}

std::int64_t valid_tokens(const std::vector<model::TokenBatch>& ranks) {
  std::int64_t count = 0;
  for (const model::TokenBatch& batch : ranks) count += batch.T() - std::count(batch.padding.begin(), batch.padding.end(), std::uint8_t{1});
  return count;
}

bool any_padding(const std::vector<model::TokenBatch>& ranks) {
  return std::any_of(ranks.begin(), ranks.end(), [](const model::TokenBatch& batch) { return !batch.padding.empty(); });
}

}  // namespace

void DeviceLanguageModel::check(const ModelConfig& config, int W, const DeviceModelOptions& options) {
  validate(config, W);
  const auto num_devices = static_cast<int>(options.devices.size());
  WB_CHECK(num_devices >= 1 && num_devices <= kMaxUpdateDevices && W % num_devices == 0, "{} ranks do not lie on {} GPUs evenly (at most {})", W, num_devices,
           kMaxUpdateDevices);
  WB_CHECK(options.B >= 1 && options.micro_batches >= 1 && options.steps_in_flight >= 1, "B = {}, micro_batches = {}, steps_in_flight = {} must be positive",
           options.B, options.micro_batches, options.steps_in_flight);
  refuse_if(config.head_dim > kMaxHeadDim, fmt::format("head_dim = {} (at most {})", config.head_dim, kMaxHeadDim));
  refuse_if(config.H % 8 != 0 || config.num_heads * config.head_dim % 8 != 0 || config.num_kv_heads * config.head_dim % 8 != 0 || config.vocab % 8 != 0,
            fmt::format("H = {}, vocab = {} or heads whose widths are no multiples of 8", config.H, config.vocab));
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    refuse_if(!layer.is_moe && layer.dense_F % 8 != 0, fmt::format("layer {}: dense_F = {}, not a multiple of 8", i, layer.dense_F));
    if (!layer.is_moe) continue;
    const int each = W / num_devices;
    refuse_if(
        each % layer.P != 0 && layer.P % each != 0,
        fmt::format("layer {}: expert-parallel groups of {} ranks over {} GPUs of {} ranks each; whole groups on a GPU, or whole GPUs in a group, it does", i,
                    layer.P, num_devices, each));
    WB_CHECK(layer.P <= each || !names_a_gpu_twice(options.devices), "layer {}: a group of {} ranks lies over several GPUs, of which one is named twice", i,
             layer.P);
    (void)DeviceMoeLayer::arena_bytes(device_moe_config(config, layer, options), layer.P);
  }
}

DeviceLanguageModel::DeviceLanguageModel(const ModelConfig& config, int W, const model::ParameterList& list, const DeviceModelOptions& options)
    : config_(config), list_(list), W_(W), options_(options), start_() {
  check(config, W, options);
  const auto slots = static_cast<std::size_t>(options.steps_in_flight) + 1;  // and the end of the step before, for times
  for (std::size_t d = 0; d < options.devices.size(); ++d) {
    const DeviceGuard guard(options.devices[d]);
    parts_.push_back(std::make_unique<DevicePart>(config_, list_, share_of(W, options.devices, d), options.B,
                                                  static_cast<int>(slots * static_cast<std::size_t>(options.micro_batches) + 1)));
    meeting_.push_back(std::make_unique<CudaEvent>(false));
  }
  for (std::size_t s = 0; s < slots; ++s) {
    slots_.emplace_back(), done_.emplace_back();
    for (const auto& part : parts_) {
      const DeviceGuard guard(part->share().device);
      slots_[s].emplace_back(part->layout().host_bytes), done_[s].push_back(std::make_unique<CudaEvent>());
    }
  }
  make_experts();
}

DeviceLanguageModel::~DeviceLanguageModel() {
  for (const auto& part : parts_) WB_TRY_CUDA_NOEXCEPT(cudaStreamSynchronize(part->stream()));
  for (const auto& part : parts_) part->drop_experts();  // before the group whose windows they use
}

void DeviceLanguageModel::set_receive_factor(double factor) {
  WB_CHECK(pending_.empty(), "set_receive_factor: {} steps are in flight", pending_.size());
  for (const auto& part : parts_) WB_TRY_CUDA(cudaStreamSynchronize(part->stream()));
  options_.receive_factor = factor;
  make_experts();
}

ReceiveBudget DeviceLanguageModel::budget(std::size_t moe_layer) { return parts_[0]->experts(moe_layer).budget(); }

std::vector<StatusWord> DeviceLanguageModel::take_status() {
  std::vector<StatusWord> words(parts_[0]->num_moe_layers());
  for (const auto& part : parts_) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      for (std::size_t g = 0; g < part->num_groups(i); ++g) {
        DeviceMoeLayer& layer = part->experts(i, g);
        for (int r = 0; r < layer.num_ranks(); ++r) words[i].merge(layer.status(r, part->stream()));
        layer.clear_status(part->stream());
      }
    }
  }
  return words;
}

void DeviceLanguageModel::set_phase_observer(std::function<void(Phase, cudaStream_t)> observer) { parts_[0]->on_phase = std::move(observer); }
cudaStream_t DeviceLanguageModel::stream() const { return parts_[0]->stream(); }

void DeviceLanguageModel::upload(std::span<const OptimizerState> states, std::int64_t updates) {
  for (const auto& part : parts_) {
    part->parameters().upload(list_, states, part->stream());
    const DeviceGuard guard(part->share().device);
    UpdateState state{};
    state.updates = updates;
    WB_TRY_CUDA(cudaMemcpyAsync(part->update_state(), &state, sizeof state, cudaMemcpyHostToDevice, part->stream()));
    WB_TRY_CUDA(cudaStreamSynchronize(part->stream()));
  }
}

void DeviceLanguageModel::download(std::span<const OptimizerState> states) const {
  for (const auto& part : parts_) part->parameters().download(list_, states, part->stream());
}

void DeviceLanguageModel::download_gradients() const {
  for (const auto& part : parts_) part->parameters().download_gradients(list_, part->stream());
}

void DeviceLanguageModel::forward(const std::vector<model::TokenBatch>& ranks, const DevicePart::Forward& options) {
  for (const auto& part : parts_) {
    const auto first = static_cast<std::size_t>(part->share().first_rank), count = static_cast<std::size_t>(part->share().num_ranks);
    part->load(std::span(ranks).subspan(first, count));
    part->embed();
  }
  // Layer by layer over the GPUs: a GPU may wait inside a kernel for what another one's queue has not reached.
  for (std::size_t i = 0; i < config_.layers.size(); ++i) {
    for (const auto& part : parts_) part->attend(i);
    for (const auto& part : parts_) part->feed_forward(i, options), meet_on_one_gpu();
    if (parts_[0]->sums_counts(i, options)) {
      std::vector<const std::int32_t*> counts;
      for (const auto& part : parts_) part->add_counts_of_groups(i, counts);
      meet();
      for (const auto& part : parts_) part->sum_counts(i, counts);
      meet();  // they are about to be replaced by the sums
    }
    for (const auto& part : parts_) part->feed_forward_end(i, options);
  }
}

void DeviceLanguageModel::backward(bool first_micro_batch) {
  for (std::size_t i = config_.layers.size(); i-- > 0;) {
    for (const auto& part : parts_) part->feed_forward_backward(i, first_micro_batch), meet_on_one_gpu();
    for (const auto& part : parts_) part->attend_backward(i);
  }
  for (const auto& part : parts_) part->embed_backward();
}

void DeviceLanguageModel::queue_step(const Batches& batches, const DeviceUpdate& settings) {
  WB_CHECK(pending_.size() + 1 < slots_.size(), "queue_step: {} steps are in flight already", pending_.size());
  WB_CHECK(static_cast<std::int64_t>(batches.size()) == options_.micro_batches, "queue_step: {} micro-batches, the model was made for {}", batches.size(),
           options_.micro_batches);
  if (last_end_ == nullptr) {
    const DeviceGuard guard(parts_[0]->share().device);
    start_.record(stream());
    last_end_ = &start_;
  }
  std::int64_t tokens = 0;
  for (const auto& ranks : batches) tokens += valid_tokens(ranks);
  const double loss_scale = tokens > 0 ? 1.0 / static_cast<double>(tokens) : 0.0;
  DevicePart::Forward options;
  options.loss_tokens = static_cast<double>(tokens), options.loss_sequences = static_cast<double>(options_.micro_batches * options_.B * W_);
  for (const auto& part : parts_) part->begin_step();
  for (std::size_t m = 0; m < batches.size(); ++m) {
    options.weights_unchanged = m > 0, options.step_seed = settings.rounding_seed, options.micro_batch = m;
    options.padding = any_padding(batches[m]), options.valid_tokens = static_cast<double>(valid_tokens(batches[m]));
    forward(batches[m], options);
    for (const auto& part : parts_) part->loss(static_cast<float>(loss_scale), /*gradient=*/true);
    backward(m == 0);
    options.accumulated_tokens += options.valid_tokens;
    options.token_offset += W_ * options_.B * config_.seq_len;
  }
  reduce();
  update(settings, loss_scale);
  record(next_slot_);
  pending_.push_back({next_slot_, tokens});
  next_slot_ = (next_slot_ + 1) % slots_.size();
}

// Kernels that wait for ranks need their CTAs resident together: those of two parts may not run on one GPU at a time.
void DeviceLanguageModel::meet_on_one_gpu() {
  if (names_a_gpu_twice(options_.devices)) meet();
}

void DeviceLanguageModel::meet() {
  if (parts_.size() == 1) return;
  for (std::size_t d = 0; d < parts_.size(); ++d) {
    const DeviceGuard guard(parts_[d]->share().device);
    meeting_[d]->record(parts_[d]->stream());
  }
  for (const auto& part : parts_) {
    const DeviceGuard guard(part->share().device);
    for (const auto& event : meeting_) event->wait_on(part->stream());
  }
}

void DeviceLanguageModel::reduce() {
  for (const auto& part : parts_) part->sum_rank_gradients();
  if (parts_.size() == 1) return;
  meet();
  const DeviceParameters& parameters = parts_[0]->parameters();
  std::vector<std::size_t> all(parts_.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  sum_over(all, 0, parameters.num_replicated());
  for (const DeviceParameters::ExpertRange& range : parameters.expert_ranges()) {
    const auto gpus = static_cast<std::size_t>(parts_[0]->share().gpus_of_group(range.P));
    for (std::size_t first = 0; first < gpus; ++first) {  // GPUs that hold the same experts
      std::vector<std::size_t> replicas;
      for (std::size_t d = first; d < parts_.size(); d += gpus) replicas.push_back(d);
      sum_over(replicas, range.begin, range.end);
    }
  }
  meet();
}

// Gradients [begin, end) of these GPUs, a slice by each.
void DeviceLanguageModel::sum_over(const std::vector<std::size_t>& devices, std::int64_t begin, std::int64_t end) {
  if (devices.size() == 1) return;
  SumOverDevices call{};
  call.num_devices = static_cast<int>(devices.size());
  const std::int64_t each = (end - begin + call.num_devices - 1) / call.num_devices;
  for (std::size_t k = 0; k < devices.size(); ++k) call.parts[k] = parts_[devices[k]]->parameters().grads();
  for (std::size_t k = 0; k < devices.size(); ++k) {
    const DevicePart& part = *parts_[devices[k]];
    const DeviceGuard guard(part.share().device);
    call.begin = std::min(end, begin + static_cast<std::int64_t>(k) * each), call.end = std::min(end, call.begin + each);
    launch_sum_over_devices(call, part.stream());
    check_launch("sum_over_devices");
  }
}

void DeviceLanguageModel::update(const DeviceUpdate& settings, double loss_scale) {
  if (parts_[0]->on_phase) parts_[0]->on_phase(Phase::kOptimizer, stream());
  for (const auto& part : parts_) {
    const DeviceGuard guard(part->share().device);
    launch_sum_squares(part->parameters().sum_squares(), part->stream());
    check_launch("sum_squares");
  }
  meet();
  for (const auto& part : parts_) {
    const DeviceGuard guard(part->share().device);
    DecideUpdate decide{};
    decide.beta1 = settings.optimizer.beta1, decide.beta2 = settings.optimizer.beta2, decide.weight_decay = settings.optimizer.weight_decay;
    decide.learning_rate = settings.learning_rate, decide.clip_norm = settings.clip_norm, decide.loss_scale = loss_scale;
    decide.owner = part->parameters().owner(), decide.all_units = part->parameters().all_units(), decide.num_devices = static_cast<int>(parts_.size());
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      decide.squares[d] = parts_[d]->parameters().squares(), decide.loss_sums[d] = &parts_[d]->header()->loss_sum;
    }
    decide.overflows = &part->header()->overflows, decide.state = part->update_state();
    launch_decide_update(decide, part->stream());
    launch_adamw(part->parameters().adamw(settings.optimizer, part->update_state()), part->stream());
    check_launch("adamw");
    std::size_t moe = 0;
    for (std::size_t i = 0; i < config_.layers.size(); ++i) {
      if (!config_.layers[i].is_moe) continue;
      const MoeConfig& m = config_.layers[i].moe;
      const int bias = list_.layers[i].feed_forward.router_bias;
      if (bias != model::kNone) {
        BiasUpdate call{};
        call.bias = part->parameters().value(bias), call.num_devices = static_cast<int>(parts_.size()), call.E = m.E, call.rate = m.bias_update_rate;
        call.subtract_mean = m.bias_subtract_mean, call.state = part->update_state();
        for (std::size_t d = 0; d < parts_.size(); ++d) call.counts[d] = parts_[d]->counts(moe);
        launch_bias_update(call, part->stream());
        check_launch("bias_update");
      }
      ++moe;
    }
  }
  if (parts_[0]->on_phase) parts_[0]->on_phase(Phase::kOther, stream());
}

// A GPU's sums must not change before all have read them.
void DeviceLanguageModel::record(std::size_t slot) {
  meet();
  for (std::size_t d = 0; d < parts_.size(); ++d) {
    const DeviceGuard guard(parts_[d]->share().device);
    const PinnedBuffer& to = slots_[slot][d];
    const RecordLayout& layout = parts_[d]->layout();
    WB_TRY_CUDA(cudaMemcpyAsync(to.data(), parts_[d]->record().data(), layout.bytes, cudaMemcpyDeviceToHost, parts_[d]->stream()));
    for (std::size_t i = 0; i < parts_[d]->num_moe_layers(); ++i) {
      for (int r = 0; r < layout.num_ranks; ++r) {  // a rank waits for those of its group
        const int ranks = parts_[d]->experts(i).num_ranks();
        const DeviceExchange& exchange = parts_[d]->experts(i, static_cast<std::size_t>(r / ranks)).exchange();
        const std::size_t P = static_cast<std::size_t>(exchange.num_peers()), rank = static_cast<std::size_t>(parts_[d]->share().first_rank + r);
        WB_TRY_CUDA(cudaMemcpyAsync(to.at<std::uint64_t>(layout.wait(i, r)) + rank / P * P, exchange.wait_ns(r % ranks), P * sizeof(std::uint64_t),
                                    cudaMemcpyDeviceToHost, parts_[d]->stream()));
      }
    }
    WB_TRY_CUDA(cudaMemcpyAsync(&to.at<RecordHeader>(0)->update, parts_[d]->update_state(), sizeof(UpdateState), cudaMemcpyDeviceToHost, parts_[d]->stream()));
    done_[slot][d]->record(parts_[d]->stream());
  }
}

DeviceStepResult DeviceLanguageModel::finish_step() {
  WB_CHECK(!pending_.empty(), "finish_step: no step is in flight");
  const Pending pending = pending_.front();
  pending_.pop_front();
  for (const auto& event : done_[pending.slot]) event->synchronize();
  if (pending_.empty()) {
    for (const auto& [key, group] : groups_) {
      const std::string error = group.ranks->first_error();
      if (!error.empty()) WB_FAIL(ErrorCode::kTimeout, "ranks {} to {}: {}", key.first * key.second, key.first * (key.second + 1) - 1, error);
    }
  }
  DeviceStepResult result;
  const CudaEvent& end = *done_[pending.slot][0];
  result.milliseconds = static_cast<double>(end.elapsed_us_since(*last_end_)) * 1e-3;
  last_end_ = &end;
  result.update = slots_[pending.slot][0].at<RecordHeader>(0)->update;
  result.tokens = pending.tokens;
  std::size_t moe = 0;
  for (std::size_t i = 0; i < config_.layers.size(); ++i) {
    if (!config_.layers[i].is_moe) continue;
    DeviceLayerResult& to = result.layers.emplace_back();
    to.layer = static_cast<int>(i);
    to.counts.assign(static_cast<std::size_t>(config_.layers[i].moe.E), 0);
    for (std::size_t d = 0; d < parts_.size(); ++d) {
      const RecordLayout& layout = parts_[d]->layout();
      const PinnedBuffer& from = slots_[pending.slot][d];
      const LayerRecord& layer = *from.at<LayerRecord>(layout.layer(moe));
      to.overflowed = to.overflowed || layer.overflows > 0;
      to.max_slot_demand = std::max(to.max_slot_demand, layer.max_slot_demand), to.max_row_demand = std::max(to.max_row_demand, layer.max_row_demand);
      to.aux += layer.aux, to.sequence += layer.sequence, to.global += layer.global, to.z += layer.z;
      for (int r = 0; r < layout.num_ranks; ++r) {
        to.ranks.push_back(*from.at<RankRecord>(layout.rank(moe, r)));
        const auto* waits = from.at<std::uint64_t>(layout.wait(moe, r));
        to.wait_ns.insert(to.wait_ns.end(), waits, waits + W_);
      }
      const auto* counts = from.at<std::int64_t>(layout.counts[moe]);
      for (std::size_t e = 0; e < to.counts.size(); ++e) to.counts[e] += counts[e];
    }
    // The device's counters only grow: a step's waits are what they grew by.
    std::vector<std::uint64_t>& before = waits_before_[moe];
    before.resize(to.wait_ns.size());
    for (std::size_t k = 0; k < before.size(); ++k) std::swap(before[k], to.wait_ns[k]), to.wait_ns[k] = before[k] - to.wait_ns[k];
    ++moe;
  }
  return result;
}

DeviceLanguageModel::Evaluation DeviceLanguageModel::evaluate(const std::vector<model::TokenBatch>& ranks) {
  WB_CHECK(pending_.empty(), "evaluate: {} steps are in flight", pending_.size());
  Evaluation evaluation;
  evaluation.tokens = valid_tokens(ranks);
  DevicePart::Forward options;
  options.training = false, options.padding = any_padding(ranks), options.valid_tokens = static_cast<double>(evaluation.tokens);
  options.loss_tokens = static_cast<double>(evaluation.tokens), options.loss_sequences = static_cast<double>(options_.B * W_);
  for (const auto& part : parts_) part->begin_step();
  forward(ranks, options);
  for (const auto& part : parts_) {
    part->loss(0.0f, /*gradient=*/false);
    RecordHeader header{};
    WB_TRY_CUDA(cudaMemcpyAsync(&header, part->header(), sizeof header, cudaMemcpyDeviceToHost, part->stream()));
    WB_TRY_CUDA(cudaStreamSynchronize(part->stream()));
    evaluation.loss_sum += header.loss_sum;
    evaluation.overflowed = evaluation.overflowed || header.overflows > 0;
  }
  last_end_ = nullptr;
  return evaluation;
}

}  // namespace waybill::cuda
