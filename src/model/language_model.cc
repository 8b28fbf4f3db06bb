// SPDX-License-Identifier: Apache-2.0
#include "waybill/language_model.h"

#include <cstring>

#include "model/attention_block.h"
#include "model/batch.h"
#include "model/feed_forward.h"
#include "model/groups.h"
#include "model/parameters.h"
#include "model/step_stats.h"
#include "ops/model/cross_entropy.h"
#include "ops/model/embedding.h"
#include "ops/model/rms_norm.h"
#include "waybill/balance.h"
#include "waybill/grouped_gemm.h"
#include "waybill/random.h"

namespace waybill {

using model::kNone;
using model::TokenBatch;

namespace {

struct LayerSaved {
  Tensor x, x_mid;  // inputs of the block's two halves, [T, H]
  model::AttentionSaved attention;
  model::FeedForwardSaved feed_forward;
};

}  // namespace

struct LanguageModel::Impl {
  Impl(const ModelConfig& model_config, Fabric& world, std::uint64_t seed, ThreadPool* pool)
      : config(checked(model_config, world.size())),
        stream(Stream::cpu(pool)),
        groups(config, world),
        list(model::make_parameters(config, world.rank(), seed, pool)),
        rope(config.seq_len, config.head_dim, config.rope_theta) {
    attention.reserve(config.layers.size());
    feed_forward.reserve(config.layers.size());
    saved.resize(config.layers.size());
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      const LayerConfig& layer = config.layers[i];
      attention.emplace_back(config, list, list.layers[i].attention, rope, stream);
      feed_forward.emplace_back(config, layer, list, list.layers[i].feed_forward, layer.is_moe ? &groups.expert_parallel(layer.P) : nullptr, world, pool);
    }
  }
  static const ModelConfig& checked(const ModelConfig& config, int W) {
    validate(config, W);
    return config;
  }

  TensorView value(int index) const { return list.parameters[static_cast<std::size_t>(index)].value; }
  TensorView grad(int index) const { return list.parameters[static_cast<std::size_t>(index)].grad; }

  MoeForwardOptions moe_options(const TokenBatch& batch, bool training) const {
    MoeForwardOptions options;
    options.training = training;
    if (!batch.padding.empty()) options.padding_mask = TensorView::of(batch.padding.data(), {batch.T()});
    return options;
  }

  void embed(const TokenBatch& batch, Tensor& x) {
    const PhaseScope scope(&times, Phase::kEmbedding);
    x.resize(DType::kF32, {batch.T(), config.H});
    embedding_forward(value(list.embedding), batch.inputs.data(), batch.T(), x, stream);
  }
  void attend(std::size_t i, const TokenBatch& batch, LayerSaved& s) {
    const PhaseScope scope(&times, Phase::kAttention);
    s.x_mid.resize(DType::kF32, {batch.T(), config.H});
    attention[i].forward(batch.B, batch.seq_len, s.x, s.x_mid, s.attention, attention_scratch);
  }
  void norm_out(const TensorView& x) {
    final_rstd.resize(static_cast<std::size_t>(x.shape[0]));
    final_normed.resize(DType::kF32, {x.shape[0], config.H});
    rms_norm_forward(x, value(list.final_norm), config.norm_epsilon, final_normed, final_rstd.data(), stream);
  }

  // Hidden state before the final norm, in x_out; nothing is kept. Collective.
  void forward_only(const TokenBatch& batch) {
    LayerSaved& s = unsaved;
    evaluation_overflow.clear();
    embed(batch, s.x);
    x_out.resize(DType::kF32, {batch.T(), config.H});
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      attend(i, batch, s);
      feed_forward[i].forward(s.x_mid, x_out, s.feed_forward, feed_forward_scratch, moe_options(batch, false), nullptr);
      const MoeStep& step = s.feed_forward.moe;
      if (feed_forward[i].is_moe() && !step.valid && evaluation_overflow.empty()) evaluation_overflow = fmt::format("layer {}: {}", i, describe(step.status));
      std::swap(s.x, x_out);
    }
    std::swap(s.x, x_out);
  }
  // Evaluation has no step to skip: a result that overflowed a budget on any rank is an error on every rank. Sums `value` on the way.
  double sum_or_refuse(double value) {
    double sums[2] = {value, evaluation_overflow.empty() ? 0.0 : 1.0};
    groups.world().all_reduce(std::span<double>(sums), ReduceOp::kSum, "evaluation");
    if (sums[1] != 0)
      WB_FAIL(ErrorCode::kOverflow, "evaluation: a receive budget overflowed on {} ranks; raise receive_factor. This rank: {}", sums[1],
              evaluation_overflow.empty() ? "ok" : evaluation_overflow);
    return sums[0];
  }

  // One a layer, micro-batch and replica of the experts: replicas see other tokens and take other draws.
  std::uint64_t rounding_seed(std::uint64_t step_seed, std::size_t layer, std::size_t micro_batch) const {
    const int replica = groups.world().rank() / config.layers[layer].P;
    return random_u64(random_u64(random_u64(step_seed, layer), micro_batch), static_cast<std::uint64_t>(replica));
  }

  void forward(const TokenBatch& batch, const model::StepPlan& plan, std::size_t micro_batch, std::uint64_t step_seed, model::StatsCollector& stats) {
    embed(batch, saved[0].x);
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      LayerSaved& s = saved[i];
      attend(i, batch, s);
      const int layer = static_cast<int>(i);
      MoeForwardOptions options = moe_options(batch, true);
      if (feed_forward[i].is_moe()) {
        options.loss_tokens = static_cast<double>(plan.valid_tokens);
        options.loss_sequences = static_cast<double>(plan.sequences);
        options.accumulated_counts = &stats.loss_counts(layer);
        options.accumulated_tokens = stats.counted_tokens(layer);
        options.token_offset = plan.token_offset[micro_batch];
        options.rounding_seed = rounding_seed(step_seed, i, micro_batch);
      }
      Tensor& out = i + 1 < config.layers.size() ? saved[i + 1].x : x_out;
      out.resize(DType::kF32, {batch.T(), config.H});
      feed_forward[i].forward(s.x_mid, out, s.feed_forward, feed_forward_scratch, options, &times);
      if (!feed_forward[i].is_moe()) continue;
      stats.add(layer, s.feed_forward.moe);
      if (route_observer) route_observer(layer, micro_batch, s.feed_forward.moe.route);
    }
  }

  // Loss and its gradient with respect to the last hidden state, in d.
  double loss_and_gradient(const TokenBatch& batch, float scale) {
    const PhaseScope scope(&times, Phase::kEmbedding);
    norm_out(x_out);
    d.resize(DType::kF32, {batch.T(), config.H});
    const CrossEntropySum sum = cross_entropy_forward_backward(final_normed, value(list.head), batch.targets.data(), scale, d, grad(list.head), stream);
    rms_norm_backward(x_out, value(list.final_norm), final_rstd.data(), d, d, /*accumulate=*/false, grad(list.final_norm), stream);
    return sum.loss;
  }

  void backward(const TokenBatch& batch) {
    for (std::size_t i = config.layers.size(); i-- > 0;) {
      LayerSaved& s = saved[i];
      feed_forward[i].backward(s.x_mid, d, s.feed_forward, feed_forward_scratch, &times);
      const PhaseScope scope(&times, Phase::kAttention);
      attention[i].backward(batch.B, batch.seq_len, s.x, d, s.attention, attention_scratch);
    }
    const PhaseScope scope(&times, Phase::kEmbedding);
    embedding_backward(batch.inputs.data(), batch.T(), d, grad(list.embedding), stream);
  }

  ModelConfig config;
  Stream stream;
  model::Groups groups;
  model::ParameterList list;
  RopeTable rope;
  std::vector<model::AttentionBlock> attention;
  std::vector<model::FeedForward> feed_forward;

  // Reused by every micro-batch: nothing is allocated once the sizes have been seen.
  std::vector<LayerSaved> saved;  // by layer
  LayerSaved unsaved;             // of forward_only
  model::AttentionScratch attention_scratch;
  model::FeedForwardScratch feed_forward_scratch;
  Tensor x_out, final_normed, d;  // [T, H]
  std::vector<float> final_rstd;  // [T]
  PhaseTimes times;
  RouteObserver route_observer;
  std::string evaluation_overflow;  // the first layer that overflowed in the last forward_only; empty = none
};

LanguageModel::LanguageModel(const ModelConfig& config, Fabric& world, std::uint64_t seed, ThreadPool* pool)
    : impl_(std::make_unique<Impl>(config, world, seed, pool)) {}
LanguageModel::~LanguageModel() = default;

const ModelConfig& LanguageModel::config() const { return impl_->config; }
std::vector<Parameter>& LanguageModel::parameters() { return impl_->list.parameters; }

void LanguageModel::set_route_observer(RouteObserver observer) { impl_->route_observer = std::move(observer); }

void LanguageModel::zero_gradients() {
  for (Parameter& p : impl_->list.parameters)
    if (p.trainable) p.grad.fill_zero();
}

StepStats LanguageModel::forward_backward(std::span<const TensorView> micro_batches, std::uint64_t rounding_seed) {
  Impl& m = *impl_;
  Fabric& world = m.groups.world();
  const model::StepPlan plan = model::plan_step(micro_batches, m.config.seq_len, m.config.vocab, world);
  zero_gradients();
  m.times = PhaseTimes{};
  model::StatsCollector stats(m.feed_forward);
  const float scale = plan.valid_tokens > 0 ? static_cast<float>(1.0 / static_cast<double>(plan.valid_tokens)) : 0.0f;
  for (std::size_t i = 0; i < micro_batches.size(); ++i) {
    const TokenBatch batch = model::split_tokens(micro_batches[i], m.config.seq_len);
    m.forward(batch, plan, i, rounding_seed, stats);
    stats.add_loss(m.loss_and_gradient(batch, scale));
    m.backward(batch);
  }
  {
    const PhaseScope scope(&m.times, Phase::kGradReduce);
    model::reduce_gradients(m.config, m.list, m.groups);
  }
  return stats.finish(m.config, world, plan.valid_tokens, m.times);
}

double LanguageModel::evaluate(const TensorView& tokens) {
  Impl& m = *impl_;
  const model::StepPlan plan = model::plan_step(std::span(&tokens, 1), m.config.seq_len, m.config.vocab, m.groups.world());
  const TokenBatch batch = model::split_tokens(tokens, m.config.seq_len);
  m.forward_only(batch);
  m.norm_out(m.x_out);
  const double loss = m.sum_or_refuse(cross_entropy_forward(m.final_normed, m.value(m.list.head), batch.targets.data(), m.stream).loss);
  return plan.valid_tokens > 0 ? loss / static_cast<double>(plan.valid_tokens) : 0.0;
}

void LanguageModel::logits(std::span<const std::int32_t> tokens, const TensorView& out) {
  Impl& m = *impl_;
  const auto T = static_cast<std::int64_t>(tokens.size());
  WB_CHECK(T >= 1 && T <= m.config.seq_len, "logits: {} tokens, the model takes 1 .. {}", T, m.config.seq_len);
  WB_CHECK(out.rank == 2 && out.shape[0] == T && out.shape[1] == m.config.vocab, "logits: out {} must be [{}, {}]", out.describe(), T, m.config.vocab);
  TokenBatch batch;
  batch.B = 1;
  batch.seq_len = T;
  batch.inputs.assign(tokens.begin(), tokens.end());
  for (const std::int32_t token : tokens) WB_CHECK(token >= 0 && token < m.config.vocab, "logits: token {} is outside [0, {})", token, m.config.vocab);
  m.forward_only(batch);
  m.sum_or_refuse(0);
  m.norm_out(m.x_out);
  gemm({.a = m.final_normed, .b = m.value(m.list.head), .c = out, .transpose_b = true}, m.stream);
}

void LanguageModel::update_router_bias(const StepStats& stats) {
  Impl& m = *impl_;
  if (!stats.valid) return;
  for (const MoeLayerStats& s : stats.layers) {
    const auto layer = static_cast<std::size_t>(s.layer);
    const int at = m.list.layers[layer].feed_forward.router_bias;
    if (at == kNone) continue;
    const MoeConfig& moe = m.config.layers[layer].moe;
    const TensorView bias = m.value(at);
    update_expert_bias(std::span(bias.as<float>(), static_cast<std::size_t>(bias.size())), s.counts, moe.bias_update_rate, moe.bias_subtract_mean);
  }
}

double LanguageModel::gradient_norm() { return model::gradient_norm(impl_->config, impl_->list, impl_->groups); }

void LanguageModel::set_receive_factor(double factor) {
  for (model::FeedForward& layer : impl_->feed_forward)
    if (layer.is_moe()) layer.moe().set_receive_factor(factor);
}

}  // namespace waybill
