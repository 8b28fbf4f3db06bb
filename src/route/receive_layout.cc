// SPDX-License-Identifier: Apache-2.0
// The receiver's layout: a stable counting sort of the row-order slots by local expert.
#include <limits>

#include "waybill/route_plan.h"

namespace waybill {
namespace {

void check_offsets(const char* name, const std::vector<std::int64_t>& offsets) {
  WB_CHECK(!offsets.empty() && offsets[0] == 0, "{} must start with 0", name);
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    WB_CHECK(offsets[i] >= offsets[i - 1], "{} decreases at {}: {} after {}", name, i, offsets[i], offsets[i - 1]);
  }
}

}  // namespace

ReceiveLayout make_receive_layout(int P, std::int64_t L, std::vector<std::int64_t> row_offsets, std::vector<std::int64_t> row_slot_offsets,
                                  const std::int32_t* slot_expert, const float* slot_weight, std::int64_t alignment) {
  WB_CHECK(P >= 1 && L >= 1 && alignment >= 1, "a receive layout needs P, L and alignment of at least 1, got {}, {} and {}", P, L, alignment);
  WB_CHECK(static_cast<std::int64_t>(row_offsets.size()) == P + 1, "row_offsets needs P + 1 = {} values, got {}", P + 1, row_offsets.size());
  check_offsets("row_offsets", row_offsets);
  WB_CHECK(static_cast<std::int64_t>(row_slot_offsets.size()) == row_offsets.back() + 1, "row_slot_offsets needs R + 1 = {} values, got {}",
           row_offsets.back() + 1, row_slot_offsets.size());
  check_offsets("row_slot_offsets", row_slot_offsets);

  ReceiveLayout layout;
  layout.P = P;
  layout.L = L;
  layout.row_offsets = std::move(row_offsets);
  layout.row_slot_offsets = std::move(row_slot_offsets);
  const std::int64_t S = layout.S();
  layout.expert_counts.assign(static_cast<std::size_t>(L), 0);
  for (std::int64_t j = 0; j < S; ++j) {
    WB_CHECK(slot_expert[j] >= 0 && slot_expert[j] < L, "slot {}: local expert {} is outside [0, {})", j, slot_expert[j], L);
    ++layout.expert_counts[static_cast<std::size_t>(slot_expert[j])];
  }

  layout.expert_offsets.assign(static_cast<std::size_t>(L) + 1, 0);
  std::int64_t padded = 0;
  std::vector<std::int64_t> cursor(static_cast<std::size_t>(L));
  for (std::size_t e = 0; e < static_cast<std::size_t>(L); ++e) {
    cursor[e] = padded;
    padded += round_up(layout.expert_counts[e], alignment);
    WB_CHECK(padded <= std::numeric_limits<std::int32_t>::max(), "{} slots with alignment {} exceed 2^31 - 1 on one rank", S, alignment);
    layout.expert_offsets[e + 1] = static_cast<std::int32_t>(padded);
  }
  layout.slot_position.resize(static_cast<std::size_t>(S));
  layout.slot_row.assign(static_cast<std::size_t>(padded), -1);
  layout.slot_weight.assign(static_cast<std::size_t>(padded), 0.0f);
  for (std::int64_t r = 0; r < layout.R(); ++r) {
    for (std::int64_t j = layout.row_slot_offsets[static_cast<std::size_t>(r)]; j < layout.row_slot_offsets[static_cast<std::size_t>(r) + 1]; ++j) {
      const auto position = static_cast<std::size_t>(cursor[static_cast<std::size_t>(slot_expert[j])]++);
      layout.slot_position[static_cast<std::size_t>(j)] = static_cast<std::int64_t>(position);
      layout.slot_row[position] = static_cast<std::int32_t>(r);
      layout.slot_weight[position] = slot_weight[j];
    }
  }
  return layout;
}

}  // namespace waybill
