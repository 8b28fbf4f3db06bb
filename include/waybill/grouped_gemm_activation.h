// SPDX-License-Identifier: Apache-2.0
// A grouped matmul with the activation beside it in one call: the first matmul of experts with its activation, and the transpose of the second with
// the activation's gradient. Fused into the matmul's epilogue where that is possible and faster, otherwise the two calls one after the other; both
// give the same bits.
//
// CPU: finished on return; always the two calls. GPU (all tensors on one CUDA device): queued on stream.native, nothing waits; implementations
// cuda_fused (sm_90a, every tensor bf16, 16-byte aligned, F a multiple of 8) and composed (needs product.y for the matrix between the two calls).
// WB_LOG=select says which and why, WB_FORCE=gemm_activation:<name> pins one. Capturable as grouped_gemm() is; d_weight takes 4 S ceil(F / 64) bytes
// of the stream's scratch.
// Letters: include/waybill/grouped_gemm.h; F the activation's width.
#pragma once

#include "waybill/activation.h"
#include "waybill/grouped_gemm.h"

namespace waybill {

// h[s, :] = W_g a[s, :] (+ bias), out[s, :] = weight[s] * act(h[s, :]) for s in group g.
struct GroupedGemmActivationArgs {
  // y: h [S, 2F or F]; or null where the backward pass does not need it: then the pre-activation never reaches memory (GPU: cuda_fused only).
  // Weights [L, 2F or F, C], or [L, C, 2F or F]: gate, then up. Not accumulating.
  GroupedGemmArgs product;
  ActivationConfig activation;
  TensorView out;     // [S, F]; rows past offsets[L] are not written
  TensorView weight;  // [S] fp32, or null (= 1)
};
WB_API void grouped_gemm_activation(const GroupedGemmActivationArgs& args, Stream stream = {});

// da[s, :] = W_g a[s, :], dh = gradient of h, d_weight[s] = sum_f da[s, f] act(h[s, :])[f]. As the gradient of y = W2 out: product.a is dy, and
// weights W2 [L, N, F] are given as layout kLCN (contraction N), so that dy may be read through a_rows.
struct GroupedGemmActivationBackwardArgs {
  GroupedGemmArgs product;  // y: room for da [S, F], whose content afterwards is unspecified; or null (GPU: cuda_fused only). No bias, not accumulating
  ActivationConfig activation;
  TensorView h, dh;     // [S, 2F or F]; dh may be h. Rows past offsets[L] are not written
  TensorView weight;    // [S] fp32, or null (= 1)
  TensorView d_weight;  // [S] fp32, or null
};
WB_API void grouped_gemm_activation_backward(const GroupedGemmActivationBackwardArgs& args, Stream stream = {});

}  // namespace waybill
