// SPDX-License-Identifier: Apache-2.0
#include "model/feed_forward.h"

#include <cstring>

#include "ops/model/rms_norm.h"
#include "waybill/grouped_gemm.h"

namespace waybill::model {
namespace {

constexpr ActivationConfig kSwiGLU{};

}  // namespace

FeedForward::FeedForward(const ModelConfig& config, const LayerConfig& layer, ParameterList& list, const FeedForwardParameters& at, Fabric* ep, Fabric& world,
                         ThreadPool* pool)
    : config_(config), dense_F_(layer.dense_F), list_(list), at_(at), stream_(Stream::cpu(pool)) {
  if (layer.is_moe) moe_ = std::make_unique<MoeLayer>(moe_config(config, layer), *ep, world, pool);
}

void FeedForward::forward(const TensorView& x_mid, const TensorView& x_out, FeedForwardSaved& s, FeedForwardScratch& scratch, const MoeForwardOptions& options,
                          PhaseTimes* times) {
  const std::int64_t T = x_mid.shape[0], H = config_.H;
  s.rstd.resize(static_cast<std::size_t>(T));
  scratch.normed.resize(DType::kF32, {T, H});
  {
    const PhaseScope scope(times, Phase::kDense);
    rms_norm_forward(x_mid, value(at_.norm), config_.norm_epsilon, scratch.normed, s.rstd.data(), stream_);
  }
  if (is_moe()) {
    scratch.out.resize(DType::kF32, {T, H});
    moe_->forward(moe_tensors(list_, at_, /*gradients=*/false), scratch.normed, scratch.out, s.moe, options, times);
    const PhaseScope scope(times, Phase::kDense);
    const float *x = x_mid.as<float>(), *add = scratch.out.as<float>();
    float* out = x_out.as<float>();
    for (std::int64_t i = 0; i < T * H; ++i) out[i] = x[i] + add[i];
    return;
  }
  const PhaseScope scope(times, Phase::kDense);
  s.h.resize(DType::kF32, {T, 2 * dense_F_});
  scratch.a.resize(DType::kF32, {T, dense_F_});
  gemm({.a = scratch.normed, .b = value(at_.w1), .c = s.h, .transpose_b = true}, stream_);
  activation_forward(kSwiGLU, s.h, nullptr, scratch.a, stream_);
  if (T > 0) std::memcpy(x_out.data, x_mid.data, static_cast<std::size_t>(T * H) * sizeof(float));
  gemm({.a = scratch.a, .b = value(at_.w2), .c = x_out, .transpose_b = true, .accumulate = true}, stream_);
}

void FeedForward::backward(const TensorView& x_mid, const TensorView& d, FeedForwardSaved& s, FeedForwardScratch& scratch, PhaseTimes* times) {
  const std::int64_t T = x_mid.shape[0], H = config_.H;
  scratch.normed.resize(DType::kF32, {T, H});
  scratch.d_normed.resize(DType::kF32, {T, H});
  {
    const PhaseScope scope(times, Phase::kDense);
    rms_norm_forward(x_mid, value(at_.norm), config_.norm_epsilon, scratch.normed, nullptr, stream_);
  }
  if (is_moe()) {
    moe_->backward(moe_tensors(list_, at_, /*gradients=*/false), moe_tensors(list_, at_, /*gradients=*/true), scratch.normed, d, scratch.d_normed, s.moe, 1.0f,
                   times);
  } else {
    const PhaseScope scope(times, Phase::kDense);
    scratch.a.resize(DType::kF32, {T, dense_F_});
    scratch.da.resize(DType::kF32, {T, dense_F_});
    scratch.dh.resize(DType::kF32, {T, 2 * dense_F_});
    activation_forward(kSwiGLU, s.h, nullptr, scratch.a, stream_);
    gemm({.a = d, .b = scratch.a, .c = grad(at_.w2), .transpose_a = true, .accumulate = true}, stream_);
    gemm({.a = d, .b = value(at_.w2), .c = scratch.da}, stream_);
    activation_backward(kSwiGLU, s.h, nullptr, scratch.da, scratch.dh, nullptr, stream_);
    gemm({.a = scratch.dh, .b = scratch.normed, .c = grad(at_.w1), .transpose_a = true, .accumulate = true}, stream_);
    gemm({.a = scratch.dh, .b = value(at_.w1), .c = scratch.d_normed}, stream_);
  }
  const PhaseScope scope(times, Phase::kDense);
  rms_norm_backward(x_mid, value(at_.norm), s.rstd.data(), scratch.d_normed, d, /*accumulate=*/true, grad(at_.norm), stream_);
}

}  // namespace waybill::model
