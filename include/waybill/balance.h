// SPDX-License-Identifier: Apache-2.0
// Load balance without gradients: the aux-free expert bias (DeepSeek-V3) and load statistics.
#pragma once

#include <cstdint>
#include <span>

#include "waybill/export.h"

namespace waybill {

// b_e += rate * sign(mean(n) - n_e), compared in integers as sign(sum(n) - E * n_e); sign(0) = 0. Counts are the step's totals over
// all ranks. No tokens: no change. subtract_mean also removes the mean of the update (torchtitan's variant).
WB_API void update_expert_bias(std::span<float> bias, std::span<const std::int64_t> counts, float rate, bool subtract_mean = false);

// max(n) / mean(n); 0 when there are no tokens.
WB_API double load_imbalance(std::span<const std::int64_t> counts);

}  // namespace waybill
