// SPDX-License-Identifier: Apache-2.0
// The sticky status word: data-dependent faults are recorded where they happen (host or device) and read once per step.
#pragma once

#include <cstdint>
#include <string>

#include "waybill/export.h"

namespace waybill {

enum StatusFlag : std::uint32_t {
  kStatusOk = 0,
  kStatusSlotOverflow = 1u << 0,  // received slots exceeded the slot budget S
  kStatusRowOverflow = 1u << 1,   // received rows exceeded the row budget R
  kStatusBadId = 1u << 2,         // an id outside [-1, E) was met (it is ignored)
  kStatusTimeout = 1u << 3,       // a cross-rank wait ran out
  kStatusBadOffsets = 1u << 4,    // grouped GEMM offsets decrease or pass the row count
  kStatusDuplicateId = 1u << 5,   // GPU exchange: a token names an expert twice; its sums are not to be used
};

// Plain data, the same layout on host and device. Flags are OR-ed and stay until clear(); demands keep their maximum.
struct StatusWord {
  std::uint32_t flags = kStatusOk;
  std::int32_t timeout_rank = -1, timeout_peer = -1, timeout_phase = -1;
  std::int64_t timeout_expected = 0, timeout_seen = 0;
  std::int64_t slot_demand = 0, slot_capacity = 0;
  std::int64_t row_demand = 0, row_capacity = 0;
  std::int64_t num_bad_ids = 0;
  std::int64_t num_nonfinite_rows = 0;  // router: rows with any NaN or Inf logit
  std::int64_t num_short_rows = 0;      // router: rows with fewer than K candidates

  bool overflowed() const { return (flags & (kStatusSlotOverflow | kStatusRowOverflow)) != 0; }
  void clear() { *this = StatusWord{}; }
  // Takes in what another word recorded: flags are OR-ed, demands and capacities keep their maximum, counters add up, and of several
  // timeouts the first stays.
  WB_API void merge(const StatusWord& other);
};

// "slots 512 of 300, rows 128 of 128", for logs and errors.
WB_API std::string describe(const StatusWord& status);

}  // namespace waybill
