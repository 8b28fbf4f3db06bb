// SPDX-License-Identifier: Apache-2.0
#include "moe/dense_mlp.h"

#include <limits>

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

namespace {

// Slots of the shared expert beside those of routed experts, for random numbers.
constexpr std::int64_t kSharedExpertId[] = {-1};

// A dense matmul is a grouped one with one group: the same blocks, the same operands.
class OneGroup {
 public:
  OneGroup(const SharedExpert& expert, std::int64_t T)
      : offsets_{0, static_cast<std::int32_t>(T)},
        operands_(expert.recipe, TensorView::of(offsets_, {2}), {}, kSharedExpertId, expert.rounding_seed, expert.operands, expert.stream),
        stream_(expert.stream) {
    WB_CHECK(T <= std::numeric_limits<std::int32_t>::max(), "a shared expert takes at most 2^31 - 1 tokens a rank, got {}", T);
  }
  OneGroup(const OneGroup&) = delete;
  OneGroup& operator=(const OneGroup&) = delete;

  // y (+)= x w^T
  void forward(const TensorView& x, const TensorView& w, const TensorView& y, bool accumulate) const {
    project(operands_.slots(x, Operand::kActivation), weights(w, Contraction::kColumns), y, accumulate, stream_);
  }
  // dx (+)= dy w
  void dgrad(const TensorView& dy, const TensorView& w, const TensorView& dx, Draws draws, bool accumulate) const {
    project_backward_input(operands_.slots(dy, Operand::kGradient, draws), weights(w, Contraction::kRows), dx, accumulate, stream_);
  }
  // dw += dy^T x
  void wgrad(const TensorView& dy, const TensorView& x, const TensorView& dw, Draws draws) const {
    const WgradOperands pair = operands_.wgrad(dy, Operand::kGradient, x, Operand::kActivation, draws);
    const std::int64_t rows = pair.offsets.as<std::int32_t>()[1];
    project_backward_weight(pair.gathered.rows(0, rows), pair.slots.rows(0, rows), dw, stream_);
  }

 private:
  TensorView weights(const TensorView& w, Contraction contraction) const {
    const TensorView used = operands_.weights(TensorView(w.data, w.dtype, {1, w.shape[0], w.shape[1]}), contraction);
    return TensorView(used.data, used.dtype, {w.shape[0], w.shape[1]});
  }

  std::int32_t offsets_[2];
  RecipeOperands operands_;
  Stream stream_;
};

}  // namespace

void SharedExpert::hidden(const TensorView& x, Tensor& h) const {
  h.resize(DType::kF32, {x.shape[0], w1.shape[0]});
  OneGroup(*this, x.shape[0]).forward(x, w1, h, false);
}

void SharedExpert::activate(const TensorView& h, Tensor& a) const {
  a.resize(DType::kF32, {h.shape[0], w2.shape[1]});
  activation_forward(activation, h, nullptr, a, stream);
}

void SharedExpert::add_output(const TensorView& a, const TensorView& out) const { OneGroup(*this, a.shape[0]).forward(a, w2, out, true); }

void SharedExpert::backward_weights(const TensorView& x, const TensorView& h, const TensorView& a, const TensorView& d_out, const TensorView& d_w1,
                                    const TensorView& d_w2, Tensor& da, Tensor& dh) const {
  const OneGroup group(*this, x.shape[0]);
  da.resize(DType::kF32, {x.shape[0], w2.shape[1]});
  dh.resize(DType::kF32, {x.shape[0], w1.shape[0]});
  group.wgrad(d_out, a, d_w2, Draws::kSecondWgrad);
  group.dgrad(d_out, w2, da, Draws::kSecondDgrad, false);
  activation_backward(activation, h, nullptr, da, dh, nullptr, stream);
  group.wgrad(dh, x, d_w1, Draws::kFirstWgrad);
}

void SharedExpert::add_input_gradient(const TensorView& dh, const TensorView& dx) const {
  OneGroup(*this, dh.shape[0]).dgrad(dh, w1, dx, Draws::kFirstDgrad, true);
}

}  // namespace waybill::moe
