// SPDX-License-Identifier: Apache-2.0
// DevicePart's attention, embedding and output layer: the steps of src/model/attention_block.cc and language_model.cc.
#include <algorithm>

#include "core/cuda/dense_matmul.h"
#include "model/cuda/device_part.h"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

AttentionCall attention_call(const ModelConfig& config, std::int64_t B, const DeviceLayerSaved& s) {
  AttentionCall call{};
  call.B = B, call.seq_len = config.seq_len, call.num_heads = config.num_heads, call.num_kv_heads = config.num_kv_heads;
  call.D = static_cast<int>(config.head_dim);
  call.q = s.q.as<float>(), call.k = s.k.as<float>(), call.v = s.v.as<float>(), call.o = s.o.as<float>(), call.lse = s.lse.as<float>();
  return call;
}

}  // namespace

void DevicePart::embed() {
  const DeviceGuard guard(share_.device);
  mark(Phase::kEmbedding);
  launch_embedding_forward(parameters_.value(list_.embedding), inputs_.as<std::int32_t>(), T_, config_.H, saved_[0].x.as<float>(), stream_);
  check_launch("embedding_forward");
}

void DevicePart::embed_backward() {
  const DeviceGuard guard(share_.device);
  mark(Phase::kEmbedding);
  launch_embedding_backward(inputs_.as<std::int32_t>(), d_.as<float>(), T_, config_.H, parameters_.grad(list_.embedding), stream_);
  check_launch("embedding_backward");
}

void DevicePart::attend(std::size_t layer) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kAttention);
  DeviceLayerSaved& s = saved_[layer];
  const model::AttentionParameters& at = list_.layers[layer].attention;
  const std::int64_t H = config_.H, D = config_.head_dim, q = config_.num_heads * D, kv = config_.num_kv_heads * D;
  const bool qk_norm = config_.qk_norm;
  norm(s.x.as<float>(), at.norm, T_, H, normed_.data(), true, s.rstd.as<float>());
  project(normed_.data(), at.wq, q, H, (qk_norm ? s.q_raw : s.q).data(), DType::kF32, false);
  project(normed_.data(), at.wk, kv, H, (qk_norm ? s.k_raw : s.k).data(), DType::kF32, false);
  project(normed_.data(), at.wv, kv, H, s.v.data(), DType::kF32, false);
  if (qk_norm) {
    norm(s.q_raw.as<float>(), at.q_norm, T_ * config_.num_heads, D, s.q.data(), false, s.q_rstd.as<float>());
    norm(s.k_raw.as<float>(), at.k_norm, T_ * config_.num_kv_heads, D, s.k.data(), false, s.k_rstd.as<float>());
  }
  rotate(s.q, config_.num_heads, false);
  rotate(s.k, config_.num_kv_heads, false);
  launch_attention_forward(attention_call(config_, B_, s), stream_);
  check_launch("attention_forward");
  to_bf16(s.o.as<float>(), o_bf16_, T_ * q);
  WB_TRY_CUDA(cudaMemcpyAsync(s.x_mid.data(), s.x.data(), static_cast<std::size_t>(T_ * H) * sizeof(float), cudaMemcpyDeviceToDevice, stream_));
  project(o_bf16_.data(), at.wo, H, q, s.x_mid.data(), DType::kF32, true);
}

// d_: gradient of x_mid on entry, of x on return.
void DevicePart::attend_backward(std::size_t layer) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kAttention);
  DeviceLayerSaved& s = saved_[layer];
  const model::AttentionParameters& at = list_.layers[layer].attention;
  const std::int64_t H = config_.H, D = config_.head_dim, q_heads = config_.num_heads, kv_heads = config_.num_kv_heads, q = q_heads * D, kv = kv_heads * D;
  norm(s.x.as<float>(), at.norm, T_, H, normed_.data(), true, nullptr);
  to_bf16(d_.as<float>(), d_bf16_, T_ * H);
  to_bf16(s.o.as<float>(), o_bf16_, T_ * q);
  project_back(d_bf16_.data(), at.wo, H, q, d_o_.data(), DType::kF32, false);
  weight_gradient(d_bf16_.data(), o_bf16_.data(), at.wo, H, q);
  AttentionCall call = attention_call(config_, B_, s);
  call.d_o = d_o_.as<float>(), call.dq = dq_.as<float>(), call.dk = dk_.as<float>(), call.dv = dv_.as<float>(), call.delta = delta_.as<float>();
  launch_attention_backward(call, stream_);
  check_launch("attention_backward");
  rotate(dq_, q_heads, true);
  rotate(dk_, kv_heads, true);
  if (config_.qk_norm) {
    norm_back(s.q_raw.as<float>(), at.q_norm, s.q_rstd.as<float>(), dq_.as<float>(), dq_.as<float>(), false, T_ * q_heads, D);
    norm_back(s.k_raw.as<float>(), at.k_norm, s.k_rstd.as<float>(), dk_.as<float>(), dk_.as<float>(), false, T_ * kv_heads, D);
  }
  bool accumulate = false;
  const auto back = [&](const DeviceBuffer& dy, std::int64_t width, int weight) {
    to_bf16(dy.as<float>(), d_head_bf16_, T_ * width);
    weight_gradient(d_head_bf16_.data(), normed_.data(), weight, width, H);
    project_back(d_head_bf16_.data(), weight, width, H, d_normed_.data(), DType::kF32, accumulate);
    accumulate = true;
  };
  back(dq_, q, at.wq);
  back(dk_, kv, at.wk);
  back(dv_, kv, at.wv);
  norm_back(s.x.as<float>(), at.norm, s.rstd.as<float>(), d_normed_.as<float>(), d_.as<float>(), true, T_, H);
}

// Logits exist for some rows at a time.
void DevicePart::loss(float scale, bool gradient) {
  const DeviceGuard guard(share_.device);
  mark(Phase::kEmbedding);
  const std::int64_t H = config_.H, vocab = config_.vocab;
  norm(x_out_.as<float>(), list_.final_norm, T_, H, normed_.data(), true, final_rstd_.as<float>());
  for (std::int64_t first = 0; first < T_; first += logit_rows_) {
    const std::int64_t rows = std::min(logit_rows_, T_ - first);
    const std::uint16_t* x = normed_.as<std::uint16_t>() + first * H;
    dense_matmul({.M = rows, .N = vocab, .C = H, .transpose_b = true}, x, parameters_.copy(list_.head), logits_.data(), share_.device, stream_);
    launch_cross_entropy_rows(
        {logits_.as<float>(), targets_.as<std::int32_t>() + first, rows, vocab, scale, gradient ? d_logits_.data() : nullptr, losses_.as<double>() + first},
        stream_);
    check_launch("cross_entropy_rows");
    if (!gradient) continue;
    dense_matmul({.M = rows, .N = H, .C = vocab}, d_logits_.data(), parameters_.copy(list_.head), d_.as<float>() + first * H, share_.device, stream_);
    dense_matmul({.M = vocab, .N = H, .C = rows, .transpose_a = true, .accumulate = true}, d_logits_.data(), x, parameters_.grad(list_.head), share_.device,
                 stream_);
  }
  launch_sum(losses_.as<double>(), T_, &header()->loss_sum, true, stream_);
  check_launch("sum");
  if (gradient) norm_back(x_out_.as<float>(), list_.final_norm, final_rstd_.as<float>(), d_.as<float>(), d_.as<float>(), false, T_, H);
}

}  // namespace waybill::cuda
