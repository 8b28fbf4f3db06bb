// SPDX-License-Identifier: Apache-2.0
// Where things lie: the windows, scratch and saved memory of one rank, by config alone. The one place that knows sizes; the prediction of memory
// and the allocations both come from it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/cuda/device_moe.h"

namespace waybill::cuda {

// Refuses, by name, what the layer on GPUs does not do.
void check_device_moe(const MoeConfig& config, int P, const DeviceMoeOptions& options);

ExchangeConfig device_exchange_config(const MoeConfig& config);
inline DType partials_dtype(const MoeConfig& config, int P) { return config.combine_wire == CombineWire::kBF16 && P > 1 ? DType::kBF16 : DType::kF32; }

inline constexpr std::uint64_t kNoPart = ~std::uint64_t{0};

// Offsets into the memory that a step owns on one rank.
struct DeviceMoeStepLayout {
  std::uint64_t ids, weights, counts, weight_factors;  // the route
  std::uint64_t logits;                                // f32 [T, E]
  std::uint64_t h, a;                                  // bf16 [S, inner], [S, F]; kNoPart: scratch of the layer
  std::size_t bytes;
};
// The same of the layer's scratch. What a recompute mode keeps in no step lies here.
struct DeviceMoeScratchLayout {
  std::uint64_t logits, h, a;  // kNoPart where the steps have them
  // bf16 [S, W], and at other times of a step d_combined and d_gate_x f32 [T, W] one behind the other.
  std::uint64_t y, d_combined, d_gate_x;
  std::uint64_t d_slot_weight;        // f32 [S]
  std::uint64_t d_weights, d_logits;  // f32 [T, K], [T, E]
  std::size_t bytes;
};
DeviceMoeStepLayout step_layout(const MoeConfig& config, int P);
DeviceMoeScratchLayout scratch_layout(const MoeConfig& config, int P);

// Row windows beside those of the exchange: partials, gradients of rows, and the rows that steps keep (one for all of them where they are
// dispatched again).
struct DeviceMoeWindows {
  std::uint64_t partials = 0, gradients = 0;
};
int num_row_windows(const MoeConfig& config, const DeviceMoeOptions& options);

}  // namespace waybill::cuda
