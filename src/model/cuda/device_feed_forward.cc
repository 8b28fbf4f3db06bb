// SPDX-License-Identifier: Apache-2.0
// DevicePart's feed-forward halves: the steps of src/model/feed_forward.cc.
#include <algorithm>

#include "core/cuda/num_sms.h"
#include "core/cuda/work_room.h"
#include "model/cuda/device_part.h"
#include "ops/model/cuda/model_kernels.h"
#include "waybill/activation.h"
#include "waybill/random.h"

namespace waybill::cuda {
namespace {

constexpr ActivationConfig kSwiGLU{};

}  // namespace

void DevicePart::make_experts(const std::vector<MoeConfig>& configs, const std::vector<DeviceMoeOptions>& forms,
                              const std::vector<std::vector<Launch>>& launches) {
  experts_.clear();
  std::size_t operations = 0;
  for (std::size_t i = 0; i < configs.size(); ++i) {
    const MoeConfig& config = configs[i];
    DeviceMoeOptions options = forms.at(i);
    options.on_phase = [this](Phase phase, cudaStream_t stream) {
      if (stream == stream_.get()) mark(phase);  // what runs beside it is in no time of its own
    };
    Experts& e = experts_.emplace_back();
    for (const Launch& launch : launches.at(i)) {
      Group& group = e.groups.emplace_back();
      group.layer = std::make_unique<DeviceMoeLayer>(config, launch.ranks, share_.device, launch.book, options);
      group.step = group.layer->make_step();
      e.P = launch.ranks.table.size, e.ranks = launch.ranks.count;
    }
    if (config.global_coefficient != 0) e.accumulated = DeviceBuffer(static_cast<std::size_t>(config.E) * sizeof(std::int32_t), share_.device);
    const DeviceMoeLayer& layer = *e.groups[0].layer;
    if (e.P < share_.W && layer.adds_losses()) {
      e.counts = DeviceBuffer(static_cast<std::size_t>(layer.num_counts()) * sizeof(std::int32_t), share_.device);
    }
    operations = std::max(operations, DeviceMoeLayer::memory(config, e.P, options, 0, num_sms(share_.device)).operations);
  }
  // Before the dense matmuls, which come first and need less: a room that grows leaves the smaller one behind.
  if (operations > 0) work_room(share_.device, stream_).reserve(operations, /*zero=*/false, share_.device, stream_);
}

DeviceMoeForward DevicePart::moe_forward(std::size_t layer, std::size_t group, const Forward& options, std::vector<TensorView>& padding,
                                         std::vector<TensorView>& accumulated) const {
  const Experts& e = experts_[moe_index_[layer]];
  const std::int64_t each = T_ / share_.num_ranks;
  const Device device{DeviceType::kCuda, share_.device};
  const int first = static_cast<int>(group) * e.ranks, number = share_.first_group(e.P) + static_cast<int>(group);
  for (int r = first; options.padding && r < first + e.ranks; ++r) {
    padding.push_back(TensorView(padding_.as<std::uint8_t>() + r * each, DType::kU8, {each}, device));
  }
  DeviceMoeForward forward;
  forward.training = options.training, forward.padding_masks = padding;
  forward.token_offset = options.token_offset + number * e.P * each;
  forward.loss_tokens = options.loss_tokens, forward.loss_sequences = options.loss_sequences;
  forward.valid_tokens = options.valid_tokens;
  forward.weights_unchanged = options.weights_unchanged;
  forward.later_losses = sums_counts(layer, options);
  // As LanguageModel draws: one seed a layer, micro-batch and replica of the experts.
  forward.rounding_seed = random_u64(random_u64(random_u64(options.step_seed, layer), options.micro_batch), static_cast<std::uint64_t>(number));
  if (options.training && e.accumulated.data() != nullptr) {
    accumulated.assign(static_cast<std::size_t>(e.ranks), TensorView(e.accumulated.data(), DType::kI32, {config_.layers[layer].moe.E}, device));
    forward.accumulated_counts = accumulated, forward.accumulated_tokens = options.accumulated_tokens;
  }
  return forward;
}

void DevicePart::feed_forward(std::size_t layer, const Forward& options) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kDense);
  DeviceLayerSaved& s = saved_[layer];
  const std::int64_t H = config_.H;
  norm(s.x_mid.as<float>(), list_.layers[layer].feed_forward.norm, T_, H, normed_.data(), true, s.ff_rstd.as<float>());
  if (!config_.layers[layer].is_moe) return dense_forward(layer);
  Experts& e = experts_[moe_index_[layer]];
  const std::vector<MoeTensors> values = moe_values(layer);
  for (std::size_t g = 0; g < e.groups.size(); ++g) {
    const auto first = g * static_cast<std::size_t>(e.ranks), count = static_cast<std::size_t>(e.ranks);
    std::vector<TensorView> x, out, padding, accumulated;
    for (std::size_t r = first; r < first + count; ++r) {
      x.push_back(rank_rows(normed_.data(), DType::kBF16, static_cast<int>(r))), out.push_back(rank_rows(out_.data(), DType::kF32, static_cast<int>(r)));
    }
    const DeviceMoeForward forward = moe_forward(layer, g, options, padding, accumulated);
    e.groups[g].layer->forward(std::span(values).subspan(first, count), x, out, e.groups[g].step, forward, stream_);
  }
}

bool DevicePart::sums_counts(std::size_t layer, const Forward& options) const {
  return config_.layers[layer].is_moe && options.training && experts_[moe_index_[layer]].counts.data() != nullptr;
}

// A group that has ranks on several GPUs has the same counts on all: the first one's are taken.
void DevicePart::add_counts_of_groups(std::size_t layer, std::vector<const std::int32_t*>& counts) const {
  const Experts& e = experts_[moe_index_[layer]];
  if (share_.first_slice(e.P) != 0) return;
  for (const Group& group : e.groups) counts.push_back(group.step.total_counts(0));
}

void DevicePart::sum_counts(std::size_t layer, const std::vector<const std::int32_t*>& counts) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kRouter);
  const Experts& e = experts_[moe_index_[layer]];
  SumGroups call{};
  std::copy(counts.begin(), counts.end(), call.parts);
  call.num_parts = static_cast<int>(counts.size()), call.n = static_cast<int>(e.groups[0].layer->num_counts()), call.sum = e.counts.as<std::int32_t>();
  launch_sum_groups(call, stream_);
  check_launch("sum_groups");
}

// Losses, counters, and the sum with the residual stream.
void DevicePart::feed_forward_end(std::size_t layer, const Forward& options) {
  if (!config_.layers[layer].is_moe) return;
  const DeviceGuard guard(share_.device);
  const std::size_t index = moe_index_[layer];
  Experts& e = experts_[index];
  if (sums_counts(layer, options)) {
    const std::vector<MoeTensors> values = moe_values(layer);
    for (std::size_t g = 0; g < e.groups.size(); ++g) {
      std::vector<TensorView> padding, accumulated;
      const DeviceMoeForward forward = moe_forward(layer, g, options, padding, accumulated);
      const auto count = static_cast<std::size_t>(e.ranks);
      e.groups[g].layer->add_losses(std::span(values).subspan(g * count, count), e.groups[g].step, e.counts.as<std::int32_t>(), forward, stream_);
    }
  }
  if (options.training && e.accumulated.data() != nullptr) {  // the same on every rank
    WB_TRY_CUDA(cudaMemcpyAsync(e.accumulated.data(), e.groups[0].step.global_counts(0), e.accumulated.bytes(), cudaMemcpyDeviceToDevice, stream_));
  }
  collect(index);
  mark(Phase::kDense);
  float* to = layer + 1 < saved_.size() ? saved_[layer + 1].x.as<float>() : x_out_.as<float>();
  launch_add(saved_[layer].x_mid.as<float>(), out_.as<float>(), to, T_ * config_.H, stream_);
  check_launch("add");
}

// Groups on this GPU share the experts' gradients: the first one stores, the others add, in order. What each rank has its own gradient of is added by all then,
// and starts at 0.
void DevicePart::feed_forward_backward(std::size_t layer, bool first_micro_batch) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kDense);
  DeviceLayerSaved& s = saved_[layer];
  const int norm_weight = list_.layers[layer].feed_forward.norm;
  norm(s.x_mid.as<float>(), norm_weight, T_, config_.H, normed_.data(), true, nullptr);
  to_bf16(d_.as<float>(), d_bf16_, T_ * config_.H);
  if (config_.layers[layer].is_moe) {
    const std::vector<MoeTensors> values = moe_values(layer), gradients = moe_gradients(layer);
    Experts& e = experts_[moe_index_[layer]];
    for (std::size_t g = 0; g < e.groups.size(); ++g) {
      const auto first = g * static_cast<std::size_t>(e.ranks), count = static_cast<std::size_t>(e.ranks);
      std::vector<TensorView> x, d_out, dx;
      for (int r = static_cast<int>(first); r < static_cast<int>(first + count); ++r) {
        x.push_back(rank_rows(normed_.data(), DType::kBF16, r)), d_out.push_back(rank_rows(d_bf16_.data(), DType::kBF16, r));
        dx.push_back(rank_rows(d_normed_.data(), DType::kF32, r));
      }
      e.groups[g].layer->backward(std::span(values).subspan(first, count), std::span(gradients).subspan(first, count), x, d_out, dx, e.groups[g].step,
                                  {.accumulate = !first_micro_batch || g > 0}, stream_);
    }
    mark(Phase::kDense);
  } else {
    dense_backward(layer);
  }
  norm_back(s.x_mid.as<float>(), norm_weight, s.ff_rstd.as<float>(), d_normed_.as<float>(), d_.as<float>(), true, T_, config_.H);
}

void DevicePart::dense_forward(std::size_t layer) {
  DeviceLayerSaved& s = saved_[layer];
  const model::FeedForwardParameters& at = list_.layers[layer].feed_forward;
  const std::int64_t H = config_.H, F = config_.layers[layer].dense_F;
  const Device device{DeviceType::kCuda, share_.device};
  project(normed_.data(), at.w1, 2 * F, H, s.h.data(), DType::kBF16, false);
  activation_forward(kSwiGLU, TensorView(s.h.data(), DType::kBF16, {T_, 2 * F}, device), nullptr, TensorView(a_.data(), DType::kBF16, {T_, F}, device),
                     Stream{device, stream_.get(), nullptr});
  float* to = layer + 1 < saved_.size() ? saved_[layer + 1].x.as<float>() : x_out_.as<float>();
  WB_TRY_CUDA(cudaMemcpyAsync(to, s.x_mid.data(), static_cast<std::size_t>(T_ * H) * sizeof(float), cudaMemcpyDeviceToDevice, stream_));
  project(a_.data(), at.w2, H, F, to, DType::kF32, true);
}

void DevicePart::dense_backward(std::size_t layer) {
  DeviceLayerSaved& s = saved_[layer];
  const model::FeedForwardParameters& at = list_.layers[layer].feed_forward;
  const std::int64_t H = config_.H, F = config_.layers[layer].dense_F;
  const Device device{DeviceType::kCuda, share_.device};
  const Stream on{device, stream_.get(), nullptr};
  const auto view = [&](const DeviceBuffer& b, std::int64_t columns) { return TensorView(b.data(), DType::kBF16, {T_, columns}, device); };
  activation_forward(kSwiGLU, view(s.h, 2 * F), nullptr, view(a_, F), on);
  weight_gradient(d_bf16_.data(), a_.data(), at.w2, H, F);
  project_back(d_bf16_.data(), at.w2, H, F, da_.data(), DType::kBF16, false);
  activation_backward(kSwiGLU, view(s.h, 2 * F), nullptr, view(da_, F), view(dh_, 2 * F), nullptr, on);
  weight_gradient(dh_.data(), normed_.data(), at.w1, 2 * F, H);
  project_back(dh_.data(), at.w1, 2 * F, H, d_normed_.data(), DType::kF32, false);
}

// Views of what every rank reads: replicated parameters are one tensor, experts each rank's slice.
std::vector<MoeTensors> DevicePart::moe_values(std::size_t layer) const {
  const model::FeedForwardParameters& at = list_.layers[layer].feed_forward;
  const Device device{DeviceType::kCuda, share_.device};
  const int P = config_.layers[layer].P;
  std::vector<MoeTensors> all(static_cast<std::size_t>(share_.num_ranks));
  for (int r = 0; r < share_.num_ranks; ++r) {
    const auto view = [&](int parameter) {
      if (parameter == model::kNone) return TensorView{};
      const Parameter& p = list_.parameters[static_cast<std::size_t>(parameter)];
      TensorView v = p.value.view();
      if (p.is_expert) v = v.rows(0, p.num_experts / P);
      const bool is_single = !p.trainable || parameter == at.b1 || parameter == at.b2;  // biases are added in f32
      const std::int64_t first = p.is_expert ? r % share_.group_ranks(P) * v.size() : 0;
      v.device = device, v.dtype = is_single ? DType::kF32 : DType::kBF16;
      v.data = is_single ? static_cast<void*>(parameters_.value(parameter) + first) : parameters_.copy(parameter) + first;
      return v;
    };
    MoeTensors& t = all[static_cast<std::size_t>(r)];
    t.gate = view(at.gate), t.router_bias = view(at.router_bias), t.w1 = view(at.w1), t.w2 = view(at.w2), t.b1 = view(at.b1), t.b2 = view(at.b2);
    t.shared_w1 = view(at.shared_w1), t.shared_w2 = view(at.shared_w2), t.latent_down = view(at.latent_down), t.latent_up = view(at.latent_up);
  }
  return all;
}

void* DevicePart::rank_gradient(int parameter, int rank) const {
  const auto found = std::find_if(rank_gradients_.begin(), rank_gradients_.end(), [&](const RankGradient& g) { return g.parameter == parameter; });
  return found == rank_gradients_.end() ? parameters_.grad(parameter) : found->memory.as<float>() + rank * found->size;
}

std::vector<MoeTensors> DevicePart::moe_gradients(std::size_t layer) const {
  const model::FeedForwardParameters& at = list_.layers[layer].feed_forward;
  const int P = config_.layers[layer].P;
  std::vector<MoeTensors> all(static_cast<std::size_t>(share_.num_ranks));
  for (int r = 0; r < share_.num_ranks; ++r) {
    const auto view = [&](int parameter) {
      if (parameter == model::kNone) return TensorView{};
      const Parameter& p = list_.parameters[static_cast<std::size_t>(parameter)];
      TensorView v = p.value.view();
      if (p.is_expert) v = v.rows(0, p.num_experts / P);
      v.device = Device{DeviceType::kCuda, share_.device};
      v.data = p.is_expert ? parameters_.grad(parameter) + r % share_.group_ranks(P) * v.size() : rank_gradient(parameter, r);
      return v;
    };
    MoeTensors& t = all[static_cast<std::size_t>(r)];
    t.gate = view(at.gate), t.w1 = view(at.w1), t.w2 = view(at.w2), t.b1 = view(at.b1), t.b2 = view(at.b2);
    t.shared_w1 = view(at.shared_w1), t.shared_w2 = view(at.shared_w2), t.latent_down = view(at.latent_down), t.latent_up = view(at.latent_up);
  }
  return all;
}

void DevicePart::sum_rank_gradients() {
  const DeviceGuard guard(share_.device);
  mark(Phase::kGradReduce);
  for (const RankGradient& g : rank_gradients_) {
    launch_sum_parts(g.memory.as<float>(), share_.num_ranks, parameters_.grad(g.parameter), g.size, stream_);
    check_launch("sum_parts");
  }
}

void DevicePart::collect(std::size_t index) {
  CollectCall call{};
  const Experts& e = experts_[index];
  auto* base = record_.as<unsigned char>();
  for (int r = 0; r < share_.num_ranks; ++r) {
    const DeviceMoeStep& step = e.groups[static_cast<std::size_t>(r / e.ranks)].step;
    call.reports[r] = &step.report(r % e.ranks), call.counts[r] = step.counts(r % e.ranks);
  }
  call.num_ranks = share_.num_ranks, call.E = e.groups[0].layer->config().E, call.header = header();
  call.layer = reinterpret_cast<LayerRecord*>(base + layout_.layer(index));
  call.ranks = reinterpret_cast<RankRecord*>(base + layout_.rank(index, 0));
  call.total_counts = reinterpret_cast<std::int64_t*>(base + layout_.counts[index]);
  launch_collect(call, stream_);
  check_launch("collect");
}

}  // namespace waybill::cuda
