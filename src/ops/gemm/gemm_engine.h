// SPDX-License-Identifier: Apache-2.0
// One engine behind every matmul: groups of c[m, n] (+)= sum_k a[m, k] b[k, n] with one ragged size, cut into one task list over
// (group, m tile, n tile). Forward, dgrad, wgrad and the dense matmuls differ only in strides, so transposes happen while packing.
#pragma once

#include <cstdint>

#include "ops/gemm/kernel.h"
#include "waybill/thread_pool.h"

namespace waybill::detail {

// One input. Its element (outer, k) lies at outer * outer_stride + k * k_stride; one of the strides is 1. `outer` is m for a and n for b.
struct Operand {
  const void* data = nullptr;
  bool is_bf16 = false;
  std::int64_t outer_stride = 0, k_stride = 0;
  std::int64_t group_stride = 0;             // elements from one group's matrix to the next (weights)
  const std::int32_t* outer_rows = nullptr;  // gather: outer index o reads row outer_rows[o]; -1 reads zeros
  const std::int32_t* k_rows = nullptr;      // gather along k
  const std::int32_t* k_mask = nullptr;      // k with a negative entry reads zeros (without a gather)
};

enum class Ragged : std::uint8_t { kNone, kM, kK };  // which size group g takes from offsets[g] .. offsets[g+1]

struct GemmBatch {
  std::int64_t groups = 1, m = 0, n = 0, k = 0;
  Ragged ragged = Ragged::kNone;
  const std::int32_t* offsets = nullptr;  // [groups + 1]; also the first row (kM) or first k (kK) of the group
  Operand a, b;
  void* c = nullptr;
  bool c_is_bf16 = false;
  std::int64_t c_stride = 0, c_group_stride = 0;
  bool accumulate = false;               // c += the whole sum, rounded once
  const float* bias = nullptr;           // [groups, n]
  const std::int32_t* c_mask = nullptr;  // rows with a negative entry become 0 (or stay, when accumulating)
};

// Runs the batch. Bit-equal for any pool and any tile size. Scratch is per thread, kept and reused: it allocates (through Buffer) only when
// a thread meets a larger problem than before, at most 1.8 MiB.
void run_gemm_batch(const GemmBatch& batch, const KernelSet& kernels, ThreadPool* pool);

}  // namespace waybill::detail
