// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM: every local expert's matmul in one call, exactly the valid rows. Accumulation is fp32.
// Letters: S rows, N output columns, C contraction length, L groups. Group g owns rows offsets[g] .. offsets[g+1].
//
// CPU: finished on return. Implementations avx512, avx2, portable and ref (the best one that runs, or WB_FORCE=gemm:<name>). A result is
// bit-equal for any number of threads and does not depend on other rows; avx512 and avx2 agree bit for bit. `accumulate` adds the whole
// sum once. Scratch is per thread, at most 2.5 MiB, and reused.
//
// GPU (all tensors on one CUDA device): queued on stream.native; nothing waits, so the values of offsets and a_rows are not checked on the
// host: offsets that are not an increasing sequence from 0 within the rows set kStatusBadOffsets in `status` and never reach outside the
// tensors; a_rows outside [0, rows of a) count as -1. Implementations: cuda (sm_90a: bf16 operands,
// pointers aligned to 16 bytes and rows multiples of 8 elements) and cuda_portable (everything else, no speed claim); WB_LOG=select says
// which and why. Capturable once a call of the same sizes has run on the stream (scratch is allocated then, at most 80 MiB a stream).
// Repeated calls are bit-equal; a row's result does not depend on other rows.
#pragma once

#include <cstdint>

#include "waybill/status.h"
#include "waybill/stream.h"

namespace waybill {

enum class WeightLayout : std::uint8_t { kLNC = 0, kLCN = 1 };  // [L, N, C] or [L, C, N]

// y[s, :] = W_g a[s, :] for s in group g.
//   a       [*, C] fp32 or bf16. Row s of the product reads a row s, or row a_rows[s] when a_rows is given ([S] int32;
//           -1 = a padding row: the result is 0, or unchanged when accumulating; no bias).
//   weights [L, N, C] or [L, C, N], fp32 or bf16
//   offsets [L+1] int32 on the tensors' device, increasing; offsets[L] <= rows of y. No alignment demanded.
//   y       [S, N] fp32 or bf16; rows past offsets[L] are not written. accumulate: y += product (fp32 only).
struct GroupedGemmArgs {
  TensorView a, weights, offsets, y;
  WeightLayout layout = WeightLayout::kLNC;
  TensorView a_rows;
  TensorView bias;  // [L, N] fp32 added to each row, or null
  bool accumulate = false;
  StatusWord* status = nullptr;  // GPU: in device memory, or null
};
WB_API void grouped_gemm(const GroupedGemmArgs& args, Stream stream = {});

// da[s, :] = W_g^T dy[s, :]. Without a transposed copy of the weights.
struct GroupedGemmDgradArgs {
  TensorView dy, weights, offsets, da;  // dy [S, N], da [S, C]
  WeightLayout layout = WeightLayout::kLNC;
  bool accumulate = false;
  StatusWord* status = nullptr;
};
WB_API void grouped_gemm_dgrad(const GroupedGemmDgradArgs& args, Stream stream = {});

// dW_g = sum over the group's rows of dy[s]^T a[s]; an empty group's gradient is exactly 0 (or unchanged when accumulating).
// A slot whose a_rows entry is -1 adds nothing to d_weights and d_bias, whatever dy holds there.
struct GroupedGemmWgradArgs {
  TensorView a, dy, offsets, d_weights;  // d_weights as the weights' layout, fp32 (or bf16 when storing)
  WeightLayout layout = WeightLayout::kLNC;
  TensorView a_rows;
  TensorView d_bias;  // [L, N] fp32 or null: sum of dy over the group's rows
  bool accumulate = false;
  StatusWord* status = nullptr;
};
WB_API void grouped_gemm_wgrad(const GroupedGemmWgradArgs& args, Stream stream = {});

// Dense matmuls on the same micro-kernel. fp32 (a, b may be bf16), row-major with row strides.
//   c[m, n] (+)= sum_k op(a)[m, k] op(b)[k, n]; op transposes when the flag is set.
struct GemmArgs {
  TensorView a, b, c;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;
};
WB_API void gemm(const GemmArgs& args, Stream stream = {});

}  // namespace waybill
