// SPDX-License-Identifier: Apache-2.0
// Plain data between the host side of the CUDA router and its kernels, and the launchers' signatures. No CUDA syntax.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "waybill/status.h"

namespace waybill::cuda {

// The values of ScoreFunction, usable in kernels.
enum RouterScore : int { kScoreSoftmax = 0, kScoreSoftmaxSelected = 1, kScoreSigmoid = 2, kScoreSqrtSoftplus = 3 };

enum class LogitType : int { kF32 = 0, kBF16 = 1, kF16 = 2 };

// Shared by every kernel of the op. Pointers are device memory; optional ones may be null.
struct RouterRows {
  const void* logits;           // [T, row_stride]
  std::int64_t row_stride;      // elements
  const float* bias;            // [E]
  const std::uint8_t* mask;     // [E]
  const std::uint8_t* padding;  // [T]
  std::int64_t T;
  int E, K;
  int score;  // RouterScore
  int renormalise;
  float scale, epsilon;
};

// Counting scratch: zero before the first launch, left zero by every launch.
struct RouterCountScratch {
  std::uint32_t* counts;   // [E], then the routes that rows could not fill
  std::uint32_t* ticket;   // CTAs that have finished
  std::uint32_t* reached;  // CTAs that have reached their end; null: the ticket decides who finishes (router_counts.cuh)
};

struct RouterForwardParams {
  RouterRows rows;
  int num_groups, num_kept, group_best;  // group_best: experts that enter a group's score
  void* ids;                             // [T, K]; null: only count
  int id_bytes;                          // 2 or 4
  float* weights;                        // [T, K]
  float* factors;                        // [T] weight / score of a row, or null
  const void* replay_ids;                // [T, K] or null
  int replay_bytes;
  int forced;  // 1: forced balance
  std::int64_t token_offset;
  std::int32_t *counts, *offsets, *aligned_offsets;
  int alignment;
  RouterCountScratch scratch;
  StatusWord* status;
  // Of each CTA, where score sums are asked for: [CTAs, E] sums of P_te and [CTAs] sums of squared logsumexps.
  float* sum_partials;
  double* square_partials;
  std::uint32_t* sums_ready;  // CTAs whose partial sums are in memory; null: nobody asks before the kernel's end
  int early_counts;           // 1: counts by sum are handed over by each CTA's last warp, where a kernel can
};

// Score sums by a kernel of their own, and what becomes of the partial sums.
struct RouterSumParams {
  RouterRows rows;
  std::int64_t first_row, num_rows;  // of this launch
  float* sum_partials;               // as above
  double* square_partials;
  int num_partials;
  int accumulate;  // into `sums`
  double* sums;    // [E + 1]
  // Zero before and after the launch. Given: the partial sums are added up once `ready` has counted num_partials CTAs, before the kernel that makes
  // them has ended (it counts routes behind them). `readers` counts the CTAs that have seen it.
  std::uint32_t *ready, *readers;
};

struct RouterLossParams {
  RouterRows rows;
  const void* ids;  // [T, K] for the sequence loss' counts
  int id_bytes;
  float aux_coefficient, sequence_coefficient, z_coefficient;
  std::int64_t sequence_length;  // 0: no sequence loss
  const std::int32_t* aux_counts;
  double aux_tokens, loss_tokens, num_sequences;  // 0: this call's own
  const float* loss_weights;                      // [3] aux, sequence, z, times the coefficients; or null
  // Scratch, booked by the host.
  std::int32_t* sequence_counts;  // [B, E]
  std::int32_t* sequence_valid;   // [B] valid tokens
  double* row_partials;           // [num CTAs, 3]
  std::uint32_t* ticket;
  std::int32_t* valid_tokens;  // [1]
  const double* score_sums;    // [E + 1] of the forward pass, or null
  double* out;                 // [3] aux, sequence, z
  float* out_f32;              // the same, rounded; or null
};

struct RouterBackwardParams {
  RouterLossParams loss;   // coefficients and counts; scratch for sequence counts
  const float* weights;    // [T, K]
  const float* d_weights;  // [T, K]
  const float* factors;    // [T] of the forward pass, or null
  float loss_scale;
  float* d_logits;  // [T, d_stride] fp32
  std::int64_t d_stride;
};

struct DeviceLimits {
  int device, num_sms, shared_per_block, shared_per_sm, compute_major;
};
const DeviceLimits& device_limits(int device);  // queried once per device

// short: up to 512 experts. Launchers. `grid` choices live in tuning.h; each returns after queuing on `stream`.
void launch_router_forward_warp_short_f32(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_warp_long_f32(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_warp_short_bf16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_warp_long_bf16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_warp_short_f16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_warp_long_f16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
// Short rows, four tokens a warp. False: not one of the kernel's problems; nothing was launched.
bool launch_router_forward_quad_f32(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
bool launch_router_forward_quad_bf16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
bool launch_router_forward_quad_f16(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
// Long fp32 rows, with score sums. Returns the number of partial sums; 0: not one of the kernel's problems, nothing was launched.
int launch_router_forward_sums(const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
// Any rows: partial sums of p.first_row and the p.num_rows - 1 rows behind it (at most kScoreSumRows of them a call).
inline constexpr int kScoreSumCtas = 264;
inline constexpr std::int64_t kScoreSumRows = std::int64_t{kScoreSumCtas} * 512;
int launch_router_score_sums(LogitType type, const RouterSumParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_reduce_sums(const RouterSumParams& p, const DeviceLimits& limits, cudaStream_t stream);
// The aux and z losses from p.score_sums.
void launch_router_losses_from_sums(const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forward_block(LogitType type, const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_forced(LogitType type, const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
// Integer counts of the ids: aux_counts [E] (or null) and what p asks for; all zeroed by the caller before.
void launch_router_loss_prepare(const RouterLossParams& p, std::int32_t* aux_counts, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_losses(LogitType type, const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_backward(LogitType type, const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream);
void launch_router_backward_dense(LogitType type, const RouterBackwardParams& p, const DeviceLimits& limits, cudaStream_t stream);  // called by the former

}  // namespace waybill::cuda
