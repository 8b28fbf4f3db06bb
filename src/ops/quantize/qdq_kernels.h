// SPDX-License-Identifier: Apache-2.0
// The instruction sets of quantize_dequantize(), hadamard_rows() and round_to_bf16(). All give the same bits; they differ in speed.
#pragma once

#include "core/kernel_sets.h"
#include "ops/quantize/qdq_rows.h"

namespace waybill::detail {

using QdqBlockFn = void (*)(const QuantConfig& config, const QdqBlock& block);

struct QdqKernels {
  const char* name;
  QdqBlockFn block[3][4][2];  // by element format, scale format, stochastic
  std::int32_t (*largest_number)(const float* x, std::int64_t count);
  void (*hadamard)(const float* const* x, std::int64_t num_rows, std::int64_t columns, std::uint16_t signs, float* y);
  void (*bf16)(const float* x, std::int64_t count, std::uint16_t* y);
};

using QdqKernelList = UsableSets<QdqKernels>;
// Those this machine can run, best first.
WB_API const QdqKernelList& usable_qdq_kernels();

// The best one, or what WB_FORCE=quantize:<name> or force_quantize() names; null = the reference loops ("ref").
const QdqKernels* selected_qdq_kernels();
WB_API void force_quantize(const char* name);  // tests; "" returns to the default

}  // namespace waybill::detail
