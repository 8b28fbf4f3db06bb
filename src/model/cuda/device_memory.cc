// SPDX-License-Identifier: Apache-2.0
#include "model/cuda/device_memory.h"

#include <algorithm>
#include <iterator>

#include "core/cuda/num_sms.h"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

double real(std::int64_t value) { return static_cast<double>(value); }

struct Widths {
  explicit Widths(const ModelConfig& c) : q(c.num_heads * c.head_dim), kv(c.num_kv_heads * c.head_dim) {
    for (const LayerConfig& layer : c.layers) dense_F = std::max(dense_F, layer.is_moe ? 0 : layer.dense_F);
  }
  std::int64_t q, kv, dense_F = 0;
};

// DevicePart::allocate_layers().
double layer_bytes(const ModelConfig& c, const LayerConfig& layer, double T, int num_ranks) {
  const Widths w(c);
  double sum = T * 4 * real(2 * c.H + 2 * w.q + 2 * w.kv + c.num_heads + 2);
  if (c.qk_norm) sum += T * 4 * real(w.q + w.kv + c.num_heads + c.num_kv_heads);
  if (!layer.is_moe) return sum + T * 2 * real(2 * layer.dense_F);
  if (num_ranks == 1) return sum;
  const MoeConfig& m = layer.moe;
  return sum + num_ranks * 4 * real(m.E * c.H + m.shared_F * c.H + m.shared_inner_width() * c.H + 2 * m.latent * c.H);
}

// DevicePart::allocate_scratch() and its inputs.
double part_scratch(const ModelConfig& c, double T) {
  const Widths w(c);
  const auto rows = static_cast<std::int64_t>(T);
  double sum = T * (2 * real(2 * c.H + 2 * w.q + 4 * w.dense_F) + 4 * real(4 * c.H + 2 * w.q + 2 * w.kv + c.num_heads + 1) + 8 + 9);
  std::int64_t partials = rms_norm_partials(rows, c.H);
  if (c.qk_norm) partials = std::max(partials, rms_norm_partials(rows * std::max(c.num_heads, c.num_kv_heads), c.head_dim));
  sum += 4 * real(partials) + 4 * real(c.seq_len * c.head_dim);
  const std::int64_t logit_rows = std::min(rows, std::max<std::int64_t>(kLogitElements / c.vocab, 64));
  return sum + 6 * real(logit_rows * c.vocab);
}

// Of all experts' parameters, on a GPU of so many ranks: groups on it share theirs.
double expert_share(const ModelConfig& c, int num_ranks) {
  double all = 0, here = 0;
  for (const LayerConfig& layer : c.layers) {
    if (!layer.is_moe) continue;
    const MoeConfig& m = layer.moe;
    const double size = real(m.E) * real(m.inner_width() + m.F) * real(m.latent > 0 ? m.latent : c.H);
    all += size, here += size * std::min(layer.P, num_ranks) / layer.P;
  }
  return all > 0 ? here / all : 0;
}

constexpr MoeForm kForms[] = {{false, 1}, {true, 1}, {true, 2}, {true, 3}, {true, 4}};

GpuMemoryEstimate memory_with(const ModelConfig& config, int W, const DeviceModelOptions& options, const MoeForm& form) {
  GpuMemoryEstimate m;
  const auto num_gpus = static_cast<int>(options.devices.size());
  m.num_ranks = W / num_gpus;
  const ParameterCounts n = count_parameters(architecture_of(config));
  const double parameters = real(n.total() - n.experts) + real(n.experts) * expert_share(config, m.num_ranks);
  constexpr double kChunk = (sizeof(OptimizerChunk) + sizeof(double)) / static_cast<double>(kOptimizerChunk);  // the optimizer's list, an element
  m.weights = parameters * (4 + 2), m.gradients = parameters * 4, m.optimizer = parameters * (8 + kChunk);
  const double T = real(options.B * m.num_ranks * config.seq_len);
  m.scratch = part_scratch(config, T);
  double operations = 0;
  for (const LayerConfig& layer : config.layers) {
    m.activations += layer_bytes(config, layer, T, m.num_ranks);
    if (!layer.is_moe) continue;
    const MoeConfig moe_config = device_moe_config(config, layer, options);
    const DeviceMoeMemory moe = DeviceMoeLayer::memory(moe_config, layer.P, moe_options(moe_config, form), 0, num_sms_or(132));
    m.moe_windows += static_cast<double>(moe.windows) * m.num_ranks, m.moe_steps += static_cast<double>(moe.step) * m.num_ranks;
    m.scratch += static_cast<double>(moe.scratch) * m.num_ranks;
    operations = std::max(operations, static_cast<double>(moe.operations));  // one stream: all layers share it
  }
  m.scratch += operations;
  return m;
}

}  // namespace

DeviceMoeOptions moe_options(const MoeConfig& config, const MoeForm& form) {
  DeviceMoeOptions options;
  options.resend_rows = form.resend_rows;
  if (!config.recipe.is_blocked() && !config.expert_bias) options.column_blocks = form.column_blocks;
  return options;
}

MoeForm choose_moe_form(const ModelConfig& config, int W, const DeviceModelOptions& options) {
  for (const MoeForm& form : kForms) {
    if (options.memory == 0 || memory_with(config, W, options, form).total() <= static_cast<double>(options.memory)) return form;
  }
  return *std::rbegin(kForms);
}

GpuMemoryEstimate device_model_memory(const ModelConfig& config, int W, const DeviceModelOptions& options) {
  return memory_with(config, W, options, choose_moe_form(config, W, options));
}

}  // namespace waybill::cuda
