// SPDX-License-Identifier: Apache-2.0
#include "ops/model/rope.h"

#include <cmath>

#include "ops/model/simd.h"

namespace waybill {
namespace {

WB_SIMD_INLINE void rotate_heads_body(float* x, std::int64_t heads, std::int64_t half, const float* cos, const float* sin, float sign) {
  using namespace simd;
  const std::int64_t full = half / kLanes * kLanes;
  for (std::int64_t h = 0; h < heads; ++h) {
    float *a = x + h * 2 * half, *b = a + half;
    for (std::int64_t i = 0; i < full; i += kLanes) {
      const Floats c = load(cos + i), s = load(sin + i) * sign, u = load(a + i), v = load(b + i);
      store(a + i, u * c - v * s);
      store(b + i, v * c + u * s);
    }
    for (std::int64_t i = full; i < half; ++i) {
      const float c = cos[i], s = sin[i] * sign, u = a[i], v = b[i];
      a[i] = u * c - v * s;
      b[i] = v * c + u * s;
    }
  }
}
WB_SIMD_KERNEL(rotate_heads, (float* x, std::int64_t heads, std::int64_t half, const float* cos, const float* sin, float sign),
               (x, heads, half, cos, sin, sign))

}  // namespace

RopeTable::RopeTable(std::int64_t positions, std::int64_t head_dim, float theta) : positions_(positions), half_(head_dim / 2) {
  WB_CHECK(head_dim > 0 && head_dim % 2 == 0, "rope: head_dim {} must be even and positive", head_dim);
  WB_CHECK(theta > 0, "rope: theta {} must be positive", theta);
  cos_.resize(static_cast<std::size_t>(positions * half_));
  sin_.resize(cos_.size());
  for (std::int64_t i = 0; i < half_; ++i) {
    const double rate = std::pow(static_cast<double>(theta), -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    for (std::int64_t t = 0; t < positions; ++t) {
      const auto at = static_cast<std::size_t>(t * half_ + i);
      cos_[at] = static_cast<float>(std::cos(static_cast<double>(t) * rate));
      sin_[at] = static_cast<float>(std::sin(static_cast<double>(t) * rate));
    }
  }
}

void rope(const RopeTable& table, const TensorView& x, std::int64_t seq_len, bool inverse, Stream stream) {
  WB_CHECK(x.rank == 3 && x.is_contiguous() && x.shape[2] == table.head_dim(), "rope: x {} must be contiguous [T, heads, {}]", x.describe(), table.head_dim());
  WB_CHECK(seq_len > 0 && seq_len <= table.positions(), "rope: seq_len {} needs 1 .. {} positions", seq_len, table.positions());
  const std::int64_t heads = x.shape[1], width = heads * x.shape[2], half = x.shape[2] / 2;
  float* xp = x.as<float>();
  parallel_for(stream.pool, x.shape[0], 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      rotate_heads(xp + t * width, heads, half, table.cos(t % seq_len), table.sin(t % seq_len), inverse ? -1.0f : 1.0f);
  });
}

}  // namespace waybill
