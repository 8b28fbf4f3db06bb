// SPDX-License-Identifier: Apache-2.0
// Token embedding: y[t] = table[token[t]]; a token -1 (padding) reads zeros and gives no gradient. fp32.
#pragma once

#include "waybill/stream.h"

namespace waybill {

// tokens [T] int32 in [-1, vocab), table [vocab, H], y [T, H].
WB_API void embedding_forward(const TensorView& table, const std::int32_t* tokens, std::int64_t T, const TensorView& y, Stream stream = {});
// d_table[token[t]] += dy[t], tokens in order.
WB_API void embedding_backward(const std::int32_t* tokens, std::int64_t T, const TensorView& dy, const TensorView& d_table, Stream stream = {});

}  // namespace waybill
