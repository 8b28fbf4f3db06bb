// SPDX-License-Identifier: Apache-2.0
// One work item is one key/value head of one sequence: its query heads add to dk and dv in order, so items are independent.
#include "ops/model/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/model/attention_rows.h"
#include "waybill/grouped_gemm.h"

namespace waybill {
namespace {

constexpr std::int64_t kBlock = 64;  // query rows whose scores exist at a time

std::int64_t round_up(std::int64_t n) { return (n + 15) / 16 * 16; }

// A [rows, columns] view of part of a wider row-major matrix.
TensorView block(float* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride) {
  TensorView view = TensorView::of(data, {rows, columns});
  view.stride[0] = row_stride;
  return view;
}

void check(const AttentionDims& d, const TensorView& x, std::int64_t heads, const char* name) {
  WB_CHECK(x.rank == 3 && x.is_contiguous() && x.shape[0] == d.T() && x.shape[1] == heads && x.shape[2] == d.head_dim,
           "attention: {} {} must be contiguous [{}, {}, {}]", name, x.describe(), d.T(), heads, d.head_dim);
}
void check(const AttentionDims& d, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o) {
  WB_CHECK(d.num_kv_heads > 0 && d.num_heads % d.num_kv_heads == 0, "attention: {} heads are not a multiple of {} key/value heads", d.num_heads,
           d.num_kv_heads);
  check(d, q, d.num_heads, "q");
  check(d, k, d.num_kv_heads, "k");
  check(d, v, d.num_kv_heads, "v");
  check(d, o, d.num_heads, "o");
}

// Where one head of one sequence lies: first row's pointer in a [T, heads, D] tensor.
float* head_of(const TensorView& x, const AttentionDims& d, std::int64_t heads, std::int64_t b, std::int64_t h) {
  return x.as<float>() + (b * d.seq_len * heads + h) * d.head_dim;
}

}  // namespace

void attention_forward(const AttentionDims& d, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, float* lse, Stream stream) {
  check(d, q, k, v, o);
  if (d.T() == 0) return;
  const std::int64_t group = d.num_heads / d.num_kv_heads, q_stride = d.num_heads * d.head_dim, kv_stride = d.num_kv_heads * d.head_dim;
  const std::int64_t stride = round_up(d.seq_len);
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d.head_dim)));
  parallel_for(stream.pool, d.B * d.num_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(static_cast<std::size_t>(kBlock * stride));
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t b = item / d.num_heads, h = item % d.num_heads, kv = h / group;
      float *qh = head_of(q, d, d.num_heads, b, h), *oh = head_of(o, d, d.num_heads, b, h);
      float *kh = head_of(k, d, d.num_kv_heads, b, kv), *vh = head_of(v, d, d.num_kv_heads, b, kv);
      for (std::int64_t first = 0; first < d.seq_len; first += kBlock) {
        const std::int64_t rows = std::min(kBlock, d.seq_len - first), keys = first + rows;
        const TensorView s = block(scores.data(), rows, keys, stride);
        gemm({.a = block(qh + first * q_stride, rows, d.head_dim, q_stride), .b = block(kh, keys, d.head_dim, kv_stride), .c = s, .transpose_b = true});
        attention::softmax_rows(scores.data(), stride, rows, round_up(keys), first + 1, scale, lse == nullptr ? nullptr : lse + item * d.seq_len + first);
        gemm({.a = s, .b = block(vh, keys, d.head_dim, kv_stride), .c = block(oh + first * q_stride, rows, d.head_dim, q_stride)});
      }
    }
  });
}

void attention_backward(const AttentionDims& d, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& o, const float* lse,
                        const TensorView& d_o, const TensorView& dq, const TensorView& dk, const TensorView& dv, Stream stream) {
  check(d, q, k, v, o);
  check(d, dq, dk, dv, d_o);
  if (d.T() == 0) return;
  const std::int64_t group = d.num_heads / d.num_kv_heads, q_stride = d.num_heads * d.head_dim, kv_stride = d.num_kv_heads * d.head_dim;
  const std::int64_t stride = round_up(d.seq_len), D = d.head_dim;
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
  std::fill_n(dk.as<float>(), dk.size(), 0.0f);
  std::fill_n(dv.as<float>(), dv.size(), 0.0f);
  parallel_for(stream.pool, d.B * d.num_kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(static_cast<std::size_t>(kBlock * stride)), d_scores(scores.size());
    float delta[kBlock];
    for (std::int64_t item = begin * group; item < end * group; ++item) {
      const std::int64_t b = item / d.num_heads, h = item % d.num_heads, kv = h / group;
      float *qh = head_of(q, d, d.num_heads, b, h), *doh = head_of(d_o, d, d.num_heads, b, h), *dqh = head_of(dq, d, d.num_heads, b, h);
      const float* oh = head_of(o, d, d.num_heads, b, h);
      float *kh = head_of(k, d, d.num_kv_heads, b, kv), *vh = head_of(v, d, d.num_kv_heads, b, kv);
      float *dkh = head_of(dk, d, d.num_kv_heads, b, kv), *dvh = head_of(dv, d, d.num_kv_heads, b, kv);
      for (std::int64_t first = 0; first < d.seq_len; first += kBlock) {
        const std::int64_t rows = std::min(kBlock, d.seq_len - first), keys = first + rows, at = first * q_stride;
        const TensorView s = block(scores.data(), rows, keys, stride), ds = block(d_scores.data(), rows, keys, stride);
        const TensorView q_rows = block(qh + at, rows, D, q_stride), do_rows = block(doh + at, rows, D, q_stride);
        const TensorView k_rows = block(kh, keys, D, kv_stride), v_rows = block(vh, keys, D, kv_stride);
        gemm({.a = q_rows, .b = k_rows, .c = s, .transpose_b = true});
        gemm({.a = do_rows, .b = v_rows, .c = ds, .transpose_b = true});
        attention::dot_rows(doh + at, oh + at, q_stride, rows, D, delta);
        attention::softmax_backward_rows(scores.data(), d_scores.data(), stride, rows, round_up(keys), first + 1, scale, lse + item * d.seq_len + first, delta);
        gemm({.a = ds, .b = k_rows, .c = block(dqh + at, rows, D, q_stride)});
        gemm({.a = ds, .b = q_rows, .c = block(dkh, keys, D, kv_stride), .transpose_a = true, .accumulate = true});
        gemm({.a = s, .b = do_rows, .c = block(dvh, keys, D, kv_stride), .transpose_a = true, .accumulate = true});
      }
    }
  });
}

}  // namespace waybill
