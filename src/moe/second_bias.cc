// SPDX-License-Identifier: Apache-2.0
#include "moe/second_bias.h"

namespace waybill::moe {
namespace {

// body(expert, slot, row) for every real slot of the experts [begin, end), in slot order.
template <class Body>
void for_each_slot(const ReceiveLayout& layout, std::int64_t begin, std::int64_t end, const Body& body) {
  for (std::int64_t e = begin; e < end; ++e) {
    const std::int64_t first = layout.expert_offsets[static_cast<std::size_t>(e)];
    const std::int64_t last = first + layout.expert_counts[static_cast<std::size_t>(e)];
    for (std::int64_t s = first; s < last; ++s) body(e, s, static_cast<std::int64_t>(layout.slot_row[static_cast<std::size_t>(s)]));
  }
}

}  // namespace

void add_second_bias(const ReceiveLayout& layout, const TensorView& b2, const TensorView& y, Stream stream) {
  const std::int64_t W = b2.shape[1];
  const float* bias = b2.as<float>();
  float* out = y.as<float>();
  parallel_for(stream.pool, layout.L, 1, [&](std::int64_t begin, std::int64_t end) {
    for_each_slot(layout, begin, end, [&](std::int64_t e, std::int64_t s, std::int64_t) {
      const float weight = layout.slot_weight[static_cast<std::size_t>(s)];
      for (std::int64_t i = 0; i < W; ++i) out[s * W + i] += weight * bias[e * W + i];
    });
  });
}

void second_bias_backward(const ReceiveLayout& layout, const TensorView& b2, const TensorView& dz, const TensorView& d_b2, float* d_weight, Stream stream) {
  const std::int64_t W = b2.shape[1];
  const float* bias = b2.as<float>();
  const float* grad = dz.as<float>();
  float* d_bias = d_b2.as<float>();
  parallel_for(stream.pool, layout.L, 1, [&](std::int64_t begin, std::int64_t end) {
    for_each_slot(layout, begin, end, [&](std::int64_t e, std::int64_t s, std::int64_t row) {
      const float weight = layout.slot_weight[static_cast<std::size_t>(s)];
      float dot = 0.0f;
      for (std::int64_t i = 0; i < W; ++i) {
        d_bias[e * W + i] += weight * grad[row * W + i];
        dot += bias[e * W + i] * grad[row * W + i];
      }
      d_weight[s] += dot;
    });
  });
}

}  // namespace waybill::moe
