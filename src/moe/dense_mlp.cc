// SPDX-License-Identifier: Apache-2.0
#include "moe/dense_mlp.h"

#include "waybill/grouped_gemm.h"

namespace waybill::moe {

void project(const TensorView& x, const TensorView& w, const TensorView& y, bool accumulate, Stream stream) {
  if (y.size() == 0) return;
  gemm({.a = x, .b = w, .c = y, .transpose_b = true, .accumulate = accumulate}, stream);
}

void project_backward_input(const TensorView& dy, const TensorView& w, const TensorView& dx, bool accumulate, Stream stream) {
  if (dx.size() == 0) return;
  gemm({.a = dy, .b = w, .c = dx, .accumulate = accumulate}, stream);
}

void project_backward_weight(const TensorView& dy, const TensorView& x, const TensorView& dw, Stream stream) {
  if (dy.shape[0] == 0) return;
  gemm({.a = dy, .b = x, .c = dw, .transpose_a = true, .accumulate = true}, stream);
}

void SharedExpert::hidden(const TensorView& x, Tensor& h) const {
  h.resize(DType::kF32, {x.shape[0], w1.shape[0]});
  project(x, w1, h, false, stream);
}

void SharedExpert::activate(const TensorView& h, Tensor& a) const {
  a.resize(DType::kF32, {h.shape[0], w2.shape[1]});
  activation_forward(activation, h, nullptr, a, stream);
}

void SharedExpert::add_output(const TensorView& a, const TensorView& out) const { project(a, w2, out, true, stream); }

void SharedExpert::backward_weights(const TensorView& x, const TensorView& h, const TensorView& a, const TensorView& d_out, const TensorView& d_w1,
                                    const TensorView& d_w2, Tensor& da, Tensor& dh) const {
  da.resize(DType::kF32, {x.shape[0], w2.shape[1]});
  dh.resize(DType::kF32, {x.shape[0], w1.shape[0]});
  project_backward_weight(d_out, a, d_w2, stream);
  project_backward_input(d_out, w2, da, false, stream);
  activation_backward(activation, h, nullptr, da, dh, nullptr, stream);
  project_backward_weight(dh, x, d_w1, stream);
}

void SharedExpert::add_input_gradient(const TensorView& dh, const TensorView& dx) const { project_backward_input(dh, w1, dx, true, stream); }

}  // namespace waybill::moe
