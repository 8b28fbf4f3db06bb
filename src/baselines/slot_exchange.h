// SPDX-License-Identifier: Apache-2.0
// The all-to-all of designs with one copy of a row per expert: slots sorted by expert, split by rank, no deduplication, no ids on the
// wire (their order says it), weights stay at the source and are applied there.
// Worked example (its test uses these numbers): rank 0 of P=2, E=4, ids = {{2,0},{3,2}}: send_slot = {1, 0, 3, 2} (slots of experts
// 0; 2, 2; 3), 1 row to rank 0 and 3 to rank 1. With pad_rows = 1 every expert gets one row: send_slot = {1, -1, 0, 2}, slot 3 must have
// been dropped before.
#pragma once

#include <vector>

#include "waybill/exchange.h"
#include "waybill/fabric.h"
#include "waybill/phase.h"
#include "waybill/route.h"
#include "waybill/stream.h"

namespace waybill::baselines {

class SlotExchange {
 public:
  SlotExchange(const ExpertPlacement& placement, Fabric& ep, Stream stream) : placement_(placement), ep_(ep), stream_(stream) {}

  // pad_rows >= 0: every expert gets exactly this many rows from this rank (may differ between ranks), the missing ones zero.
  // Adds to bytes and slots_visited.
  void plan(const RouteView& route, std::int64_t pad_rows, ExchangeBytes& bytes, std::int64_t& slots_visited, PhaseTimes* times);

  std::int64_t num_sent() const { return static_cast<std::int64_t>(send_slot_.size()); }
  const std::vector<std::int64_t>& send_slot() const { return send_slot_; }  // t * K + k of each sent row; -1 = padding
  std::vector<std::int64_t> expert_counts() const;                           // [L] rows received for each local expert

  // sent [num_sent, H] -> rows: the rows of local expert l begin at starts[l], by source rank. Other rows of `rows` are left alone.
  void dispatch(const TensorView& sent, const std::vector<std::int64_t>& starts, const TensorView& rows, ExchangeBytes& bytes, PhaseTimes* times);
  // The way back.
  void collect(const TensorView& rows, const std::vector<std::int64_t>& starts, const TensorView& sent, ExchangeBytes& bytes, PhaseTimes* times);

 private:
  // Copies between arrival order (source, expert) and expert order, whole (source, expert) blocks at a time.
  void reorder(float* arrived, const std::vector<std::int64_t>& starts, const TensorView& rows, bool to_experts) const;
  std::int64_t rows_to_others() const;

  ExpertPlacement placement_;
  Fabric& ep_;
  Stream stream_;
  std::vector<std::int64_t> send_slot_;
  std::vector<std::int64_t> send_counts_, receive_counts_;  // [P, L]
  Tensor arrived_;
};

}  // namespace waybill::baselines
