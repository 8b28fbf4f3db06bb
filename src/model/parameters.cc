// SPDX-License-Identifier: Apache-2.0
#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "waybill/random.h"

namespace waybill::model {
namespace {

// FNV-1a: the stream of a parameter is named by its text.
std::uint64_t stream_key(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return mix64(seed) ^ mix64(hash);
}

class Builder {
 public:
  Builder(const ModelConfig& config, int rank, std::uint64_t seed, ThreadPool* pool) : config_(config), rank_(rank), seed_(seed), pool_(pool) {}

  ParameterList build() {
    list_.embedding = matrix("embedding.weight", config_.vocab, config_.H, config_.init_std);
    for (std::size_t i = 0; i < config_.layers.size(); ++i) {
      layer_ = static_cast<int>(i);
      const LayerConfig& layer = config_.layers[i];
      LayerParameters& at = list_.layers.emplace_back();
      at.attention = attention();
      at.feed_forward = layer.is_moe ? moe(layer) : dense(layer.dense_F);
    }
    layer_ = -1;
    list_.final_norm = vector("final_norm.weight", config_.H, 1.0f);
    list_.head = config_.tie_embeddings ? list_.embedding : matrix("head.weight", config_.vocab, config_.H, config_.init_std);
    return std::move(list_);
  }

 private:
  std::string name(std::string_view part) const { return fmt::format("layers.{}.{}", layer_, part); }
  // Projections that add to the residual stream start smaller, so that its variance does not grow with depth.
  float output_std() const { return static_cast<float>(config_.init_std / std::sqrt(2.0 * static_cast<double>(config_.layers.size()))); }

  int add(std::string name, Tensor value, bool decay) {
    Parameter& p = list_.parameters.emplace_back();
    p.name = std::move(name);
    p.value = std::move(value);
    p.decay = decay;
    p.layer = layer_;
    return static_cast<int>(list_.parameters.size()) - 1;
  }
  void fill(const Parameter& p, std::int64_t first_index, float std) {
    const std::uint64_t key = stream_key(seed_, p.name);
    float* values = p.value.as<float>();
    parallel_for(pool_, p.value.size(), 4096, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) values[i] = std * random_normal(key, static_cast<std::uint64_t>(first_index + i));
    });
  }
  int matrix(std::string name, std::int64_t rows, std::int64_t columns, float std) {
    const int at = add(std::move(name), Tensor(DType::kF32, {rows, columns}), /*decay=*/true);
    list_.parameters.back().grad = Tensor::zeros(DType::kF32, {rows, columns});
    fill(list_.parameters.back(), 0, std);
    return at;
  }
  int vector(std::string name, std::int64_t size, float value) {
    const int at = add(std::move(name), Tensor(DType::kF32, {size}), /*decay=*/false);
    Parameter& p = list_.parameters.back();
    p.grad = Tensor::zeros(DType::kF32, {size});
    std::fill_n(p.value.as<float>(), size, value);
    return at;
  }
  void mark_expert(Parameter& p, const LayerConfig& layer) const {
    p.is_expert = true;
    p.num_experts = layer.moe.E;
    p.expert_begin = layer.moe.L(layer.P) * (rank_ % layer.P);
  }
  int expert_matrix(std::string name, const LayerConfig& layer, std::int64_t rows, std::int64_t columns, float std) {
    const std::int64_t L = layer.moe.L(layer.P);
    const int at = add(std::move(name), Tensor(DType::kF32, {L, rows, columns}), /*decay=*/true);
    Parameter& p = list_.parameters.back();
    p.grad = Tensor::zeros(DType::kF32, {L, rows, columns});
    mark_expert(p, layer);
    fill(p, p.expert_begin * rows * columns, std);
    return at;
  }
  int expert_bias(std::string name, const LayerConfig& layer, std::int64_t width) {
    const std::int64_t L = layer.moe.L(layer.P);
    const int at = add(std::move(name), Tensor::zeros(DType::kF32, {L, width}), /*decay=*/false);
    Parameter& p = list_.parameters.back();
    p.grad = Tensor::zeros(DType::kF32, {L, width});
    mark_expert(p, layer);
    return at;
  }

  AttentionParameters attention() {
    const std::int64_t H = config_.H, D = config_.head_dim;
    AttentionParameters at;
    at.norm = vector(name("attention.norm.weight"), H, 1.0f);
    at.wq = matrix(name("attention.wq"), config_.num_heads * D, H, config_.init_std);
    at.wk = matrix(name("attention.wk"), config_.num_kv_heads * D, H, config_.init_std);
    at.wv = matrix(name("attention.wv"), config_.num_kv_heads * D, H, config_.init_std);
    at.wo = matrix(name("attention.wo"), H, config_.num_heads * D, output_std());
    if (config_.qk_norm) {
      at.q_norm = vector(name("attention.q_norm.weight"), D, 1.0f);
      at.k_norm = vector(name("attention.k_norm.weight"), D, 1.0f);
    }
    return at;
  }

  FeedForwardParameters dense(std::int64_t F) {
    FeedForwardParameters at;
    at.norm = vector(name("feed_forward.norm.weight"), config_.H, 1.0f);
    at.w1 = matrix(name("dense.w1"), 2 * F, config_.H, config_.init_std);
    at.w2 = matrix(name("dense.w2"), config_.H, F, output_std());
    return at;
  }

  FeedForwardParameters moe(const LayerConfig& layer) {
    const MoeConfig m = moe_config(config_, layer);
    const std::int64_t H = config_.H, W = m.row_width();
    FeedForwardParameters at;
    at.norm = vector(name("feed_forward.norm.weight"), H, 1.0f);
    at.gate = matrix(name("moe.gate"), m.E, H, config_.init_std);
    if (m.bias_update_rate > 0) {
      at.router_bias = add(name("moe.router_bias"), Tensor::zeros(DType::kF32, {m.E}), /*decay=*/false);
      list_.parameters.back().trainable = false;
    }
    if (m.latent > 0) at.latent_down = matrix(name("moe.latent_down"), m.latent, H, config_.init_std);
    at.w1 = expert_matrix(name("moe.w1"), layer, m.inner_width(), W, config_.init_std);
    at.w2 = expert_matrix(name("moe.w2"), layer, W, m.F, m.latent > 0 ? config_.init_std : output_std());
    if (m.expert_bias) {
      at.b1 = expert_bias(name("moe.b1"), layer, m.inner_width());
      at.b2 = expert_bias(name("moe.b2"), layer, W);
    }
    if (m.latent > 0) at.latent_up = matrix(name("moe.latent_up"), H, m.latent, output_std());
    if (m.shared_F > 0) {
      at.shared_w1 = matrix(name("moe.shared_w1"), m.shared_inner_width(), H, config_.init_std);
      at.shared_w2 = matrix(name("moe.shared_w2"), H, m.shared_F, output_std());
    }
    return at;
  }

  const ModelConfig& config_;
  int rank_;
  std::uint64_t seed_;
  ThreadPool* pool_;
  int layer_ = -1;
  ParameterList list_;
};

}  // namespace

MoeConfig moe_config(const ModelConfig& config, const LayerConfig& layer) {
  MoeConfig m = layer.moe;
  m.H = config.H;
  m.sequence_length = config.seq_len;
  if (config.max_sequences > 0) m.T_max = config.max_sequences * config.seq_len;
  m.router.E = m.E;
  m.router.K = m.K;
  return m;
}

ParameterList make_parameters(const ModelConfig& config, int rank, std::uint64_t seed, ThreadPool* pool) { return Builder(config, rank, seed, pool).build(); }

MoeTensors moe_tensors(const ParameterList& list, const FeedForwardParameters& at, bool gradients) {
  const auto view = [&](int index) {
    if (index == kNone) return TensorView{};
    const Parameter& p = list.parameters[static_cast<std::size_t>(index)];
    return gradients ? p.grad.view() : p.value.view();
  };
  MoeTensors t;
  t.gate = view(at.gate);
  t.router_bias = gradients ? TensorView{} : view(at.router_bias);
  t.w1 = view(at.w1);
  t.w2 = view(at.w2);
  t.b1 = view(at.b1);
  t.b2 = view(at.b2);
  t.shared_w1 = view(at.shared_w1);
  t.shared_w2 = view(at.shared_w2);
  t.latent_down = view(at.latent_down);
  t.latent_up = view(at.latent_up);
  return t;
}

}  // namespace waybill::model
