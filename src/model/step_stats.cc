// SPDX-License-Identifier: Apache-2.0
#include "model/step_stats.h"

#include <algorithm>

namespace waybill::model {
namespace {

void add_to(std::vector<std::int64_t>& total, const std::vector<std::int64_t>& counts) {
  total.resize(std::max(total.size(), counts.size()), 0);
  for (std::size_t e = 0; e < counts.size(); ++e) total[e] += counts[e];
}

}  // namespace

StatsCollector::StatsCollector(std::vector<FeedForward>& layers) : layers_(layers), entry_of_(layers.size(), -1) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].is_moe()) continue;
    entry_of_[i] = static_cast<int>(entries_.size());
    Entry& e = entries_.emplace_back();
    e.layer = static_cast<int>(i);
    e.bytes_before = layers[i].moe().bytes();
    e.flops_before = layers[i].moe().expert_flops();
    e.counts.assign(static_cast<std::size_t>(layers[i].moe().config().E), 0);
    e.loss_counts = e.counts;
  }
}

void StatsCollector::add(int layer, const MoeStep& step) {
  Entry& e = entry(layer);
  add_to(e.counts, step.counts);
  add_to(e.loss_counts, step.loss_counts);
  e.tokens += step.valid_tokens;
  e.slots += step.slots;
  e.aux += step.losses.aux;
  e.sequence += step.losses.sequence;
  e.global += step.global_loss;
  e.z += step.losses.z;
  e.nonfinite_rows += step.status.num_nonfinite_rows;
  e.short_rows += step.status.num_short_rows;
  status_.merge(step.status);
  valid_ = valid_ && step.valid;
}

StepStats StatsCollector::finish(const ModelConfig& config, Fabric& world, std::int64_t tokens, const PhaseTimes& times) {
  const auto W = static_cast<std::size_t>(world.size()), rank = static_cast<std::size_t>(world.rank());
  // Per MoE layer: slots of every rank, then the two router counters; at the end the number of ranks whose step is invalid.
  const std::size_t width = W + 2;
  std::vector<std::int64_t> counters(entries_.size() * width + 1, 0);
  std::vector<double> losses{loss_sum_};
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    counters[i * width + rank] = e.slots;
    counters[i * width + W] = e.nonfinite_rows;
    counters[i * width + W + 1] = e.short_rows;
    losses.insert(losses.end(), {e.aux, e.sequence, e.global, e.z});
  }
  counters.back() = valid_ ? 0 : 1;
  world.all_reduce(std::span<std::int64_t>(counters), ReduceOp::kSum, "step statistics");
  world.all_reduce(std::span<double>(losses), ReduceOp::kSum, "step statistics");

  StepStats stats;
  stats.tokens = tokens;
  stats.loss = tokens > 0 ? losses[0] / static_cast<double>(tokens) : 0.0;
  stats.valid = counters.back() == 0;
  stats.status = status_;
  stats.times = times;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    MoeLayer& moe = layers_[static_cast<std::size_t>(e.layer)].moe();
    MoeLayerStats& s = stats.layers.emplace_back();
    const auto P = static_cast<std::size_t>(config.layers[static_cast<std::size_t>(e.layer)].P);
    const auto first = counters.begin() + static_cast<std::ptrdiff_t>(i * width);
    const auto group = first + static_cast<std::ptrdiff_t>(rank / P * P);
    s.layer = e.layer;
    s.counts = std::move(e.counts);
    s.rank_slots.assign(group, group + static_cast<std::ptrdiff_t>(P));
    s.nonfinite_rows = first[static_cast<std::ptrdiff_t>(W)];
    s.short_rows = first[static_cast<std::ptrdiff_t>(W + 1)];
    s.aux = losses[1 + 4 * i];
    s.sequence = losses[2 + 4 * i];
    s.global = losses[3 + 4 * i];
    s.z = losses[4 + 4 * i];
    stats.aux_loss += s.aux + s.sequence + s.global + s.z;
    stats.bytes += moe.bytes();
    stats.bytes -= e.bytes_before;
    stats.expert_flops += moe.expert_flops() - e.flops_before;
  }
  return stats;
}

}  // namespace waybill::model
