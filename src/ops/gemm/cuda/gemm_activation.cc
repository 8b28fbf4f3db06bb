// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/gemm_activation.h"

#include <fmt/format.h>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {
namespace {

using Forward = detail::GemmCall<GroupedGemmActivationArgs>;
using Backward = detail::GemmCall<GroupedGemmActivationBackwardArgs>;

float* floats(const TensorView& view) { return static_cast<float*>(view ? view.data : nullptr); }
const std::int32_t* list(const TensorView& view) { return static_cast<const std::int32_t*>(view ? view.data : nullptr); }

GroupedProblem product(const GroupedGemmArgs& x, const detail::GroupedShape& shape, std::int64_t rows, const ActivationConfig& config) {
  GroupedProblem p{};
  p.form = x.layout == WeightLayout::kLNC ? GemmForm::kNT : GemmForm::kNN, p.output = GemmOutput::kBf16;
  p.groups = shape.L, p.rows = rows, p.n = shape.N, p.k = shape.C;
  p.a = x.a.data, p.b = x.weights.data, p.offsets = list(x.offsets), p.status = x.status;
  p.bias = floats(x.bias), p.a_list = list(x.a_rows), p.a_rows = x.a.shape[0];
  p.activation.kind = static_cast<ActivationKind>(config.kind), p.activation.limit = config.limit, p.activation.alpha = config.alpha;
  return p;
}

GroupedProblem problem(const Forward& call) {
  const GroupedGemmActivationArgs& x = call.args;
  GroupedProblem p = product(x.product, call.shape, x.out.shape[0], x.activation);
  p.d = x.out.data, p.activation.epilogue = GemmEpilogue::kActivation;
  p.activation.h = x.product.y ? x.product.y.data : nullptr, p.activation.row_weight = floats(x.weight);
  return p;
}
GroupedProblem problem(const Backward& call) {
  const GroupedGemmActivationBackwardArgs& x = call.args;
  GroupedProblem p = product(x.product, call.shape, x.h.shape[0], x.activation);
  p.d = x.dh.data, p.activation.epilogue = GemmEpilogue::kActivationGradient;
  p.activation.h = x.h.data, p.activation.row_weight = floats(x.weight), p.activation.d_weight = floats(x.d_weight);
  return p;
}

std::string refuse_dtypes(std::initializer_list<const TensorView*> views) {
  for (const TensorView* view : views) {
    if (*view && view->dtype != DType::kBF16) return fmt::format("takes bf16 tensors, got {}", view->describe());
  }
  return {};
}

template <class Call>
void run(const Call& call) {
  const int device = call.stream.device.index;
  const DeviceGuard guard(device);
  int num_sms = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  const GroupedProblem p = problem(call);
  run_grouped(p, choose_tuning(p, num_sms), device, static_cast<cudaStream_t>(call.stream.native));
}

}  // namespace

std::string refuse_activation(const Forward& call, bool /*portable*/) {
  const GroupedGemmActivationArgs& x = call.args;
  const std::string dtypes = refuse_dtypes({&x.product.a, &x.product.weights, &x.product.y, &x.out});
  if (!dtypes.empty()) return dtypes;
  const GroupedProblem p = problem(call);
  const std::string reason = refuse_grouped(p, call.stream.device.index);
  return reason.empty() && x.product.y ? refuse_for_speed(p) : reason;
}
void run_activation(const Forward& call, bool /*portable*/) { run(call); }

std::string refuse_activation_backward(const Backward& call, bool /*portable*/) {
  const GroupedGemmActivationBackwardArgs& x = call.args;
  const std::string dtypes = refuse_dtypes({&x.product.a, &x.product.weights, &x.product.y, &x.h, &x.dh});
  if (!dtypes.empty()) return dtypes;
  const GroupedProblem p = problem(call);
  const std::string reason = refuse_grouped(p, call.stream.device.index);
  return reason.empty() && x.product.y ? refuse_for_speed(p) : reason;
}
void run_activation_backward(const Backward& call, bool /*portable*/) { run(call); }

}  // namespace waybill::cuda
