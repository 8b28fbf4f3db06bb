// SPDX-License-Identifier: Apache-2.0
#include "model/attention_block.h"

#include <cstring>

#include "ops/model/rms_norm.h"
#include "waybill/grouped_gemm.h"

namespace waybill::model {
namespace {

// The same memory as a matrix [rows, columns].
TensorView matrix(const Tensor& t, std::int64_t rows, std::int64_t columns) { return TensorView::of(t.as<float>(), {rows, columns}); }

}  // namespace

void AttentionBlock::forward(std::int64_t B, std::int64_t seq_len, const TensorView& x, const TensorView& x_mid, AttentionSaved& s,
                             AttentionScratch& scratch) const {
  const std::int64_t T = B * seq_len, D = config_.head_dim, q_heads = config_.num_heads, kv_heads = config_.num_kv_heads;
  scratch.normed.resize(DType::kF32, {T, config_.H});
  s.rstd.resize(static_cast<std::size_t>(T));
  rms_norm_forward(x, value(at_.norm), config_.norm_epsilon, scratch.normed, s.rstd.data(), stream_);

  s.q.resize(DType::kF32, {T, q_heads, D});
  s.k.resize(DType::kF32, {T, kv_heads, D});
  s.v.resize(DType::kF32, {T, kv_heads, D});
  if (config_.qk_norm) {
    s.q_raw.resize(DType::kF32, {T, q_heads, D});
    s.k_raw.resize(DType::kF32, {T, kv_heads, D});
  }
  const auto project = [&](const Tensor& to, std::int64_t heads, int weight) {
    gemm({.a = scratch.normed, .b = value(weight), .c = matrix(to, T, heads * D), .transpose_b = true}, stream_);
  };
  project(config_.qk_norm ? s.q_raw : s.q, q_heads, at_.wq);
  project(config_.qk_norm ? s.k_raw : s.k, kv_heads, at_.wk);
  project(s.v, kv_heads, at_.wv);
  if (config_.qk_norm) {
    s.q_rstd.resize(static_cast<std::size_t>(T * q_heads));
    s.k_rstd.resize(static_cast<std::size_t>(T * kv_heads));
    rms_norm_forward(matrix(s.q_raw, T * q_heads, D), value(at_.q_norm), config_.norm_epsilon, matrix(s.q, T * q_heads, D), s.q_rstd.data(), stream_);
    rms_norm_forward(matrix(s.k_raw, T * kv_heads, D), value(at_.k_norm), config_.norm_epsilon, matrix(s.k, T * kv_heads, D), s.k_rstd.data(), stream_);
  }
  rope(rope_, s.q, seq_len, /*inverse=*/false, stream_);
  rope(rope_, s.k, seq_len, /*inverse=*/false, stream_);

  s.o.resize(DType::kF32, {T, q_heads, D});
  s.lse.resize(static_cast<std::size_t>(T * q_heads));
  attention_forward(dims(B, seq_len), s.q, s.k, s.v, s.o, s.lse.data(), stream_);
  if (T > 0) std::memcpy(x_mid.data, x.data, static_cast<std::size_t>(T * config_.H) * sizeof(float));
  gemm({.a = matrix(s.o, T, q_heads * D), .b = value(at_.wo), .c = x_mid, .transpose_b = true, .accumulate = true}, stream_);
}

void AttentionBlock::backward(std::int64_t B, std::int64_t seq_len, const TensorView& x, const TensorView& d, AttentionSaved& s,
                              AttentionScratch& scratch) const {
  const std::int64_t T = B * seq_len, H = config_.H, D = config_.head_dim, q_heads = config_.num_heads, kv_heads = config_.num_kv_heads;
  scratch.normed.resize(DType::kF32, {T, H});
  scratch.d_normed.resize(DType::kF32, {T, H});
  scratch.d_o.resize(DType::kF32, {T, q_heads, D});
  scratch.dq.resize(DType::kF32, {T, q_heads, D});
  scratch.dk.resize(DType::kF32, {T, kv_heads, D});
  scratch.dv.resize(DType::kF32, {T, kv_heads, D});
  rms_norm_forward(x, value(at_.norm), config_.norm_epsilon, scratch.normed, nullptr, stream_);

  gemm({.a = d, .b = value(at_.wo), .c = matrix(scratch.d_o, T, q_heads * D)}, stream_);
  gemm({.a = d, .b = matrix(s.o, T, q_heads * D), .c = grad(at_.wo), .transpose_a = true, .accumulate = true}, stream_);
  attention_backward(dims(B, seq_len), s.q, s.k, s.v, s.o, s.lse.data(), scratch.d_o, scratch.dq, scratch.dk, scratch.dv, stream_);
  rope(rope_, scratch.dq, seq_len, /*inverse=*/true, stream_);
  rope(rope_, scratch.dk, seq_len, /*inverse=*/true, stream_);
  if (config_.qk_norm) {
    const TensorView dq = matrix(scratch.dq, T * q_heads, D), dk = matrix(scratch.dk, T * kv_heads, D);
    rms_norm_backward(matrix(s.q_raw, T * q_heads, D), value(at_.q_norm), s.q_rstd.data(), dq, dq, false, grad(at_.q_norm), stream_);
    rms_norm_backward(matrix(s.k_raw, T * kv_heads, D), value(at_.k_norm), s.k_rstd.data(), dk, dk, false, grad(at_.k_norm), stream_);
  }

  bool accumulate = false;
  const auto back = [&](const Tensor& from, std::int64_t heads, int weight) {
    const TensorView dy = matrix(from, T, heads * D);
    gemm({.a = dy, .b = scratch.normed, .c = grad(weight), .transpose_a = true, .accumulate = true}, stream_);
    gemm({.a = dy, .b = value(weight), .c = scratch.d_normed, .accumulate = accumulate}, stream_);
    accumulate = true;
  };
  back(scratch.dq, q_heads, at_.wq);
  back(scratch.dk, kv_heads, at_.wk);
  back(scratch.dv, kv_heads, at_.wv);
  rms_norm_backward(x, value(at_.norm), s.rstd.data(), scratch.d_normed, d, /*accumulate=*/true, grad(at_.norm), stream_);
}

}  // namespace waybill::model
