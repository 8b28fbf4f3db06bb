// SPDX-License-Identifier: Apache-2.0
// The public matmuls: checks, then the engine with the selected kernel set, or the reference loops when those are forced.
#include "waybill/grouped_gemm.h"

#include <algorithm>

#include "core/implementation.h"
#include "ops/gemm/bias_grad.h"
#include "ops/gemm/device_backend.h"
#include "ops/gemm/gemm_engine.h"
#include "ops/gemm/gemm_ref.h"
#include "ops/gemm/grouped_gemm_checks.h"

namespace waybill {
namespace {

using detail::GemmBatch;
using detail::Operand;
using detail::Ragged;

const std::int32_t* row_list(const TensorView& rows) { return rows ? rows.as<std::int32_t>() : nullptr; }

Operand operand(const TensorView& view, std::int64_t outer_stride, std::int64_t k_stride, std::int64_t group_stride = 0) {
  Operand result;
  result.data = view.data;
  result.is_bf16 = view.dtype == DType::kBF16;
  result.outer_stride = outer_stride;
  result.k_stride = k_stride;
  result.group_stride = group_stride;
  return result;
}

void set_output(GemmBatch& batch, const TensorView& c, std::int64_t stride, std::int64_t group_stride, bool accumulate) {
  batch.c = c.data;
  batch.c_is_bf16 = c.dtype == DType::kBF16;
  batch.c_stride = stride;
  batch.c_group_stride = group_stride;
  batch.accumulate = accumulate;
}

using detail::GemmCall;
using detail::GemmDeviceBackend;
using detail::GemmDeviceOp;

template <class Args, GemmDeviceOp<Args> GemmDeviceBackend::*kOp, bool kPortable>
std::string refuse_device(const GemmCall<Args>& call) {
  if (detail::g_gemm_device_backend == nullptr) return "no CUDA backend is linked";
  return (detail::g_gemm_device_backend->*kOp).refuse(call, kPortable);
}
template <class Args, GemmDeviceOp<Args> GemmDeviceBackend::*kOp, bool kPortable>
void run_device(const GemmCall<Args>& call) {
  (detail::g_gemm_device_backend->*kOp).run(call, kPortable);
}

// Runs the call where its tensors are on a GPU; false: they are on the CPU.
template <class Args, GemmDeviceOp<Args> GemmDeviceBackend::*kOp>
bool on_device(const char* op, const Args& args, const detail::GroupedShape& shape, const TensorView& weights, Stream stream) {
  static constexpr Implementation<GemmCall<Args>> kList[] = {
      {"cuda", refuse_device<Args, kOp, false>, run_device<Args, kOp, false>},
      {"cuda_portable", refuse_device<Args, kOp, true>, run_device<Args, kOp, true>},
  };
  if (weights.device.type == DeviceType::kCpu) return false;
  WB_CHECK(stream.device == weights.device, "{}: the stream is on {}, the tensors are on {}", op, to_string(stream.device), to_string(weights.device));
  const GemmCall<Args> call{args, shape, stream};
  select_implementation("gemm", kList, call).run(call);
  return true;
}

}  // namespace

namespace detail {

const GemmDeviceBackend* g_gemm_device_backend = nullptr;

}  // namespace detail

void grouped_gemm(const GroupedGemmArgs& args, Stream stream) {
  const detail::GroupedShape shape = detail::check(args);
  if (on_device<GroupedGemmArgs, &GemmDeviceBackend::forward>("grouped_gemm", args, shape, args.weights, stream)) return;
  const detail::KernelSet* kernels = detail::selected_kernels();
  if (kernels == nullptr) return grouped_gemm_ref(args);
  const bool lnc = args.layout == WeightLayout::kLNC;
  GemmBatch batch;
  batch.groups = shape.L;
  batch.n = shape.N;
  batch.k = shape.C;
  batch.ragged = Ragged::kM;
  batch.offsets = args.offsets.as<std::int32_t>();
  batch.a = operand(args.a, shape.C, 1);
  batch.a.outer_rows = row_list(args.a_rows);
  batch.b = operand(args.weights, lnc ? shape.C : 1, lnc ? 1 : shape.N, shape.N * shape.C);
  set_output(batch, args.y, shape.N, 0, args.accumulate);
  batch.bias = args.bias ? args.bias.as<float>() : nullptr;
  const std::int32_t* rows = batch.a.outer_rows;
  if (rows != nullptr && std::any_of(rows, rows + shape.S, [](std::int32_t row) { return row < 0; })) batch.c_mask = rows;
  detail::run_gemm_batch(batch, *kernels, stream.pool);
}

void grouped_gemm_dgrad(const GroupedGemmDgradArgs& args, Stream stream) {
  const detail::GroupedShape shape = detail::check(args);
  if (on_device<GroupedGemmDgradArgs, &GemmDeviceBackend::dgrad>("grouped_gemm_dgrad", args, shape, args.weights, stream)) return;
  const detail::KernelSet* kernels = detail::selected_kernels();
  if (kernels == nullptr) return grouped_gemm_dgrad_ref(args);
  const bool lnc = args.layout == WeightLayout::kLNC;
  GemmBatch batch;
  batch.groups = shape.L;
  batch.n = shape.C;
  batch.k = shape.N;
  batch.ragged = Ragged::kM;
  batch.offsets = args.offsets.as<std::int32_t>();
  batch.a = operand(args.dy, shape.N, 1);
  batch.b = operand(args.weights, lnc ? 1 : shape.N, lnc ? shape.C : 1, shape.N * shape.C);
  set_output(batch, args.da, shape.C, 0, args.accumulate);
  detail::run_gemm_batch(batch, *kernels, stream.pool);
}

void grouped_gemm_wgrad(const GroupedGemmWgradArgs& args, Stream stream) {
  const detail::GroupedShape shape = detail::check(args);
  if (on_device<GroupedGemmWgradArgs, &GemmDeviceBackend::wgrad>("grouped_gemm_wgrad", args, shape, args.d_weights, stream)) return;
  const detail::KernelSet* kernels = detail::selected_kernels();
  if (kernels == nullptr) return grouped_gemm_wgrad_ref(args);
  Operand a = operand(args.a, 1, shape.C);
  a.k_rows = a.k_mask = row_list(args.a_rows);
  Operand dy = operand(args.dy, 1, shape.N);
  dy.k_mask = a.k_mask;  // a padding row adds nothing, whatever dy holds there
  const bool lnc = args.layout == WeightLayout::kLNC;
  GemmBatch batch;
  batch.groups = shape.L;
  batch.m = lnc ? shape.N : shape.C;
  batch.n = lnc ? shape.C : shape.N;
  batch.ragged = Ragged::kK;
  batch.offsets = args.offsets.as<std::int32_t>();
  batch.a = lnc ? dy : a;
  batch.b = lnc ? a : dy;
  set_output(batch, args.d_weights, batch.n, shape.N * shape.C, args.accumulate);
  detail::run_gemm_batch(batch, *kernels, stream.pool);
  if (args.d_bias) detail::bias_grad(args, stream.pool);
}

void gemm(const GemmArgs& args, Stream stream) {
  const detail::GemmShape shape = detail::check(args);
  const detail::KernelSet* kernels = detail::selected_kernels();
  if (kernels == nullptr) return gemm_ref(args);
  GemmBatch batch;
  batch.m = shape.m;
  batch.n = shape.n;
  batch.k = shape.k;
  const std::int64_t a_stride = args.a.stride[0], b_stride = args.b.stride[0];
  batch.a = operand(args.a, args.transpose_a ? 1 : a_stride, args.transpose_a ? a_stride : 1);
  batch.b = operand(args.b, args.transpose_b ? b_stride : 1, args.transpose_b ? 1 : b_stride);
  set_output(batch, args.c, args.c.stride[0], 0, args.accumulate);
  detail::run_gemm_batch(batch, *kernels, stream.pool);
}

}  // namespace waybill
