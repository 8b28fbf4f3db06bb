// SPDX-License-Identifier: Apache-2.0
// What every token sees: the shared expert, as a grouped matmul of one group, and the latent projections.
#include "core/cuda/cuda_error.h"
#include "core/cuda/dense_matmul.h"
#include "moe/cuda/device_moe_impl.h"
#include "waybill/grouped_gemm_activation.h"

namespace waybill::cuda {
namespace {

// [N, C] as the weights of one group.
TensorView one_group(const TensorView& w) { return TensorView(w.data, w.dtype, {1, w.shape[0], w.shape[1]}, w.device); }

}  // namespace

// x, or its latent projection.
std::vector<DeviceRows> DeviceMoeLayer::Impl::sent_rows(std::span<const MoeTensors> parameters, std::span<const TensorView> x, const Saved& saved,
                                                        cudaStream_t stream) {
  if (config.latent == 0) return device_rows(x);
  std::vector<DeviceRows> rows;
  for (std::size_t i = 0; i < count(); ++i) {
    void* to = scratch_at<void>(i, scratch_parts.latent_rows);
    dense_matmul({.M = saved.routes[i].T, .N = config.latent, .C = config.H, .transpose_b = true, .out = DType::kBF16}, x[i].data,
                 parameters[i].latent_down.data, to, where.index, stream);
    rows.push_back({to, 0});
  }
  return rows;
}

// d_out, or its gradient through latent_up; d_latent_up.
std::vector<DeviceRows> DeviceMoeLayer::Impl::sent_gradients(const Backward& b) {
  if (config.latent == 0) return device_rows(b.d_out);
  std::vector<DeviceRows> rows;
  for (std::size_t i = 0; i < count(); ++i) {
    const std::int64_t T = b.saved.routes[i].T;
    const TensorView& gradient = b.gradients[i].latent_up;
    dense_matmul({.M = config.H, .N = config.latent, .C = T, .transpose_a = true, .accumulate = adds_to(gradient, b), .out = gradient.dtype}, b.d_out[i].data,
                 latent_out(b.saved, i).data, gradient.data, where.index, b.stream);
    void* to = scratch_at<void>(i, scratch_parts.latent_rows);
    dense_matmul({.M = T, .N = config.latent, .C = config.H, .out = DType::kBF16}, b.d_out[i].data, b.parameters[i].latent_up.data, to, where.index, b.stream);
    rows.push_back({to, 0});
  }
  return rows;
}

// base = latent_out latent_up^T.
void DeviceMoeLayer::Impl::latent_result(std::span<const MoeTensors> parameters, const Saved& saved, cudaStream_t stream) {
  for (std::size_t i = 0; i < count(); ++i) {
    dense_matmul({.M = saved.routes[i].T, .N = config.H, .C = config.latent, .transpose_b = true}, latent_out(saved, i).data, parameters[i].latent_up.data,
                 forward_base(saved, i).data, where.index, stream);
  }
}

// d_latent_down; base += d_latent_in latent_down.
void DeviceMoeLayer::Impl::latent_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) {
    const std::int64_t T = b.saved.routes[i].T;
    const void* d_latent_in = latent_gradient(b.saved, i).data;
    const TensorView& gradient = b.gradients[i].latent_down;
    dense_matmul({.M = config.latent, .N = config.H, .C = T, .transpose_a = true, .accumulate = adds_to(gradient, b), .out = gradient.dtype}, d_latent_in,
                 b.x[i].data, gradient.data, where.index, b.stream);
    dense_matmul({.M = T, .N = config.H, .C = config.latent, .accumulate = true}, d_latent_in, b.parameters[i].latent_down.data, backward_base(b.saved, i).data,
                 where.index, b.stream);
  }
}

// shared_h (where wanted) and shared_a.
void DeviceMoeLayer::Impl::shared_hidden(std::span<const MoeTensors> parameters, std::span<const TensorView> x, const Saved& saved, bool keep_h,
                                         cudaStream_t stream) {
  if (recipe) return blocked_shared_hidden(x, saved, keep_h, stream);
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmActivationArgs args;
    args.product.a = x[i], args.product.weights = one_group(parameters[i].shared_w1), args.product.offsets = dense_offsets(saved, i);
    args.product.status = status_word(i);
    if (keep_h) args.product.y = shared_h(saved, i);
    args.activation = config.activation, args.out = shared_a(saved, i);
    grouped_gemm_activation(args, on(stream));
  }
}

// base = (or, with a latent width, +=) the shared expert's result. Rows of an invalid step are left as they are.
void DeviceMoeLayer::Impl::shared_result(const Forward& f) {
  if (recipe) return blocked_shared_result(f);
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmArgs args;
    args.a = shared_a(f.saved, i), args.weights = one_group(f.parameters[i].shared_w2), args.offsets = dense_offsets(f.saved, i);
    args.y = forward_base(f.saved, i), args.accumulate = config.latent > 0, args.status = status_word(i);
    grouped_gemm(args, on(f.stream));
  }
}

// d_shared_w1, d_shared_w2. shared_h becomes its own gradient.
void DeviceMoeLayer::Impl::shared_weight_gradients(const Backward& b) {
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView offsets = dense_offsets(b.saved, i);
    GroupedGemmWgradArgs w2;
    w2.a = shared_a(b.saved, i), w2.dy = b.d_out[i], w2.offsets = offsets, w2.d_weights = one_group(b.gradients[i].shared_w2);
    w2.accumulate = adds_to(w2.d_weights, b), w2.status = status_word(i);
    grouped_gemm_wgrad(w2, on(b.stream));
    GroupedGemmActivationBackwardArgs act;
    act.product.a = b.d_out[i], act.product.weights = one_group(b.parameters[i].shared_w2), act.product.layout = WeightLayout::kLCN;
    act.product.offsets = offsets, act.product.y = shared_a(b.saved, i), act.product.status = status_word(i);
    act.activation = config.activation, act.h = act.dh = shared_h(b.saved, i);
    grouped_gemm_activation_backward(act, on(b.stream));
    GroupedGemmWgradArgs w1;
    w1.a = b.x[i], w1.dy = shared_h(b.saved, i), w1.offsets = offsets, w1.d_weights = one_group(b.gradients[i].shared_w1);
    w1.accumulate = adds_to(w1.d_weights, b), w1.status = status_word(i);
    grouped_gemm_wgrad(w1, on(b.stream));
  }
}

// base += the input's gradient; and the gradients of the weights, where they are not there yet.
void DeviceMoeLayer::Impl::shared_gradients(const Backward& b) {
  if (recipe) return blocked_shared_gradients(b);
  if (!shared_gradients_beside()) shared_weight_gradients(b);
  for (std::size_t i = 0; i < count(); ++i) {
    GroupedGemmDgradArgs d;
    d.dy = shared_h(b.saved, i), d.weights = one_group(b.parameters[i].shared_w1), d.offsets = dense_offsets(b.saved, i);
    d.da = backward_base(b.saved, i), d.accumulate = true, d.status = status_word(i);
    grouped_gemm_dgrad(d, on(b.stream));
  }
}

}  // namespace waybill::cuda
