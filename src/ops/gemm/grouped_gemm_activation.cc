// SPDX-License-Identifier: Apache-2.0
// Checks and the choice between the fused kernels and the two calls.
#include "waybill/grouped_gemm_activation.h"

#include "core/implementation.h"
#include "ops/gemm/device_backend.h"
#include "ops/gemm/grouped_gemm_checks.h"

namespace waybill {
namespace {

using detail::GemmCall;
using detail::GemmDeviceBackend;
using Forward = GroupedGemmActivationArgs;
using Backward = GroupedGemmActivationBackwardArgs;

Device device_of(const GroupedGemmArgs& product) { return product.weights.device; }

// Checks the product; where y is not given, with a stand-in of the right shape.
detail::GroupedShape check_product(const char* op, const GroupedGemmArgs& product, std::int64_t rows, const TensorView& stand_in) {
  WB_CHECK(!product.accumulate, "{}: an activation cannot accumulate", op);
  if (product.y) return detail::check(product);
  GroupedGemmArgs copy = product;
  copy.y = stand_in;
  copy.y.rank = 2, copy.y.shape[0] = rows,
  copy.y.shape[1] = product.weights.rank == 3 ? product.weights.shape[product.layout == WeightLayout::kLNC ? 1 : 2] : 0;
  copy.y.stride[0] = copy.y.shape[1], copy.y.stride[1] = 1;
  return detail::check(copy);
}

void check_matrix(const char* op, const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns, Device device) {
  WB_CHECK(view.rank == 2 && view.shape[0] == rows && view.shape[1] == columns, "{}: {} must be [{}, {}], got {}", op, name, rows, columns, view.describe());
  WB_CHECK(view.dtype == DType::kF32 || view.dtype == DType::kBF16, "{}: {} must be f32 or bf16, got {}", op, name, view.describe());
  WB_CHECK(view.device == device, "{}: {} is not on {}: {}", op, name, to_string(device), view.describe());
  WB_CHECK(view.is_contiguous(), "{}: {} must be contiguous, got {} with row stride {}", op, name, view.describe(), view.stride[0]);
  WB_CHECK(view.data != nullptr || view.size() == 0, "{}: {} has no memory: {}", op, name, view.describe());
}

void check_row_vector(const char* op, const char* name, const TensorView& view, std::int64_t rows, Device device) {
  if (!view) return;
  WB_CHECK(view.rank == 1 && view.shape[0] == rows && view.dtype == DType::kF32 && view.is_contiguous(), "{}: {} must be f32 [{}], got {}", op, name, rows,
           view.describe());
  WB_CHECK(view.device == device, "{}: {} is not on {}: {}", op, name, to_string(device), view.describe());
}

const float* floats(const TensorView& view) { return view ? view.as<float>() : nullptr; }
const std::int32_t* num_rows(const GroupedGemmArgs& product, const detail::GroupedShape& shape) { return product.offsets.as<std::int32_t>() + shape.L; }

// What lies between the two calls: the caller's y, or on the CPU memory of the call, of the type that the fused kernels round to.
template <class Args>
GroupedGemmArgs with_middle(const GemmCall<Args>& call, std::int64_t rows, DType dtype, Tensor& memory) {
  GroupedGemmArgs product = call.args.product;
  if (!product.y) {
    memory.resize(dtype, {rows, call.shape.N});
    product.y = memory;
  }
  return product;
}

template <class Args>
std::string refuse_composed(const GemmCall<Args>& call) {
  return call.args.product.y || device_of(call.args.product).type == DeviceType::kCpu ? "" : "needs product.y for what lies between the two calls";
}

void run_composed_forward(const GemmCall<Forward>& call) {
  Tensor memory;
  const GroupedGemmArgs product = with_middle(call, call.args.out.shape[0], call.args.out.dtype, memory);
  grouped_gemm(product, call.stream);
  activation_forward(call.args.activation, product.y, floats(call.args.weight), call.args.out, call.stream, num_rows(product, call.shape));
}

void run_composed_backward(const GemmCall<Backward>& call) {
  Tensor memory;
  const GroupedGemmArgs product = with_middle(call, call.args.h.shape[0], call.args.h.dtype, memory);
  grouped_gemm(product, call.stream);
  activation_backward(call.args.activation, call.args.h, floats(call.args.weight), product.y, call.args.dh, const_cast<float*>(floats(call.args.d_weight)),
                      call.stream, num_rows(product, call.shape));
}

template <class Args, detail::GemmDeviceOp<Args> GemmDeviceBackend::*kOp>
std::string refuse_fused(const GemmCall<Args>& call) {
  if (device_of(call.args.product).type == DeviceType::kCpu) return "runs on GPUs";
  if (detail::g_gemm_device_backend == nullptr) return "no CUDA backend is linked";
  return (detail::g_gemm_device_backend->*kOp).refuse(call, false);
}
template <class Args, detail::GemmDeviceOp<Args> GemmDeviceBackend::*kOp>
void run_fused(const GemmCall<Args>& call) {
  (detail::g_gemm_device_backend->*kOp).run(call, false);
}

}  // namespace

void grouped_gemm_activation(const GroupedGemmActivationArgs& args, Stream stream) {
  static constexpr const char* kOp = "grouped_gemm_activation";
  WB_CHECK(args.out.rank == 2, "{}: out must be [S, F], got {}", kOp, args.out.describe());
  const std::int64_t rows = args.out.shape[0];
  const detail::GroupedShape shape = check_product(kOp, args.product, rows, args.out);
  const Device device = device_of(args.product);
  const std::int64_t width = activation_input_width(args.activation, args.out.shape[1]);
  WB_CHECK(shape.N == width, "{}: the weights give {} columns, an activation of width F = {} takes {}", kOp, shape.N, args.out.shape[1], width);
  check_matrix(kOp, "out", args.out, args.product.y ? args.product.y.shape[0] : rows, args.out.shape[1], device);
  check_row_vector(kOp, "weight", args.weight, rows, device);
  WB_CHECK(stream.device == device, "{}: the stream is on {}, the tensors are on {}", kOp, to_string(stream.device), to_string(device));
  static constexpr Implementation<GemmCall<Forward>> kList[] = {
      {"cuda_fused", refuse_fused<Forward, &GemmDeviceBackend::activation>, run_fused<Forward, &GemmDeviceBackend::activation>},
      {"composed", refuse_composed<Forward>, run_composed_forward},
  };
  const GemmCall<Forward> call{args, shape, stream};
  select_implementation("gemm_activation", kList, call).run(call);
}

void grouped_gemm_activation_backward(const GroupedGemmActivationBackwardArgs& args, Stream stream) {
  static constexpr const char* kOp = "grouped_gemm_activation_backward";
  WB_CHECK(args.h.rank == 2, "{}: h must be [S, 2F or F], got {}", kOp, args.h.describe());
  WB_CHECK(!args.product.bias, "{}: the gradient takes no bias", kOp);
  const std::int64_t rows = args.h.shape[0];
  const detail::GroupedShape shape = check_product(kOp, args.product, rows, args.h);
  const Device device = device_of(args.product);
  const std::int64_t width = activation_input_width(args.activation, shape.N);
  if (args.product.y) WB_CHECK(args.product.y.shape[0] == rows, "{}: product.y has {} rows, h has {}", kOp, args.product.y.shape[0], rows);
  check_matrix(kOp, "h", args.h, rows, width, device);
  check_matrix(kOp, "dh", args.dh, rows, width, device);
  check_row_vector(kOp, "weight", args.weight, rows, device);
  check_row_vector(kOp, "d_weight", args.d_weight, rows, device);
  WB_CHECK(stream.device == device, "{}: the stream is on {}, the tensors are on {}", kOp, to_string(stream.device), to_string(device));
  static constexpr Implementation<GemmCall<Backward>> kList[] = {
      {"cuda_fused", refuse_fused<Backward, &GemmDeviceBackend::activation_backward>, run_fused<Backward, &GemmDeviceBackend::activation_backward>},
      {"composed", refuse_composed<Backward>, run_composed_backward},
  };
  const GemmCall<Backward> call{args, shape, stream};
  select_implementation("gemm_activation", kList, call).run(call);
}

}  // namespace waybill
