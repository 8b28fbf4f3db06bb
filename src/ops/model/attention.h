// SPDX-License-Identifier: Apache-2.0
// Causal grouped-query attention over whole sequences, fp32. Probabilities exist for one block of queries of one head at a time;
// the backward pass recomputes them from the saved log-sum-exp.
#pragma once

#include "waybill/stream.h"

namespace waybill {

struct AttentionDims {
  std::int64_t B = 0, seq_len = 0;                             // T = B * seq_len rows, sequence by sequence
  std::int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;  // query head h reads key/value head h / (num_heads / num_kv_heads)
  std::int64_t T() const { return B * seq_len; }
};

// o = softmax(q k^T / sqrt(head_dim)) v per head, keys up to the query's position.
//   q, o [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim], contiguous; lse [B, num_heads, seq_len] saved, or null.
WB_API void attention_forward(const AttentionDims& dims, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, float* lse,
                              Stream stream = {});

// dq, dk, dv are written. Sums over query blocks and over the query heads of a group are in fixed order.
WB_API void attention_backward(const AttentionDims& dims, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, const float* lse,
                               const TensorView& d_o, const TensorView& dq, const TensorView& dk, const TensorView& dv, Stream stream = {});

namespace ref {
// fp64 inside.
void attention_forward(const AttentionDims& dims, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, float* lse);
void attention_backward(const AttentionDims& dims, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& d_o, const TensorView& dq,
                        const TensorView& dk, const TensorView& dv);
}  // namespace ref

}  // namespace waybill
