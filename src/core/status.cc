// SPDX-License-Identifier: Apache-2.0
#include "waybill/status.h"

#include <fmt/format.h>

#include <algorithm>

namespace waybill {

void StatusWord::merge(const StatusWord& other) {
  if ((other.flags & kStatusTimeout) != 0 && (flags & kStatusTimeout) == 0) {
    timeout_rank = other.timeout_rank;
    timeout_peer = other.timeout_peer;
    timeout_phase = other.timeout_phase;
    timeout_expected = other.timeout_expected;
    timeout_seen = other.timeout_seen;
  }
  flags |= other.flags;
  slot_demand = std::max(slot_demand, other.slot_demand);
  slot_capacity = std::max(slot_capacity, other.slot_capacity);
  row_demand = std::max(row_demand, other.row_demand);
  row_capacity = std::max(row_capacity, other.row_capacity);
  num_bad_ids += other.num_bad_ids;
  num_nonfinite_rows += other.num_nonfinite_rows;
  num_short_rows += other.num_short_rows;
}

std::string describe(const StatusWord& status) {
  if (status.flags == kStatusOk && status.num_bad_ids == 0 && status.num_nonfinite_rows == 0 && status.num_short_rows == 0) return "ok";
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  if (status.overflowed()) {
    add(fmt::format("receive overflow: slots {} of {}, rows {} of {}", status.slot_demand, status.slot_capacity, status.row_demand, status.row_capacity));
  }
  if ((status.flags & kStatusTimeout) != 0 && status.timeout_peer < 0) {
    add("the group has lost a rank");
  } else if ((status.flags & kStatusTimeout) != 0) {
    add(fmt::format("timeout: rank {} waited for rank {} in phase {}, expected {}, saw {}", status.timeout_rank, status.timeout_peer, status.timeout_phase,
                    status.timeout_expected, status.timeout_seen));
  }
  if ((status.flags & kStatusDuplicateId) != 0) add("a token names an expert twice");
  if ((status.flags & kStatusBadOffsets) != 0) add("grouped GEMM offsets decrease or pass the number of rows");
  if (status.num_bad_ids > 0 || (status.flags & kStatusBadId) != 0) add(fmt::format("{} ids outside [-1, E) ignored", status.num_bad_ids));
  if (status.num_nonfinite_rows > 0) add(fmt::format("{} rows with NaN or Inf logits", status.num_nonfinite_rows));
  if (status.num_short_rows > 0) add(fmt::format("{} rows with fewer than K candidates", status.num_short_rows));
  return text;
}

}  // namespace waybill
