// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine of the dense-map design, with DenseMapChanges turning its parts into compact ones. Rows are deduplicated per
// rank, as the best of these designs do; what is dense is the route on the wire, the probabilities beside a row, and every loop over the
// experts of a row.
#pragma once

#include <cstdint>
#include <vector>

#include "waybill/baselines.h"
#include "waybill/stream.h"

namespace waybill::baselines {

class MapRows {
 public:
  MapRows(const DenseMapChanges& changes, const ExpertPlacement& placement, Fabric& ep, Stream stream)
      : changes_(changes), placement_(placement), ep_(ep), stream_(stream), L_(placement.L()), first_(ep.rank() * L_) {}

  // Exchanges routes, and from them builds both sides' row lists and the slots of every received row. Collective, as all that follows.
  void plan(const RouteView& route, MoeStackCounters& counters, PhaseTimes* times);

  std::int64_t R() const { return receive_offsets_.back(); }
  std::int64_t S() const { return expert_offsets_.back(); }
  const std::vector<std::int32_t>& expert_offsets() const { return expert_offsets_; }
  const float* slot_weight() const { return slot_weight_.data(); }

  // x [T, H] -> rows [R, H], by source rank then token.
  void dispatch(const TensorView& x, Tensor& rows, MoeStackCounters& counters, PhaseTimes* times);
  // Probability rows follow their rows; slot_weight() is theirs.
  void dispatch_probabilities(MoeStackCounters& counters, PhaseTimes* times);
  // rows [R, H] -> slots [S, H] by expert, and its transpose z[r] = sum of the row's slots.
  void permute(const TensorView& rows, const TensorView& slots, MoeStackCounters& counters, PhaseTimes* times);
  void reduce(const TensorView& slots, const TensorView& z, MoeStackCounters& counters, PhaseTimes* times);
  // z [R, H] goes home; out [T, H] is the sum over ranks in rank order.
  void combine(const TensorView& z, const TensorView& out, MoeStackCounters& counters, PhaseTimes* times);
  // d_slot [S] -> d_weights [T, K], as full or sliced gradient rows of the probabilities.
  void return_weights(const float* d_slot, float* d_weights, MoeStackCounters& counters, PhaseTimes* times);

 private:
  bool from_ids() const { return changes_.compact_routes && changes_.row_lists; }
  std::int64_t probability_width() const { return changes_.local_slice ? L_ : placement_.E; }
  std::int64_t probability_begin(int rank) const { return changes_.local_slice ? 0 : rank * L_; }  // column of a rank's first expert

  // map_plan.cc
  void gather_routes(const RouteView& route, MoeStackCounters& counters);
  void list_sent_rows(MoeStackCounters& counters);
  void find_received_rows(MoeStackCounters& counters);
  void number_slots(const std::vector<std::int64_t>& counts, MoeStackCounters& counters);

  // map_rows.cc
  std::int64_t rows_to_others() const;
  template <class Body>
  void for_each_slot(std::int64_t r, const Body& body) const;  // body(position, local expert)
  std::int64_t visits() const { return changes_.row_lists ? S() : R() * L_; }
  void send_rows(const float* packed, float* received, std::int64_t width, const char* phase);
  void return_rows(const float* mine, float* returned, std::int64_t width, const char* phase);

  DenseMapChanges changes_;
  ExpertPlacement placement_;
  Fabric& ep_;
  Stream stream_;
  std::int64_t L_, first_;

  std::int64_t T_ = 0, K_ = 0;
  std::vector<std::int32_t> ids_;            // [T, K] of this rank
  std::vector<float> weights_;               // [T, K]
  std::vector<std::int64_t> token_offsets_;  // [P+1] tokens of all ranks
  std::vector<std::uint8_t> own_map_;        // [T, E]
  std::vector<std::uint8_t> all_map_;        // [all T, E], or [all T, L] rebuilt from ids
  std::vector<std::int32_t> all_ids_;        // [all T, K]

  std::vector<std::int64_t> send_offsets_, receive_offsets_;  // [P+1]
  std::vector<std::int32_t> send_token_;                      // [rows sent]
  std::vector<std::int64_t> receive_token_;                   // [R] index into the tokens of all ranks
  std::vector<std::int32_t> expert_offsets_;                  // [L+1]
  std::vector<std::int32_t> slot_map_;                        // scans: [R, L] position or -1
  std::vector<std::int64_t> row_slot_offsets_;                // lists: [R+1]
  std::vector<std::int32_t> row_slot_, row_expert_;           // lists: [S] position and local expert, by row
  std::vector<float> slot_weight_;                            // [S]
  std::vector<float> packed_, parts_;
};

}  // namespace waybill::baselines
