// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/quantized_cuda.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/gemm/cuda/fp8_run.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/part_offsets.h"
#include "ops/gemm/cuda/widened_run.h"
#include "ops/gemm/quantized_backend.h"

namespace waybill::cuda {
namespace {

using detail::GroupedShape;

const std::int32_t* offsets_of(const TensorView& view) { return static_cast<const std::int32_t*>(view.data); }
GemmOutput output_of(const TensorView& d, bool accumulate) {
  return d.dtype == DType::kBF16 ? GemmOutput::kBf16 : (accumulate ? GemmOutput::kAddF32 : GemmOutput::kF32);
}

// --- 8-bit products ---
Fp8Types types_of(const char* op, const QuantConfig& a, const QuantConfig& b) {
  const bool a_is_e5m2 = a.element == ElementFormat::kE5M2, b_is_e5m2 = b.element == ElementFormat::kE5M2;
  WB_CHECK(!a_is_e5m2 || !b_is_e5m2, "{}: at most one operand may be E5M2", op);
  return a_is_e5m2 ? Fp8Types::kE5M2E4M3 : (b_is_e5m2 ? Fp8Types::kE4M3E5M2 : Fp8Types::kE4M3);
}

void check_contiguous(const char* op, const char* name, const TensorView& view) {
  WB_CHECK(static_cast<bool>(view) && view.is_contiguous(), "{}: {} must be there and contiguous, got {}", op, name, view.describe());
}

void run(const char* op, const Fp8Problem& p, Stream stream) {
  const int device = stream.device.index;
  const DeviceGuard guard(device);
  if (const std::string why = refuse_fp8(p, device); !why.empty()) WB_FAIL(ErrorCode::kUnsupported, "{}: the 8-bit kernels cannot take this call: {}", op, why);
  int num_sms = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
  run_fp8(p, choose_fp8_tuning(p, num_sms), device, static_cast<cudaStream_t>(stream.native));
}

// d = rows times weights; `inner`: the weights lie with the contraction innermost, so that their codes are read as they are.
struct RowProduct {
  const char* op;
  const QuantizedOperand &rows, &weights;
  const TensorView &offsets, &d, &bias;
  bool inner, accumulate;
  std::int64_t n, k;
  StatusWord* status;
};

void multiply_fp8(const RowProduct& x, const GroupedShape& s, Stream stream) {
  const std::int64_t n_blocks = (x.n + 127) / 128, k_blocks = (x.k + 127) / 128;
  const TensorView& b = x.inner ? x.weights.q.codes : x.weights.q.turned;
  check_contiguous(x.op, "the rows' codes", x.rows.q.codes), check_contiguous(x.op, x.inner ? "the weights' codes" : "the weights' turned codes", b);
  check_contiguous(x.op, "the weights' scales", x.weights.q.scales);
  const std::int64_t scale_rows = s.L * (x.inner ? n_blocks : k_blocks), scale_columns = x.inner ? k_blocks : n_blocks;
  WB_CHECK(x.weights.q.scales.shape[0] >= scale_rows && x.weights.q.scales.shape[1] == scale_columns, "{}: the weights' scales must be [{}, {}], got {}", x.op,
           scale_rows, scale_columns, x.weights.q.scales.describe());
  WB_CHECK(b.size() >= (x.inner ? s.L * x.n * x.k : s.L * k_blocks * x.n * 128), "{}: the weights hold {} codes, {} are needed", x.op, b.size(),
           x.inner ? s.L * x.n * x.k : s.L * k_blocks * x.n * 128);
  WB_CHECK(x.rows.q.scales.rank == 2 && x.rows.q.scales.shape[1] == k_blocks, "{}: the rows' scales must have {} columns, got {}", x.op, k_blocks,
           x.rows.q.scales.describe());
  Fp8Problem p{};
  p.form = GemmForm::kNT, p.output = output_of(x.d, x.accumulate), p.types = types_of(x.op, x.rows.config, x.weights.config);
  p.groups = s.L, p.rows = std::min(s.S, x.rows.q.scales.shape[0]), p.n = x.n, p.k = x.k, p.a = x.rows.q.codes.data, p.b = b.data;
  p.a_scales = static_cast<const float*>(x.rows.q.scales.data), p.b_scales = static_cast<const float*>(x.weights.q.scales.data);
  p.a_scale_stride = x.rows.q.scales.stride[0], p.a_scale_k = x.rows.q.scales.stride[1];
  p.b_scale_group = n_blocks * k_blocks, p.b_scale_column = x.inner ? k_blocks : 1, p.b_scale_k = x.inner ? 1 : n_blocks, p.b_is_turned = !x.inner;
  p.offsets = offsets_of(x.offsets), p.d = x.d.data, p.bias = static_cast<const float*>(x.bias ? x.bias.data : nullptr), p.status = x.status;
  run(x.op, p, stream);
}

void wgrad_fp8(const QuantizedWgradArgs& args, const GroupedShape& s, Stream stream) {
  const char* op = "quantized_gemm_wgrad";
  const bool lnc = args.layout == WeightLayout::kLNC;
  const QuantizedOperand &a = lnc ? args.dy : args.a, &b = lnc ? args.a : args.dy;
  for (const QuantizedOperand* x : {&a, &b}) check_contiguous(op, "turned codes", x->q.turned), check_contiguous(op, "scales", x->q.scales);
  Fp8Problem p{};
  p.form = GemmForm::kTN, p.output = output_of(args.d_weights, args.accumulate), p.types = types_of(op, a.config, b.config);
  p.groups = s.L, p.m = lnc ? s.N : s.C, p.n = lnc ? s.C : s.N;
  p.max_blocks = std::min({a.q.turned.shape[0], b.q.turned.shape[0], a.q.scales.shape[0], b.q.scales.shape[0]});
  p.rows = p.max_blocks * 128;  // offsets beyond the blocks are caught there
  p.a = a.q.turned.data, p.b = b.q.turned.data, p.a_scales = static_cast<const float*>(a.q.scales.data),
  p.b_scales = static_cast<const float*>(b.q.scales.data);
  p.offsets = offsets_of(args.offsets), p.d = args.d_weights.data, p.status = args.status;
  run(op, p, stream);
}

// --- wide products ---
TensorView device_view(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  TensorView view(data, dtype, shape);
  view.device = device;
  return view;
}

void check_workspace(const char* op, const Workspace& workspace, std::size_t bytes) {
  WB_CHECK(workspace.bytes() >= bytes && (bytes == 0 || workspace.data() != nullptr), "{}: the workspace holds {} bytes, {} are needed", op, workspace.bytes(),
           bytes);
}

// The operand's rows [begin, begin + count); block rows are single ones. Scales end with the groups' last row.
QuantizedView rows_of(const QuantizedOperand& x, std::int64_t begin, std::int64_t count, std::int64_t first_group) {
  QuantizedView part = x.q;
  const std::int64_t scaled = x.q.scales.shape[0];
  part.codes = x.q.codes.rows(begin, begin + count), part.scales = x.q.scales.rows(std::min(begin, scaled), std::min(begin + count, scaled));
  if (x.config.scale == ScaleFormat::kE4M3) part.group_scales = x.q.group_scales.rows(first_group, x.q.group_scales.shape[0]);
  part.turned = {}, part.swizzled = {};
  return part;
}

// The operand's columns [begin, begin + count).
QuantizedView columns_of(const QuantizedOperand& x, std::int64_t begin, std::int64_t count) {
  const auto cut = [](TensorView& view, std::int64_t from, std::int64_t columns) {
    view.data = static_cast<std::byte*>(view.data) + static_cast<std::size_t>(from * view.stride[1]) * size_bytes(view.dtype);
    view.shape[1] = columns;
  };
  QuantizedView part = x.q;
  const std::int64_t codes = x.config.element == ElementFormat::kE2M1 ? 2 : 1, block = x.config.block_columns;
  cut(part.codes, begin / codes, count / codes), cut(part.scales, begin / block, (count + block - 1) / block);
  part.turned = {}, part.swizzled = {};
  return part;
}

// Weights of groups [first, first + count) as bf16 [count, outer, inner].
void widen_weights(const char* op, const QuantizedOperand& w, std::int64_t first, std::int64_t count, std::int64_t outer, std::int64_t inner,
                   const TensorView& firsts, const TensorView& wide, Stream stream) {
  WB_CHECK(static_cast<bool>(w.q.codes), "{}: the weights' codes are needed, turned codes are read by 8-bit products only", op);
  const std::int64_t blocks = (outer + w.config.block_rows - 1) / w.config.block_rows;
  QuantizedView part = w.q;
  part.codes = w.q.codes.rows(first * outer, (first + count) * outer), part.scales = w.q.scales.rows(first * blocks, (first + count) * blocks);
  if (w.config.scale == ScaleFormat::kE4M3) part.group_scales = w.q.group_scales.rows(first, first + count);
  part.turned = {}, part.swizzled = {};
  TensorView flat = wide;
  flat.rank = 2, flat.shape = {}, flat.shape[0] = count * outer, flat.shape[1] = inner, flat.stride = {}, flat.stride[0] = inner, flat.stride[1] = 1;
  dequantize(w.config, part, firsts, flat, stream);
}

// The product that widens both operands beside itself (widened_sm90.cuh); false: it cannot take them, and nothing was queued. The weights' rows are as long as
// those of `rows`: the contraction is innermost.
bool multiply_beside(const char* op, const QuantizedOperand& rows, const QuantizedOperand& weights, const TensorView& offsets, const TensorView& d,
                     const TensorView& bias, const GroupedShape& s, std::int64_t n, std::int64_t k, const Workspace& workspace, StatusWord* status,
                     Stream stream) {
  if (d.dtype != DType::kBF16 || s.S == 0 || s.L == 0) return false;
  const int device = stream.device.index;
  const DeviceGuard guard(device);
  const detail::WidePlan plan = detail::plan_wide(s.S, k, s.L, n * k);
  check_workspace(op, workspace, plan.bytes);
  auto* base = static_cast<std::byte*>(workspace.data());
  WidenedProblem p{};
  p.groups = s.L, p.rows = std::min(s.S, rows.q.scales.shape[0]), p.n = n, p.k = k, p.row_config = rows.config, p.weight_config = weights.config;
  p.coded_rows = rows.q, p.coded_weights = weights.q, p.offsets = offsets_of(offsets), p.bias = static_cast<const float*>(bias ? bias.data : nullptr);
  p.d = d.data, p.status = status, p.wide = base + plan.row_offset, p.wide_elements = plan.wide_elements();
  p.room = reinterpret_cast<std::int32_t*>(base + plan.progress_offset);
  if (!refuse_widened(p, device).empty()) return false;
  run_widened(p, {}, device, static_cast<cudaStream_t>(stream.native));
  return true;
}

// Calls multiply(rows' copy, weights' copy, offsets, row0, rows, first group, groups) for every part.
template <class Multiply>
void in_parts(const char* op, const QuantizedOperand& rows, const QuantizedOperand& weights, const TensorView& offsets, const GroupedShape& s,
              std::int64_t width, std::int64_t outer, std::int64_t inner, const Workspace& workspace, StatusWord* status, Stream stream,
              const Multiply& multiply) {
  WB_CHECK(rows.config.block_rows == 1, "{}: a GPU takes rows with blocks along the row, got {} x {}", op, rows.config.block_rows, rows.config.block_columns);
  const detail::WidePlan plan = detail::plan_wide(s.S, width, s.L, outer * inner);
  check_workspace(op, workspace, plan.bytes);
  if (s.S == 0 || s.L == 0) return;
  auto* base = static_cast<std::byte*>(workspace.data());
  const DeviceGuard guard(stream.device.index);
  for (std::int64_t g = 0; g < s.L; g += plan.part_groups) {
    const std::int64_t groups = std::min(plan.part_groups, s.L - g);
    const TensorView part = device_view(base + plan.offsets_offset, DType::kI32, {groups + 1}, stream.device);
    const TensorView firsts = device_view(base + plan.firsts_offset, DType::kI32, {groups + 1}, stream.device);
    const TensorView wide_weights = device_view(base + plan.weight_offset, DType::kBF16, {groups, outer, inner}, stream.device);
    for (std::int64_t row0 = 0; row0 < s.S; row0 += plan.part_rows) {
      const std::int64_t count = std::min(plan.part_rows, s.S - row0);
      const bool is_first = row0 == 0 && g == 0;
      launch_part_offsets({offsets_of(offsets), static_cast<int>(g), static_cast<int>(groups), static_cast<int>(row0), static_cast<int>(count),
                           static_cast<std::int32_t*>(part.data), static_cast<std::int32_t*>(firsts.data), outer, static_cast<int>(s.L), static_cast<int>(s.S),
                           is_first ? status : nullptr},
                          static_cast<cudaStream_t>(stream.native));
      check_launch("part_offsets");
      if (row0 == 0) widen_weights(op, weights, g, groups, outer, inner, firsts, wide_weights, stream);
      const TensorView wide_rows = device_view(base + plan.row_offset, DType::kBF16, {count, width}, stream.device);
      QuantizedView view = rows_of(rows, row0, count, g);
      if (rows.config.scale == ScaleFormat::kE4M3) view.group_scales = view.group_scales.rows(0, groups);
      dequantize(rows.config, view, part, wide_rows, stream);
      multiply(wide_rows, wide_weights, part, row0, count, g, groups);
    }
  }
}

void forward(const QuantizedGemmArgs& args, const GroupedShape& s, Stream stream) {
  const char* op = "quantized_gemm";
  const bool lnc = args.layout == WeightLayout::kLNC;
  if (detail::is_fp8_product(args.a.config, args.weights.config)) {
    return multiply_fp8({op, args.a, args.weights, args.offsets, args.y, args.bias, lnc, args.accumulate, s.N, s.C, args.status}, s, stream);
  }
  if (lnc && multiply_beside(op, args.a, args.weights, args.offsets, args.y, args.bias, s, s.N, s.C, args.workspace, args.status, stream)) return;
  in_parts(op, args.a, args.weights, args.offsets, s, s.C, lnc ? s.N : s.C, lnc ? s.C : s.N, args.workspace, args.status, stream,
           [&](const TensorView& a, const TensorView& w, const TensorView& offsets, std::int64_t row0, std::int64_t rows, std::int64_t g, std::int64_t groups) {
             GroupedGemmArgs wide;
             wide.a = a, wide.weights = w, wide.offsets = offsets, wide.y = args.y.rows(row0, row0 + rows), wide.layout = args.layout;
             if (args.bias) wide.bias = args.bias.rows(g, g + groups);
             wide.accumulate = args.accumulate;
             grouped_gemm(wide, stream);
           });
}

void dgrad(const QuantizedDgradArgs& args, const GroupedShape& s, Stream stream) {
  const char* op = "quantized_gemm_dgrad";
  const bool lnc = args.layout == WeightLayout::kLNC;
  if (detail::is_fp8_product(args.dy.config, args.weights.config)) {
    const TensorView no_bias;
    return multiply_fp8({op, args.dy, args.weights, args.offsets, args.da, no_bias, !lnc, args.accumulate, s.C, s.N, args.status}, s, stream);
  }
  if (!lnc && multiply_beside(op, args.dy, args.weights, args.offsets, args.da, {}, s, s.C, s.N, args.workspace, args.status, stream)) return;
  in_parts(op, args.dy, args.weights, args.offsets, s, s.N, lnc ? s.N : s.C, lnc ? s.C : s.N, args.workspace, args.status, stream,
           [&](const TensorView& dy, const TensorView& w, const TensorView& offsets, std::int64_t row0, std::int64_t rows, std::int64_t, std::int64_t) {
             GroupedGemmDgradArgs wide;
             wide.dy = dy, wide.weights = w, wide.offsets = offsets, wide.da = args.da.rows(row0, row0 + rows), wide.layout = args.layout;
             wide.accumulate = args.accumulate;
             grouped_gemm_dgrad(wide, stream);
           });
}

void wgrad(const QuantizedWgradArgs& args, const GroupedShape& s, Stream stream) {
  const char* op = "quantized_gemm_wgrad";
  if (detail::is_fp8_wgrad(args.a.config, args.dy.config)) return wgrad_fp8(args, s, stream);
  WB_CHECK(args.a.q.codes && args.dy.q.codes, "{}: codes are needed, turned codes are read by 8-bit products only", op);
  const detail::WideWgradPlan plan = detail::plan_wide_wgrad(s, detail::wgrad_step(args, s));
  check_workspace(op, args.workspace, plan.bytes);
  if (s.L == 0) return;
  const DeviceGuard guard(stream.device.index);
  auto* base = static_cast<std::byte*>(args.workspace.data());
  const bool lnc = args.layout == WeightLayout::kLNC;
  const std::size_t size = size_bytes(args.d_weights.dtype);
  std::int64_t wide_a = -1;  // the first column of a that is there
  for (std::int64_t i = 0; i < plan.dy_parts; ++i) {
    const std::int64_t n0 = i * plan.dy_columns, n = std::min(plan.dy_columns, s.N - n0);
    const TensorView dy = device_view(base + plan.dy_offset, DType::kBF16, {s.S, n}, stream.device);
    dequantize(args.dy.config, columns_of(args.dy, n0, n), args.offsets, dy, stream, i == 0 ? args.status : nullptr);
    for (std::int64_t turn = 0; turn < plan.a_parts; ++turn) {
      const std::int64_t j = i % 2 == 0 ? turn : plan.a_parts - 1 - turn;  // there and back: the last part serves twice
      const std::int64_t c0 = j * plan.a_columns, c = std::min(plan.a_columns, s.C - c0);
      const TensorView a = device_view(base + plan.a_offset, DType::kBF16, {s.S, c}, stream.device);
      if (wide_a != c0) dequantize(args.a.config, columns_of(args.a, c0, c), args.offsets, a, stream);
      wide_a = c0;
      auto* d = static_cast<std::byte*>(args.d_weights.data) + static_cast<std::size_t>(lnc ? n0 * s.C + c0 : c0 * s.N + n0) * size;
      run_wgrad_part({lnc ? dy.data : a.data, lnc ? a.data : dy.data, offsets_of(args.offsets), s.L, s.S, lnc ? n : c, lnc ? c : n, lnc ? s.N : s.C,
                      lnc ? s.C : s.N, d, args.d_weights.dtype == DType::kBF16, args.accumulate, args.status},
                     stream);
    }
  }
}

constexpr detail::QuantizedBackend kBackend = {forward, dgrad, wgrad};

}  // namespace

void register_quantized_gemm() { detail::g_quantized_backend = &kBackend; }

}  // namespace waybill::cuda
