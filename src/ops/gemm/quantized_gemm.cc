// SPDX-License-Identifier: Apache-2.0
// Products of quantised operands: checks, the plan of the wide way, and the CPU's way through fp32.
#include "waybill/quantized_gemm.h"

#include <algorithm>

#include "ops/gemm/quantized_backend.h"
#include "ops/gemm/widened_room.h"

namespace waybill {
namespace detail {

const QuantizedBackend* g_quantized_backend = nullptr;

WidePlan plan_wide(std::int64_t S, std::int64_t row_width, std::int64_t L, std::int64_t group_elements) {
  constexpr std::int64_t kMaxParts = 8;
  const auto up = [](std::int64_t a, std::int64_t b) { return b == 0 ? 0 : (a + b - 1) / b; };
  const std::int64_t room = std::max(S * row_width, L * group_elements);
  WidePlan best;
  std::int64_t best_size = 0;
  for (std::int64_t products = 1; products <= kMaxParts * kMaxParts && best_size == 0; ++products) {
    for (std::int64_t groups = 1; groups <= std::min(products, std::max<std::int64_t>(std::min(L, kMaxParts), 1)); ++groups) {
      const std::int64_t rows = products / groups;
      if (products % groups != 0 || rows > kMaxParts) continue;
      const std::int64_t size = up(S, rows) * row_width + up(L, groups) * group_elements;
      // The last combination is taken whether it fits or not: one group's weights must be there, and some rows.
      const bool is_last = rows == kMaxParts && groups == std::max<std::int64_t>(std::min(L, kMaxParts), 1);
      if (size > room && !is_last) continue;
      best.row_parts = rows, best.group_parts = groups, best_size = std::max<std::int64_t>(size, 1);
      break;
    }
  }
  best.part_rows = up(S, best.row_parts), best.part_groups = up(L, best.group_parts);
  WorkspacePlan plan;
  best.row_offset = plan.book("rows as bf16", static_cast<std::size_t>(best.part_rows * row_width) * 2);
  best.weight_offset = plan.book("weights as bf16", static_cast<std::size_t>(best.part_groups * group_elements) * 2);
  best.offsets_offset = plan.book("offsets of a part", static_cast<std::size_t>(best.part_groups + 1) * 4);
  best.firsts_offset = plan.book("first rows of weights", static_cast<std::size_t>(best.part_groups + 1) * 4);
  const WidenedRoom progress = widened_room(S, L, up(group_elements, std::max<std::int64_t>(row_width, 1)));
  best.progress_offset = plan.book("counts of a product that widens its operands", static_cast<std::size_t>(progress.words) * 4);
  best.bytes = plan.total_bytes();
  return best;
}

std::int64_t wgrad_step(const QuantizedWgradArgs& args, const GroupedShape& s) {
  const std::int64_t widest = std::max(s.N, s.C), blocks = std::max(args.a.config.block_columns, args.dy.config.block_columns);
  return std::max<std::int64_t>(widest >= 1024 ? 256 : (widest >= 256 ? 128 : 16), blocks);
}

WideWgradPlan plan_wide_wgrad(const GroupedShape& s, std::int64_t step) {
  constexpr std::int64_t kMaxParts = 8;
  // Columns of a part when a width is taken in `parts` parts.
  const auto part_of = [step](std::int64_t width, std::int64_t parts) { return std::min(width, ((width + parts - 1) / parts + step - 1) / step * step); };
  const std::int64_t room = std::max(s.N, s.C);
  WideWgradPlan wide;
  wide.dy_columns = part_of(s.N, kMaxParts), wide.a_columns = part_of(s.C, kMaxParts);  // where nothing fits: two narrow operands
  std::int64_t fewest = kMaxParts * kMaxParts + 1;
  for (std::int64_t dy = 1; dy <= kMaxParts; ++dy) {
    for (std::int64_t a = 1; a <= kMaxParts; ++a) {
      if (dy * a >= fewest || part_of(s.N, dy) + part_of(s.C, a) > room) continue;
      fewest = dy * a, wide.dy_columns = part_of(s.N, dy), wide.a_columns = part_of(s.C, a);
    }
  }
  const auto parts = [](std::int64_t width, std::int64_t part) { return part == 0 ? 1 : (width + part - 1) / part; };
  wide.dy_parts = parts(s.N, wide.dy_columns), wide.a_parts = parts(s.C, wide.a_columns);
  WorkspacePlan plan;
  wide.dy_offset = plan.book("columns of dy as bf16", static_cast<std::size_t>(s.S * wide.dy_columns) * 2);
  wide.a_offset = plan.book("columns of a as bf16", static_cast<std::size_t>(s.S * wide.a_columns) * 2);
  wide.bytes = plan.total_bytes();
  return wide;
}

}  // namespace detail

namespace {

using detail::GroupedShape;

std::int64_t code_columns(const QuantizedOperand& x, std::int64_t columns) { return x.config.element == ElementFormat::kE2M1 ? columns / 2 : columns; }

void check_rows(const char* op, const char* name, const QuantizedOperand& x, std::int64_t S, std::int64_t columns, Device device) {
  WB_CHECK(x.q.codes.rank == 2 && x.q.codes.shape[0] >= S && x.q.codes.shape[1] == code_columns(x, columns) && x.q.codes.device == device,
           "{}: codes of {} must be [{}, {}] on {}, got {}", op, name, S, code_columns(x, columns), to_string(device), x.q.codes.describe());
}

// L from offsets, S and the widths from the wide tensors.
GroupedShape shape_of(const char* op, const TensorView& offsets, const TensorView& out, std::int64_t N, std::int64_t C) {
  WB_CHECK(offsets.rank == 1 && offsets.shape[0] >= 1 && offsets.dtype == DType::kI32 && offsets.device == out.device,
           "{}: offsets must be int32 [L + 1] on {}, got {}", op, to_string(out.device), offsets.describe());
  GroupedShape shape;
  shape.L = offsets.shape[0] - 1, shape.N = N, shape.C = C;
  return shape;
}

void check_out(const char* op, const char* name, const TensorView& out, int rank, bool accumulate) {
  WB_CHECK(out.rank == rank && (out.dtype == DType::kF32 || out.dtype == DType::kBF16) && out.is_contiguous(),
           "{}: {} must be contiguous f32 or bf16 with {} dimensions, got {}", op, name, rank, out.describe());
  WB_CHECK(!accumulate || out.dtype == DType::kF32, "{}: accumulating into {} needs f32, got {}", op, name, out.describe());
}

std::int64_t width_of(const QuantizedOperand& x) {
  const TensorView& v = x.q.codes ? x.q.codes : x.q.turned;
  WB_CHECK(v.rank >= 2, "quantized_gemm: an operand has neither codes nor turned codes");
  return v.shape[1] * (x.config.element == ElementFormat::kE2M1 ? 2 : 1);
}

GroupedShape check(const QuantizedGemmArgs& args) {
  const char* op = "quantized_gemm";
  check_out(op, "y", args.y, 2, args.accumulate);
  GroupedShape shape = shape_of(op, args.offsets, args.y, args.y.shape[1], width_of(args.a));
  shape.S = args.y.shape[0];
  check_rows(op, "a", args.a, shape.S, shape.C, args.y.device);
  const bool lnc = args.layout == WeightLayout::kLNC;
  WB_CHECK(width_of(args.weights) == (lnc ? shape.C : shape.N), "{}: the weights have {} columns, wanted {} = {}", op, width_of(args.weights), lnc ? "C" : "N",
           lnc ? shape.C : shape.N);
  WB_CHECK(!args.bias || (args.bias.dtype == DType::kF32 && args.bias.rank == 2 && args.bias.shape[0] == shape.L && args.bias.shape[1] == shape.N),
           "{}: bias must be f32 [{}, {}], got {}", op, shape.L, shape.N, args.bias.describe());
  return shape;
}

GroupedShape check(const QuantizedDgradArgs& args) {
  const char* op = "quantized_gemm_dgrad";
  check_out(op, "da", args.da, 2, args.accumulate);
  GroupedShape shape = shape_of(op, args.offsets, args.da, width_of(args.dy), args.da.shape[1]);
  shape.S = args.da.shape[0];
  check_rows(op, "dy", args.dy, shape.S, shape.N, args.da.device);
  const bool lnc = args.layout == WeightLayout::kLNC;
  WB_CHECK(width_of(args.weights) == (lnc ? shape.C : shape.N), "{}: the weights have {} columns, wanted {} = {}", op, width_of(args.weights), lnc ? "C" : "N",
           lnc ? shape.C : shape.N);
  return shape;
}

GroupedShape check(const QuantizedWgradArgs& args) {
  const char* op = "quantized_gemm_wgrad";
  check_out(op, "d_weights", args.d_weights, 3, args.accumulate);
  const bool lnc = args.layout == WeightLayout::kLNC;
  GroupedShape shape = shape_of(op, args.offsets, args.d_weights, args.d_weights.shape[lnc ? 1 : 2], args.d_weights.shape[lnc ? 2 : 1]);
  WB_CHECK(args.d_weights.shape[0] == shape.L, "{}: d_weights has {} groups, offsets {}", op, args.d_weights.shape[0], shape.L);
  WB_CHECK(width_of(args.dy) == shape.N && width_of(args.a) == shape.C, "{}: dy and a have {} and {} columns, d_weights wants N = {} and C = {}", op,
           width_of(args.dy), width_of(args.a), shape.N, shape.C);
  // Turned codes alone tell the blocks, not the rows.
  shape.S = args.dy.q.codes && args.a.q.codes
                ? std::min(args.dy.q.codes.shape[0], args.a.q.codes.shape[0])
                : std::max(args.dy.q.turned ? args.dy.q.turned.shape[0] : 0, args.a.q.turned ? args.a.q.turned.shape[0] : 0) * 128;
  return shape;
}

// --- CPU: through fp32 ---
Tensor widened(const QuantizedOperand& x, const TensorView& offsets, std::int64_t rows, std::int64_t columns) {
  WB_CHECK(static_cast<bool>(x.q.codes), "quantized_gemm: the CPU reads codes, not turned codes");
  Tensor wide = Tensor::zeros(DType::kF32, {rows, columns});
  dequantize(x.config, x.q, offsets, wide);
  return wide;
}

Tensor widened_weights(const QuantizedOperand& w, std::int64_t L, std::int64_t outer, std::int64_t inner) {
  Tensor firsts(DType::kI32, {L + 1});
  for (std::int64_t g = 0; g <= L; ++g) firsts.as<std::int32_t>()[g] = static_cast<std::int32_t>(g * outer);
  return widened(w, firsts, L * outer, inner);
}

TensorView as_weights(const Tensor& wide, std::int64_t L, std::int64_t outer, std::int64_t inner) {
  return TensorView::of(wide.as<float>(), {L, outer, inner});
}

const detail::QuantizedBackend& backend(const TensorView& out, Stream stream) {
  if (detail::g_quantized_backend == nullptr) WB_FAIL(ErrorCode::kUnsupported, "quantized_gemm: no CUDA backend is linked");
  WB_CHECK(stream.device == out.device, "quantized_gemm: the stream is on {}, the tensors are on {}", to_string(stream.device), to_string(out.device));
  return *detail::g_quantized_backend;
}

}  // namespace

void quantized_gemm(const QuantizedGemmArgs& args, Stream stream) {
  const GroupedShape s = check(args);
  if (args.y.device.type != DeviceType::kCpu) return backend(args.y, stream).forward(args, s, stream);
  const bool lnc = args.layout == WeightLayout::kLNC;
  const Tensor w = widened_weights(args.weights, s.L, lnc ? s.N : s.C, lnc ? s.C : s.N);
  const Tensor a = widened(args.a, args.offsets, s.S, s.C);
  GroupedGemmArgs wide;
  wide.a = a, wide.weights = as_weights(w, s.L, lnc ? s.N : s.C, lnc ? s.C : s.N), wide.offsets = args.offsets, wide.y = args.y;
  wide.layout = args.layout, wide.bias = args.bias, wide.accumulate = args.accumulate;
  grouped_gemm(wide, stream);
}

void quantized_gemm_dgrad(const QuantizedDgradArgs& args, Stream stream) {
  const GroupedShape s = check(args);
  if (args.da.device.type != DeviceType::kCpu) return backend(args.da, stream).dgrad(args, s, stream);
  const bool lnc = args.layout == WeightLayout::kLNC;
  const Tensor w = widened_weights(args.weights, s.L, lnc ? s.N : s.C, lnc ? s.C : s.N);
  const Tensor dy = widened(args.dy, args.offsets, s.S, s.N);
  GroupedGemmDgradArgs wide;
  wide.dy = dy, wide.weights = as_weights(w, s.L, lnc ? s.N : s.C, lnc ? s.C : s.N), wide.offsets = args.offsets, wide.da = args.da;
  wide.layout = args.layout, wide.accumulate = args.accumulate;
  grouped_gemm_dgrad(wide, stream);
}

void quantized_gemm_wgrad(const QuantizedWgradArgs& args, Stream stream) {
  const GroupedShape s = check(args);
  if (args.d_weights.device.type != DeviceType::kCpu) return backend(args.d_weights, stream).wgrad(args, s, stream);
  const Tensor dy = widened(args.dy, args.offsets, s.S, s.N), a = widened(args.a, args.offsets, s.S, s.C);
  GroupedGemmWgradArgs wide;
  wide.a = a, wide.dy = dy, wide.offsets = args.offsets, wide.d_weights = args.d_weights, wide.layout = args.layout, wide.accumulate = args.accumulate;
  grouped_gemm_wgrad(wide, stream);
}

std::size_t quantized_gemm_workspace(const QuantizedGemmArgs& args) {
  const GroupedShape s = check(args);
  if (args.y.device.type == DeviceType::kCpu || detail::is_fp8_product(args.a.config, args.weights.config)) return 0;
  return detail::plan_wide(s.S, s.C, s.L, s.N * s.C).bytes;
}
std::size_t quantized_gemm_workspace(const QuantizedDgradArgs& args) {
  const GroupedShape s = check(args);
  if (args.da.device.type == DeviceType::kCpu || detail::is_fp8_product(args.dy.config, args.weights.config)) return 0;
  return detail::plan_wide(s.S, s.N, s.L, s.N * s.C).bytes;
}
std::size_t quantized_gemm_workspace(const QuantizedWgradArgs& args) {
  const GroupedShape s = check(args);
  if (args.d_weights.device.type == DeviceType::kCpu || detail::is_fp8_wgrad(args.a.config, args.dy.config)) return 0;
  return detail::plan_wide_wgrad(s, detail::wgrad_step(args, s)).bytes;
}

}  // namespace waybill
