// SPDX-License-Identifier: Apache-2.0
// Collects a step's statistics over micro-batches, then over ranks, in two collectives.
#pragma once

#include "model/feed_forward.h"

namespace waybill::model {

class StatsCollector {
 public:
  // Takes the layers' running counters as the step's zero.
  explicit StatsCollector(std::vector<FeedForward>& layers);

  void add_loss(double loss_sum) { loss_sum_ += loss_sum; }
  void add(int layer, const MoeStep& step);  // one micro-batch of one MoE layer

  // Counts of the losses of earlier micro-batches of this step, for the global auxiliary loss.
  const std::vector<std::int64_t>& loss_counts(int layer) const { return entry(layer).loss_counts; }
  double counted_tokens(int layer) const { return entry(layer).tokens; }

  // Collective over the world. `tokens`: valid tokens of all ranks.
  StepStats finish(const ModelConfig& config, Fabric& world, std::int64_t tokens, const PhaseTimes& times);

 private:
  struct Entry {
    int layer = 0;
    ExchangeBytes bytes_before;
    double flops_before = 0;
    std::vector<std::int64_t> counts, loss_counts;
    double tokens = 0;
    std::int64_t slots = 0;
    double aux = 0, sequence = 0, global = 0, z = 0;  // this rank's shares
    std::int64_t nonfinite_rows = 0, short_rows = 0;  // this rank's
  };
  Entry& entry(int layer) { return entries_[static_cast<std::size_t>(entry_of_[static_cast<std::size_t>(layer)])]; }
  const Entry& entry(int layer) const { return entries_[static_cast<std::size_t>(entry_of_[static_cast<std::size_t>(layer)])]; }

  std::vector<FeedForward>& layers_;
  std::vector<int> entry_of_;  // by layer; -1 = dense
  std::vector<Entry> entries_;
  double loss_sum_ = 0;
  bool valid_ = true;
  StatusWord status_;
};

}  // namespace waybill::model
