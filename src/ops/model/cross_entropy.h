// SPDX-License-Identifier: Apache-2.0
// Cross-entropy fused with the output projection: logits = x head^T exist for one chunk of rows at a time, never [T, vocab] for a
// large vocabulary. fp32 maths, losses summed in double in row order.
#pragma once

#include <algorithm>

#include "waybill/stream.h"

namespace waybill {

// Rows whose logits exist at a time: about 2 MB of them, 16 to 512 rows. A function of the vocabulary only.
inline std::int64_t cross_entropy_chunk_rows(std::int64_t vocab) {
  return std::clamp<std::int64_t>((std::int64_t{1} << 19) / std::max<std::int64_t>(vocab, 1), 16, 512);
}

struct CrossEntropySum {
  double loss = 0;         // sum over valid rows of -log softmax(logits)[target], nats
  std::int64_t count = 0;  // valid rows
};

// x [T, H], head [vocab, H], targets [T] int32 in [-1, vocab); -1 = no loss, no gradient.
WB_API CrossEntropySum cross_entropy_forward(const TensorView& x, const TensorView& head, const std::int32_t* targets, Stream stream = {});

// The same, and dx [T, H] = scale * d(sum loss)/dx written, d_head [vocab, H] += scale * d(sum loss)/d head.
WB_API CrossEntropySum cross_entropy_forward_backward(const TensorView& x, const TensorView& head, const std::int32_t* targets, float scale,
                                                      const TensorView& dx, const TensorView& d_head, Stream stream = {});

namespace ref {
// dx may be null: loss only.
CrossEntropySum cross_entropy(const TensorView& x, const TensorView& head, const std::int32_t* targets, float scale, const TensorView& dx,
                              const TensorView& d_head);
}  // namespace ref

}  // namespace waybill
