// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding, half-split pairs: (x[i], x[i + D/2]) turns by position * theta^(-2i/D). fp32, in place.
#pragma once

#include <vector>

#include "waybill/stream.h"

namespace waybill {

// cos and sin of every position and pair, computed in double.
class WB_API RopeTable {
 public:
  RopeTable() = default;
  RopeTable(std::int64_t positions, std::int64_t head_dim, float theta);  // head_dim even
  std::int64_t positions() const { return positions_; }
  std::int64_t head_dim() const { return 2 * half_; }
  const float* cos(std::int64_t position) const { return cos_.data() + position * half_; }
  const float* sin(std::int64_t position) const { return sin_.data() + position * half_; }

 private:
  std::int64_t positions_ = 0, half_ = 0;
  std::vector<float> cos_, sin_;  // [positions, head_dim / 2]
};

// x [T, heads, D] contiguous; row t has position t % seq_len. inverse: the transposed rotation, which is also the backward pass.
WB_API void rope(const RopeTable& table, const TensorView& x, std::int64_t seq_len, bool inverse, Stream stream = {});

namespace ref {
void rope(float theta, const TensorView& x, std::int64_t seq_len, bool inverse);
}  // namespace ref

}  // namespace waybill
