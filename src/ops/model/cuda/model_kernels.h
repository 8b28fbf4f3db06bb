// SPDX-License-Identifier: Apache-2.0
// The language model's ops on the GPU beside its matmuls: the contracts of src/ops/model/*.h on device memory. Straightforward kernels, fp32 maths;
// sums in a fixed order without atomics, so that a repeat gives the same bits. Everything is f32 and contiguous unless said otherwise, queues on
// `stream`, allocates nothing and can be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace waybill::cuda {

// y[t] = table[token[t]]; a token -1 reads zeros. table [vocab, H], y [T, H].
void launch_embedding_forward(const float* table, const std::int32_t* tokens, std::int64_t T, std::int64_t H, float* y, cudaStream_t stream);
// d_table[token[t]] += dy[t], tokens in order.
void launch_embedding_backward(const std::int32_t* tokens, const float* dy, std::int64_t T, std::int64_t H, float* d_table, cudaStream_t stream);

// y = x * rstd * weight over rows of `width`; y is f32 or bf16; rstd [rows] may be null.
struct RmsNormForward {
  const float *x, *weight;
  float epsilon;
  std::int64_t rows, width;
  void* y;
  bool y_is_bf16;
  float* rstd;
};
void launch_rms_norm_forward(const RmsNormForward& call, cudaStream_t stream);

// dx is written, or added to; it may be dy. d_weight [width] is added to, chunks of 64 rows in order; partial: room for [chunks, width].
struct RmsNormBackward {
  const float *x, *weight, *rstd, *dy;
  float* dx;
  bool accumulate;
  float *d_weight, *partial;
  std::int64_t rows, width;
};
inline constexpr std::int64_t kRmsNormChunk = 64;
inline std::int64_t rms_norm_partials(std::int64_t rows, std::int64_t width) { return (rows + kRmsNormChunk - 1) / kRmsNormChunk * width; }
void launch_rms_norm_backward(const RmsNormBackward& call, cudaStream_t stream);

// x [T, heads, D] in place; row t has position t % seq_len. cos, sin [positions, D / 2]: RopeTable's.
struct RopeCall {
  float* x;
  const float *cos, *sin;
  std::int64_t T, heads, D, seq_len;
  bool inverse;
};
void launch_rope(const RopeCall& call, cudaStream_t stream);

// Causal attention; layouts of ops/model/attention.h: q, o, d_o, dq [T, num_heads, D]; k, v, dk, dv [T, num_kv_heads, D]; lse, delta [B, num_heads,
// seq_len]. D <= kMaxHeadDim. Backward writes dq, dk, dv; delta is scratch.
inline constexpr int kMaxHeadDim = 256;
struct AttentionCall {
  std::int64_t B, seq_len, num_heads, num_kv_heads;
  int D;
  const float *q, *k, *v;
  float *o, *lse;
  const float* d_o;  // backward only, as what follows
  float *dq, *dk, *dv, *delta;
};
void launch_attention_forward(const AttentionCall& call, cudaStream_t stream);
void launch_attention_backward(const AttentionCall& call, cudaStream_t stream);

// Rows of logits [rows, vocab]: losses[r] = -log softmax(logits[r])[target], 0 where the target is -1; d_logits (bf16 [rows, vocab], or null) =
// scale * (softmax - onehot), 0 where the target is -1.
struct CrossEntropyRows {
  const float* logits;
  const std::int32_t* targets;
  std::int64_t rows, vocab;
  float scale;
  void* d_logits;
  double* losses;
};
void launch_cross_entropy_rows(const CrossEntropyRows& call, cudaStream_t stream);

// *total (+)= the sum of `count` values, in a fixed order.
void launch_sum(const double* values, std::int64_t count, double* total, bool accumulate, cudaStream_t stream);

// y[i] = bf16(x[i]).
void launch_to_bf16(const float* x, void* y, std::int64_t count, cudaStream_t stream);
// y[i] = a[i] + b[i]; y may be a or b.
void launch_add(const float* a, const float* b, float* y, std::int64_t count, cudaStream_t stream);
// y[i] = sum over p of parts[p * count + i], p in order.
void launch_sum_parts(const float* parts, int num_parts, float* y, std::int64_t count, cudaStream_t stream);

}  // namespace waybill::cuda
