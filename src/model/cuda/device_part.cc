// SPDX-License-Identifier: Apache-2.0
#include "model/cuda/device_part.h"

#include <algorithm>
#include <cstring>

#include "core/cuda/dense_matmul.h"
#include "ops/model/cuda/model_kernels.h"
#include "ops/model/rope.h"

namespace waybill::cuda {
namespace {

std::vector<std::int64_t> experts_of(const ModelConfig& config) {
  std::vector<std::int64_t> experts;
  for (const LayerConfig& layer : config.layers)
    if (layer.is_moe) experts.push_back(layer.moe.E);
  return experts;
}

}  // namespace

DevicePart::DevicePart(const ModelConfig& config, const model::ParameterList& list, const DeviceShare& share, std::int64_t B, int inputs_in_flight)
    : config_(config),
      list_(list),
      share_(share),
      stream_(share.device),
      B_(B * share.num_ranks),
      T_(B_ * config.seq_len),
      parameters_(config, list, share),
      layout_(experts_of(config), share.num_ranks, share.W),
      record_(layout_.bytes, share.device),
      update_state_(sizeof(UpdateState), share.device),
      num_staging_(inputs_in_flight) {
  const DeviceGuard guard(share_.device);
  update_state_.fill(0, stream_);
  const auto T = static_cast<std::size_t>(T_);
  inputs_ = floats(T_), targets_ = floats(T_), padding_ = DeviceBuffer(T, share_.device);
  staging_ = PinnedBuffer(static_cast<std::size_t>(num_staging_) * T * 9);
  const RopeTable rope(config.seq_len, config.head_dim, config.rope_theta);
  const std::int64_t angles = config.seq_len * config.head_dim / 2;
  cos_ = floats(angles), sin_ = floats(angles);
  cos_.upload(rope.cos(0), cos_.bytes(), stream_), sin_.upload(rope.sin(0), sin_.bytes(), stream_);
  stream_.synchronize();
  allocate_layers();
  allocate_scratch();
}

void DevicePart::allocate_layers() {
  const std::int64_t H = config_.H, q = config_.num_heads * config_.head_dim, kv = config_.num_kv_heads * config_.head_dim;
  std::size_t num_moe = 0;
  for (std::size_t i = 0; i < config_.layers.size(); ++i) {
    DeviceLayerSaved& s = saved_.emplace_back();
    s.x = floats(T_ * H), s.x_mid = floats(T_ * H);
    s.q = floats(T_ * q), s.k = floats(T_ * kv), s.v = floats(T_ * kv), s.o = floats(T_ * q);
    s.lse = floats(T_ * config_.num_heads), s.rstd = floats(T_), s.ff_rstd = floats(T_);
    if (config_.qk_norm) {
      s.q_raw = floats(T_ * q), s.k_raw = floats(T_ * kv);
      s.q_rstd = floats(T_ * config_.num_heads), s.k_rstd = floats(T_ * config_.num_kv_heads);
    }
    const LayerConfig& layer = config_.layers[i];
    moe_index_.push_back(layer.is_moe ? num_moe++ : 0);
    if (!layer.is_moe) s.h = halves(T_ * 2 * layer.dense_F);
    if (!layer.is_moe || share_.num_ranks == 1) continue;
    const model::FeedForwardParameters& at = list_.layers[i].feed_forward;
    for (const int parameter : {at.gate, at.shared_w1, at.shared_w2, at.latent_down, at.latent_up}) {
      if (parameter == model::kNone) continue;
      const std::int64_t size = parameters_.size(parameter);
      rank_gradients_.push_back({parameter, size, floats(size * share_.num_ranks), share_.num_groups(layer.P) > 1});
    }
  }
}

void DevicePart::allocate_scratch() {
  const std::int64_t H = config_.H, q = config_.num_heads * config_.head_dim, kv = config_.num_kv_heads * config_.head_dim;
  x_out_ = floats(T_ * H), final_rstd_ = floats(T_);
  normed_ = halves(T_ * H), d_bf16_ = halves(T_ * H), out_ = floats(T_ * H), d_ = floats(T_ * H), d_normed_ = floats(T_ * H);
  o_bf16_ = halves(T_ * q), d_o_ = floats(T_ * q), dq_ = floats(T_ * q), dk_ = floats(T_ * kv), dv_ = floats(T_ * kv), d_head_bf16_ = halves(T_ * q);
  delta_ = floats(T_ * config_.num_heads);
  std::int64_t F = 0;
  for (const LayerConfig& layer : config_.layers) F = std::max(F, layer.is_moe ? 0 : layer.dense_F);
  a_ = halves(T_ * F), da_ = halves(T_ * F), dh_ = halves(T_ * 2 * F);
  std::int64_t partials = rms_norm_partials(T_, H);
  if (config_.qk_norm) partials = std::max(partials, rms_norm_partials(T_ * std::max(config_.num_heads, config_.num_kv_heads), config_.head_dim));
  partial_ = floats(partials);
  logit_rows_ = std::min(T_, std::max<std::int64_t>(kLogitElements / config_.vocab, 64));
  logits_ = floats(logit_rows_ * config_.vocab), d_logits_ = halves(logit_rows_ * config_.vocab);
  losses_ = DeviceBuffer(static_cast<std::size_t>(T_) * sizeof(double), share_.device);
}

void DevicePart::load(std::span<const model::TokenBatch> ranks) {
  const DeviceGuard guard(share_.device);
  const auto T = static_cast<std::size_t>(T_), each = T / static_cast<std::size_t>(share_.num_ranks);
  auto* inputs = staging_.at<std::int32_t>(static_cast<std::size_t>(next_staging_) * T * 9);
  std::int32_t* targets = inputs + T;
  auto* padding = reinterpret_cast<std::uint8_t*>(targets + T);
  next_staging_ = (next_staging_ + 1) % num_staging_;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const model::TokenBatch& batch = ranks[r];
    WB_CHECK(batch.inputs.size() == each, "a GPU's rank brings {} tokens, the model was made for {}", batch.inputs.size(), each);
    std::memcpy(inputs + r * each, batch.inputs.data(), each * 4);
    std::memcpy(targets + r * each, batch.targets.data(), each * 4);
    if (batch.padding.empty()) {
      std::memset(padding + r * each, 0, each);
    } else {
      std::memcpy(padding + r * each, batch.padding.data(), each);
    }
  }
  inputs_.upload(inputs, T * 4, stream_), targets_.upload(targets, T * 4, stream_), padding_.upload(padding, T, stream_);
}

void DevicePart::begin_step() {
  const DeviceGuard guard(share_.device);
  record_.fill(0, stream_);
  for (const Experts& e : experts_) {
    if (e.accumulated.data() != nullptr) e.accumulated.fill(0, stream_);
  }
  for (const RankGradient& g : rank_gradients_) {
    if (g.is_added) g.memory.fill(0, stream_);
  }
  WB_TRY_CUDA(cudaMemsetAsync(parameters_.grads(), 0, static_cast<std::size_t>(parameters_.num_replicated()) * sizeof(float), stream_));
}

TensorView DevicePart::rank_rows(void* data, DType dtype, int rank) const {
  const std::int64_t each = T_ / share_.num_ranks;
  return TensorView(static_cast<unsigned char*>(data) + static_cast<std::size_t>(rank * each * config_.H) * size_bytes(dtype), dtype, {each, config_.H},
                    Device{DeviceType::kCuda, share_.device});
}

void DevicePart::project(const void* x, int weight, std::int64_t N, std::int64_t C, void* y, DType y_dtype, bool accumulate) const {
  dense_matmul({.M = T_, .N = N, .C = C, .transpose_b = true, .accumulate = accumulate, .out = y_dtype}, x, parameters_.copy(weight), y, share_.device,
               stream_);
}
void DevicePart::project_back(const void* dy, int weight, std::int64_t N, std::int64_t C, void* dx, DType dx_dtype, bool accumulate) const {
  dense_matmul({.M = T_, .N = C, .C = N, .accumulate = accumulate, .out = dx_dtype}, dy, parameters_.copy(weight), dx, share_.device, stream_);
}
void DevicePart::weight_gradient(const void* dy, const void* x, int weight, std::int64_t N, std::int64_t C) const {
  dense_matmul({.M = N, .N = C, .C = T_, .transpose_a = true, .accumulate = true}, dy, x, parameters_.grad(weight), share_.device, stream_);
}

void DevicePart::norm(const float* x, int weight, std::int64_t rows, std::int64_t width, void* y, bool y_is_bf16, float* rstd) const {
  launch_rms_norm_forward({x, parameters_.value(weight), config_.norm_epsilon, rows, width, y, y_is_bf16, rstd}, stream_);
  check_launch("rms_norm_forward");
}
void DevicePart::norm_back(const float* x, int weight, const float* rstd, const float* dy, float* dx, bool accumulate, std::int64_t rows,
                           std::int64_t width) const {
  launch_rms_norm_backward({x, parameters_.value(weight), rstd, dy, dx, accumulate, parameters_.grad(weight), partial_.as<float>(), rows, width}, stream_);
  check_launch("rms_norm_backward");
}
void DevicePart::to_bf16(const float* x, const DeviceBuffer& y, std::int64_t count) const {
  launch_to_bf16(x, y.data(), count, stream_);
  check_launch("to_bf16");
}
void DevicePart::rotate(const DeviceBuffer& x, std::int64_t heads, bool inverse) const {
  launch_rope({x.as<float>(), cos_.as<float>(), sin_.as<float>(), T_, heads, config_.head_dim, config_.seq_len, inverse}, stream_);
  check_launch("rope");
}

}  // namespace waybill::cuda
