// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/gemm_cuda.h"

#include <fmt/format.h>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/gemm/cuda/gemm_activation.h"
#include "ops/gemm/cuda/gemm_portable.h"
#include "ops/gemm/cuda/group_rows.h"
#include "ops/gemm/cuda/grouped_run.h"
#include "ops/gemm/device_backend.h"
#include "ops/gemm/group_rows_backend.h"

namespace waybill::cuda {
namespace {

using detail::GemmCall;
using Forward = GemmCall<GroupedGemmArgs>;
using Dgrad = GemmCall<GroupedGemmDgradArgs>;
using Wgrad = GemmCall<GroupedGemmWgradArgs>;

constexpr std::int64_t kMaxPortableTiles = 65535;  // grid y and z

const std::int32_t* list(const TensorView& view) { return static_cast<const std::int32_t*>(view ? view.data : nullptr); }
bool is_bf16(const TensorView& view) { return view.dtype == DType::kBF16; }
GemmOutput output_of(const TensorView& d, bool accumulate) { return is_bf16(d) ? GemmOutput::kBf16 : (accumulate ? GemmOutput::kAddF32 : GemmOutput::kF32); }

// y = a W^T: with [L, N, C] weights both have the contraction innermost; [L, C, N] ones are read as dgrad reads the others.
GroupedProblem problem(const Forward& call) {
  const GroupedGemmArgs& x = call.args;
  GroupedProblem p{};
  p.form = x.layout == WeightLayout::kLNC ? GemmForm::kNT : GemmForm::kNN, p.output = output_of(x.y, x.accumulate);
  p.groups = call.shape.L, p.rows = call.shape.S, p.n = call.shape.N, p.k = call.shape.C;
  p.a = x.a.data, p.b = x.weights.data, p.offsets = list(x.offsets), p.d = x.y.data, p.status = x.status;
  p.bias = static_cast<const float*>(x.bias ? x.bias.data : nullptr);
  p.a_list = list(x.a_rows), p.a_rows = x.a.shape[0];
  return p;
}
GroupedProblem problem(const Dgrad& call) {
  const GroupedGemmDgradArgs& x = call.args;
  GroupedProblem p{};
  p.form = x.layout == WeightLayout::kLNC ? GemmForm::kNN : GemmForm::kNT, p.output = output_of(x.da, x.accumulate);
  p.groups = call.shape.L, p.rows = call.shape.S, p.n = call.shape.C, p.k = call.shape.N;
  p.a = x.dy.data, p.b = x.weights.data, p.offsets = list(x.offsets), p.d = x.da.data, p.status = x.status;
  return p;
}
GroupedProblem problem(const Wgrad& call) {
  const GroupedGemmWgradArgs& x = call.args;
  const bool lnc = x.layout == WeightLayout::kLNC;
  GroupedProblem p{};
  p.form = GemmForm::kTN, p.output = output_of(x.d_weights, x.accumulate);
  p.groups = call.shape.L, p.rows = call.shape.S, p.m = lnc ? call.shape.N : call.shape.C, p.n = lnc ? call.shape.C : call.shape.N;
  (lnc ? p.b_list : p.a_list) = list(x.a_rows), (lnc ? p.b_rows : p.a_rows) = x.a.shape[0];
  p.a = lnc ? x.dy.data : x.a.data, p.b = lnc ? x.a.data : x.dy.data, p.offsets = list(x.offsets), p.d = x.d_weights.data, p.status = x.status;
  return p;
}

struct Operands {
  const TensorView &a, &b;
};
Operands operands(const Forward& call) { return {call.args.a, call.args.weights}; }
Operands operands(const Dgrad& call) { return {call.args.dy, call.args.weights}; }
Operands operands(const Wgrad& call) { return {call.args.dy, call.args.a}; }

void check_element_alignment(const TensorView& view, const char* name) {
  const std::size_t size = size_bytes(view.dtype);
  WB_CHECK(reinterpret_cast<std::uintptr_t>(view.data) % size == 0, "{} must be aligned to its elements of {} bytes, got address {}", name, size,
           fmt::ptr(view.data));
}

template <class Call>
std::string refuse(const Call& call, bool portable) {
  const Operands o = operands(call);
  const int device = call.stream.device.index;
  check_element_alignment(o.a, "the rows"), check_element_alignment(o.b, "the weights or second rows");
  if (portable) {
    const GroupedProblem p = problem(call);
    const std::int64_t tiles = p.form == GemmForm::kTN ? std::max((p.m + 63) / 64, p.groups) : p.rows / 64 + p.groups;
    return tiles > kMaxPortableTiles ? fmt::format("takes {} row tiles of 64, got {}", kMaxPortableTiles, tiles) : std::string();
  }
  if (!is_bf16(o.a) || !is_bf16(o.b)) return fmt::format("takes bf16 operands, got {} and {}", to_string(o.a.dtype), to_string(o.b.dtype));
  return refuse_grouped(problem(call), device);
}

PortableGemm portable(const Forward& call) {
  const GroupedGemmArgs& x = call.args;
  const std::int64_t N = call.shape.N, C = call.shape.C;
  const bool lnc = x.layout == WeightLayout::kLNC;
  PortableGemm g{};
  g.a = {x.a.data, is_bf16(x.a), 0, C, 1, list(x.a_rows), x.a.shape[0]};
  g.b = {x.weights.data, is_bf16(x.weights), N * C, lnc ? C : 1, lnc ? 1 : N, nullptr, 0};
  g.n = N, g.k = C, g.offsets = list(x.offsets), g.d = x.y.data, g.d_is_bf16 = is_bf16(x.y), g.accumulate = x.accumulate;
  g.bias = static_cast<const float*>(x.bias ? x.bias.data : nullptr), g.status = x.status;
  return g;
}
PortableGemm portable(const Dgrad& call) {
  const GroupedGemmDgradArgs& x = call.args;
  const std::int64_t N = call.shape.N, C = call.shape.C;
  const bool lnc = x.layout == WeightLayout::kLNC;
  PortableGemm g{};
  g.a = {x.dy.data, is_bf16(x.dy), 0, N, 1, nullptr, 0};
  g.b = {x.weights.data, is_bf16(x.weights), N * C, lnc ? 1 : N, lnc ? C : 1, nullptr, 0};
  g.n = C, g.k = N, g.offsets = list(x.offsets), g.d = x.da.data, g.d_is_bf16 = is_bf16(x.da), g.accumulate = x.accumulate, g.status = x.status;
  return g;
}
PortableGemm portable(const Wgrad& call) {
  const GroupedGemmWgradArgs& x = call.args;
  const std::int64_t N = call.shape.N, C = call.shape.C;
  const bool lnc = x.layout == WeightLayout::kLNC;
  const PortableOperand a{x.a.data, is_bf16(x.a), 0, 1, C, list(x.a_rows), x.a.shape[0]}, dy{x.dy.data, is_bf16(x.dy), 0, 1, N, nullptr, 0};
  PortableGemm g{};
  g.a = lnc ? dy : a, g.b = lnc ? a : dy, g.is_k_ragged = true, g.m = lnc ? N : C, g.n = lnc ? C : N, g.d_group_stride = N * C, g.d_row_stride = g.n;
  g.offsets = list(x.offsets), g.d = x.d_weights.data, g.d_is_bf16 = is_bf16(x.d_weights), g.accumulate = x.accumulate, g.status = x.status;
  return g;
}

int num_sms(int device) {
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

template <class Call>
void run(const Call& call, bool use_portable) {
  const int device = call.stream.device.index;
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  const DeviceGuard guard(device);
  if (use_portable) {
    PortableGemm gemm = portable(call);
    gemm.groups = static_cast<int>(call.shape.L), gemm.rows = call.shape.S;
    launch_gemm_portable(gemm, stream);
    check_launch("gemm_portable");
  } else {
    const GroupedProblem p = problem(call);
    run_grouped(p, choose_tuning(p, num_sms(device)), device, stream);
  }
}

void run_wgrad(const Wgrad& call, bool use_portable) {
  run(call, use_portable);
  const GroupedGemmWgradArgs& x = call.args;
  if (!x.d_bias) return;
  const DeviceGuard guard(call.stream.device.index);
  launch_bias_grad({x.dy.data, is_bf16(x.dy), list(x.offsets), list(x.a_rows), static_cast<int>(call.shape.L), call.shape.S, x.a.shape[0], call.shape.N,
                    static_cast<float*>(x.d_bias.data), x.accumulate},
                   static_cast<cudaStream_t>(call.stream.native));
  check_launch("bias_grad");
}

void run_group_rows(const GroupRowsArgs& args, std::int64_t num_groups, Stream stream) {
  const DeviceGuard guard(stream.device.index);
  GroupRows p{};
  p.sizes = list(args.sizes), p.offsets = static_cast<std::int32_t*>(args.offsets.data);
  p.groups = static_cast<int>(num_groups), p.S = static_cast<std::int32_t>(args.S);
  p.rows = static_cast<unsigned char*>(args.rows ? args.rows.data : nullptr);
  p.row_bytes = args.rows ? args.rows.shape[1] * static_cast<std::int64_t>(size_bytes(args.rows.dtype)) : 0;
  launch_group_rows(p, num_sms(stream.device.index), static_cast<cudaStream_t>(stream.native));
  check_launch("group_rows");
}

constexpr detail::GemmDeviceBackend kBackend = {{refuse<Forward>, run<Forward>},
                                                {refuse<Dgrad>, run<Dgrad>},
                                                {refuse<Wgrad>, run_wgrad},
                                                {refuse_activation, run_activation},
                                                {refuse_activation_backward, run_activation_backward}};

}  // namespace

void run_wgrad_part(const WgradPart& part, Stream stream) {
  const int device = stream.device.index;
  const auto native = static_cast<cudaStream_t>(stream.native);
  const DeviceGuard guard(device);
  GroupedProblem p{};
  p.form = GemmForm::kTN, p.output = part.is_bf16 ? GemmOutput::kBf16 : (part.accumulate ? GemmOutput::kAddF32 : GemmOutput::kF32);
  p.groups = part.groups, p.rows = part.rows, p.m = part.whole_m, p.n = part.whole_n, p.whole_m = part.whole_m, p.whole_n = part.whole_n;
  p.a = part.a, p.b = part.b, p.offsets = part.offsets, p.d = part.d, p.status = part.status;
  if (refuse_grouped(p, device).empty()) {
    const GemmTuning tuning = choose_tuning(p, num_sms(device));  // of the whole
    p.m = part.m, p.n = part.n;
    return run_grouped(p, tuning, device, native);
  }
  PortableGemm g{};
  g.a = {part.a, true, 0, 1, part.m, nullptr, 0}, g.b = {part.b, true, 0, 1, part.n, nullptr, 0};
  g.is_k_ragged = true, g.groups = static_cast<int>(part.groups), g.rows = part.rows, g.m = part.m, g.n = part.n;
  g.d_group_stride = part.whole_m * part.whole_n, g.d_row_stride = part.whole_n;
  g.offsets = part.offsets, g.d = part.d, g.d_is_bf16 = part.is_bf16, g.accumulate = part.accumulate, g.status = part.status;
  launch_gemm_portable(g, native);
  check_launch("gemm_portable");
}

void run_product_part(const ProductPart& part, Stream stream) {
  const int device = stream.device.index;
  const auto native = static_cast<cudaStream_t>(stream.native);
  const DeviceGuard guard(device);
  const auto* weights = static_cast<const std::uint16_t*>(part.weights) + (part.is_dgrad ? part.first : part.first * part.k);
  GroupedProblem p{};
  p.form = part.is_dgrad ? GemmForm::kNN : GemmForm::kNT, p.output = GemmOutput::kBf16;
  p.groups = part.groups, p.rows = part.rows, p.n = part.n, p.k = part.k;
  p.a = part.a, p.b = weights, p.b_row_stride = part.is_dgrad ? part.whole_n : part.k, p.b_plane = part.k * part.whole_n;
  p.offsets = part.offsets, p.d = part.d, p.status = part.status;
  if (refuse_grouped(p, device).empty()) return run_grouped(p, choose_tuning(p, num_sms(device)), device, native);
  PortableGemm g{};
  g.a = {part.a, true, 0, part.k, 1, nullptr, 0};
  g.b = {weights, true, part.k * part.whole_n, part.is_dgrad ? 1 : part.k, part.is_dgrad ? part.whole_n : 1, nullptr, 0};
  g.groups = static_cast<int>(part.groups), g.rows = part.rows, g.n = part.n, g.k = part.k, g.offsets = part.offsets, g.d = part.d, g.d_is_bf16 = true;
  g.status = part.status;
  launch_gemm_portable(g, native);
  check_launch("gemm_portable");
}

void register_gemm() {
  detail::g_gemm_device_backend = &kBackend;
  detail::g_group_rows_on_device = run_group_rows;
}

}  // namespace waybill::cuda
