// SPDX-License-Identifier: Apache-2.0
// What the ranks must agree on before a step: every rank's micro-batches are checked by all, so a bad one is refused by all.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "waybill/fabric.h"

namespace waybill::model {

// One micro-batch split into inputs and targets. A position is valid where both its token and the next one are not padding (-1).
struct TokenBatch {
  std::int64_t B = 0, seq_len = 0;
  std::vector<std::int32_t> inputs, targets;  // [B * seq_len]; the target of an invalid position is -1
  std::vector<std::uint8_t> padding;          // [B * seq_len] 1 = invalid; empty where every position is valid
  std::int64_t T() const { return B * seq_len; }
};
TokenBatch split_tokens(const TensorView& tokens, std::int64_t seq_len);

// Totals over all ranks and micro-batches. Row 0 of micro-batch m on this rank is row token_offset[m] of the global batch, in
// which micro-batches follow one another and hold the ranks in order.
struct StepPlan {
  std::int64_t valid_tokens = 0, sequences = 0;
  std::vector<std::int64_t> token_offset;
};
// Collective. Refuses, with the same message on every rank: a shape other than [B, seq_len + 1] int32, a token outside
// [-1, vocab), and ranks with different numbers of micro-batches.
StepPlan plan_step(std::span<const TensorView> micro_batches, std::int64_t seq_len, std::int64_t vocab, Fabric& world);

}  // namespace waybill::model
