// SPDX-License-Identifier: Apache-2.0
// A gather and a scatter-add are their own shortest loops: there is no separate reference.
#include "ops/model/embedding.h"

#include <algorithm>
#include <cstring>

namespace waybill {
namespace {

void check(const TensorView& table, const TensorView& rows, std::int64_t T) {
  WB_CHECK(table.rank == 2 && table.is_contiguous() && rows.rank == 2 && rows.is_contiguous() && rows.shape[0] == T && rows.shape[1] == table.shape[1],
           "embedding: rows {} do not fit {} tokens and table {}", rows.describe(), T, table.describe());
}

}  // namespace

void embedding_forward(const TensorView& table, const std::int32_t* tokens, std::int64_t T, const TensorView& y, Stream stream) {
  check(table, y, T);
  const std::int64_t H = table.shape[1], vocab = table.shape[0];
  for (std::int64_t t = 0; t < T; ++t)
    WB_CHECK(tokens[t] >= -1 && tokens[t] < vocab, "embedding: token {} at position {} is outside [-1, {})", tokens[t], t, vocab);
  const float* w = table.as<float>();
  float* out = y.as<float>();
  parallel_for(stream.pool, T, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      if (tokens[t] < 0) {
        std::fill_n(out + t * H, H, 0.0f);
      } else {
        std::memcpy(out + t * H, w + tokens[t] * H, static_cast<std::size_t>(H) * sizeof(float));
      }
    }
  });
}

void embedding_backward(const std::int32_t* tokens, std::int64_t T, const TensorView& dy, const TensorView& d_table, Stream stream) {
  check(d_table, dy, T);
  const std::int64_t H = d_table.shape[1];
  const float* g = dy.as<float>();
  float* out = d_table.as<float>();
  // Split by columns, so that every element adds its tokens in order for any number of threads.
  parallel_for(stream.pool, H, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < T; ++t) {
      if (tokens[t] < 0) continue;
      float* row = out + tokens[t] * H;
      for (std::int64_t i = begin; i < end; ++i) row[i] += g[t * H + i];
    }
  });
}

}  // namespace waybill
