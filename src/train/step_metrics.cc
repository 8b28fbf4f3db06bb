// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "rank_trainer.h"
#include "waybill/balance.h"
#include "waybill/buffer_bytes.h"

namespace waybill {
namespace {

// Every value a rank adds to the sums, in a fixed order; `pack` and `unpack` walk the same list.
template <class Visit>
void each_sum(StepStats& stats, Visit visit) {
  for (double& seconds : stats.times.seconds) visit(seconds);
  for (double& seconds : stats.times.wait_seconds) visit(seconds);
  ExchangeBytes::for_each_field([&](const char*, auto field) {
    std::int64_t& value = stats.bytes.*field;
    auto as_double = static_cast<double>(value);  // exact below 2^53
    visit(as_double);
    value = static_cast<std::int64_t>(as_double);
  });
  visit(stats.expert_flops);
}

void sum_over_ranks(StepStats& stats, Fabric& world) {
  std::vector<double> values;
  each_sum(stats, [&](double& v) { values.push_back(v); });
  world.all_reduce(std::span<double>(values), ReduceOp::kSum, "train.metrics");
  std::size_t i = 0;
  each_sum(stats, [&](double& v) { v = values[i++]; });
}

std::vector<std::int64_t> binned(const std::vector<std::int64_t>& counts, std::int64_t& experts_per_bin) {
  const auto E = static_cast<std::int64_t>(counts.size());
  experts_per_bin = (E + kMaxLoadBins - 1) / kMaxLoadBins;
  std::vector<std::int64_t> bins(static_cast<std::size_t>((E + experts_per_bin - 1) / experts_per_bin), 0);
  for (std::int64_t e = 0; e < E; ++e) bins[static_cast<std::size_t>(e / experts_per_bin)] += counts[static_cast<std::size_t>(e)];
  return bins;
}

}  // namespace

LayerMetrics layer_metrics(const MoeLayerStats& stats) {
  LayerMetrics m;
  m.layer = stats.layer;
  m.counts = binned(stats.counts, m.experts_per_bin);
  m.rank_slots = stats.rank_slots;
  m.max_over_mean = load_imbalance(stats.counts);
  m.rank_imbalance = load_imbalance(stats.rank_slots);
  m.hottest_expert = std::max_element(stats.counts.begin(), stats.counts.end()) - stats.counts.begin();
  m.aux = stats.aux;
  m.sequence = stats.sequence;
  m.global = stats.global;
  m.z = stats.z;
  m.nonfinite_rows = stats.nonfinite_rows;
  m.short_rows = stats.short_rows;
  return m;
}

void reduce_metrics(const StepStats& stats, double step_seconds, Fabric& world, StepMetrics& metrics) {
  StepStats total = stats;
  // What no phase claims is booked as other.
  double& other = total.times.seconds[static_cast<std::size_t>(Phase::kOther)];
  const double claimed = std::accumulate(total.times.seconds.begin(), total.times.seconds.end(), 0.0);
  other += std::max(0.0, step_seconds - claimed);
  sum_over_ranks(total, world);

  for (const MoeLayerStats& layer : stats.layers) metrics.layers.push_back(layer_metrics(layer));
  std::vector<double> largest{step_seconds};
  for (const LayerMetrics& layer : metrics.layers) largest.push_back(layer.rank_imbalance);
  world.all_reduce(std::span<double>(largest), ReduceOp::kMax, "train.metrics_max");
  for (std::size_t i = 0; i < metrics.layers.size(); ++i) metrics.layers[i].rank_imbalance = largest[i + 1];

  const double W = world.size();
  metrics.times = total.times;
  for (double& seconds : metrics.times.seconds) seconds /= W;
  for (double& seconds : metrics.times.wait_seconds) seconds /= W;
  metrics.bytes = total.bytes;
  metrics.step_ms = largest[0] * 1e3;
  metrics.tokens_per_s = static_cast<double>(metrics.tokens) / largest[0];
  const double expert_seconds = metrics.times.seconds[static_cast<std::size_t>(Phase::kExpertGemm)];
  metrics.expert_tflops = expert_seconds > 0 ? total.expert_flops / expert_seconds * 1e-12 : 0;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  metrics.peak_rss_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  const int ranks_here = std::string_view(world.engine()) == "mpi" ? 1 : world.size();
  metrics.peak_bytes = static_cast<std::int64_t>(buffer_bytes().peak) / ranks_here;
}

}  // namespace waybill
