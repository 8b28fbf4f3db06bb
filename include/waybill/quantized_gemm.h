// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM on quantised operands (waybill/quantize.h): the products of waybill/grouped_gemm.h with each operand as codes and scales.
// Letters: S rows, N output columns, C contraction length, L groups.
//
// CPU: operands are dequantised to fp32 and multiplied by grouped_gemm(); finished on return. The reference of the GPU.
// GPU: queued on stream.native, nothing waits, capturable once a call of the same sizes has run on the stream. Two ways, by the formats:
//   fp8   8-bit elements under fp32 scales (kPowerOfTwo or kF32), rows in blocks of 1 x 128, weights in tiles of 128 x 128, in wgrad both in
//         blocks of 128 x 1: 8-bit matrix instructions, sums of 128 products by the tensor cores (about 14 bits), those added in fp32. Compute
//         capability 9.0. Contraction lengths are multiples of 16, result sides of 8, pointers aligned to 16 bytes.
//   wide  every other format: operands dequantised to bf16 in `workspace`, then the bf16 kernels: to the bit the product of dequantize()d
//         operands. MX elements and scales are exact in bf16; NVFP4's group scale rounds.
// Rows and groups as in waybill/grouped_gemm.h; a row's result does not depend on other rows, repeated calls are bit-equal.
#pragma once

#include "waybill/grouped_gemm.h"
#include "waybill/quantize.h"
#include "waybill/workspace.h"

namespace waybill {

struct QuantizedOperand {
  QuantConfig config;
  QuantizedView q;
};

// y[s, :] = W_g a[s, :].
//   a        [S, C], blocks along the row; its scales may end with the groups' last row
//   weights  of a tensor [L, N, C] (kLNC) or [L, C, N] (kLCN) quantised as [L * N, C] or [L * C, N] with offsets g * N or g * C.
//            fp8: forward reads `codes` of kLNC and `turned` of kLCN, dgrad the other one.
//   y        [S, N] fp32 or bf16; accumulate: fp32 only
struct QuantizedGemmArgs {
  QuantizedOperand a, weights;
  TensorView offsets, y;
  WeightLayout layout = WeightLayout::kLNC;
  TensorView bias;  // [L, N] fp32 or null
  bool accumulate = false;
  StatusWord* status = nullptr;
  Workspace workspace;  // on the tensors' device; quantized_gemm_workspace() bytes
};
WB_API void quantized_gemm(const QuantizedGemmArgs& args, Stream stream = {});

// da[s, :] = W_g^T dy[s, :]. weights as above; da [S, C].
struct QuantizedDgradArgs {
  QuantizedOperand dy, weights;
  TensorView offsets, da;
  WeightLayout layout = WeightLayout::kLNC;
  bool accumulate = false;
  StatusWord* status = nullptr;
  Workspace workspace;
};
WB_API void quantized_gemm_dgrad(const QuantizedDgradArgs& args, Stream stream = {});

// dW_g = sum over the group's rows of dy[s]^T a[s]: blocks along the rows of each group. fp8 reads `turned`, wide reads `codes`.
struct QuantizedWgradArgs {
  QuantizedOperand a, dy;
  TensorView offsets, d_weights;
  WeightLayout layout = WeightLayout::kLNC;
  bool accumulate = false;
  StatusWord* status = nullptr;
  Workspace workspace;
};
WB_API void quantized_gemm_wgrad(const QuantizedWgradArgs& args, Stream stream = {});

// Bytes of workspace that a call needs on a GPU, 0 for fp8 and on the CPU: room for the larger operand's bf16 copy and some counts. Where a
// kernel can, both operands pass through that room while they are multiplied; else forward and dgrad take rows and groups in parts that fit it, wgrad columns.
WB_API std::size_t quantized_gemm_workspace(const QuantizedGemmArgs& args);
WB_API std::size_t quantized_gemm_workspace(const QuantizedDgradArgs& args);
WB_API std::size_t quantized_gemm_workspace(const QuantizedWgradArgs& args);

}  // namespace waybill
