// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/cuda/quantize_activated_cuda.h"

#include <fmt/format.h>

#include "core/cuda/device_buffer.h"
#include "ops/quantize/cuda/activated_source.h"
#include "ops/quantize/cuda/quantize_views.h"

namespace waybill::cuda {
namespace {

using Call = detail::QuantizeActivatedCall;

std::int64_t width_of(const Call& call) { return call.x.h.shape[1] / activation_input_width(call.x.activation, 1); }
bool is_gated_gradient(const Call& call) { return call.x.da && call.x.activation.kind != Activation::kReluSquared; }

std::string refuse_direction(const Call& call, const QuantConfig& c, const QuantizedView& out) {
  if (c.stochastic) return "rounds to nearest only";
  const bool is_nvfp4 = c.element == ElementFormat::kE2M1 && c.scale == ScaleFormat::kE4M3 && c.block_rows == 1 && c.block_columns == 16;
  const std::int64_t block = std::max(c.block_rows, c.block_columns);
  const bool is_vector = std::min(c.block_rows, c.block_columns) == 1, is_fp8_block = (block == 32 && c.scale != ScaleFormat::kF32) || block == 128;
  if (!is_nvfp4 && !(is_fp8(c) && is_vector && is_fp8_block)) {
    return fmt::format("takes 8-bit elements in blocks of 1 x 32 and 32 x 1 (powers of two), 1 x 128 and 128 x 1 and NVFP4 in 1 x 16, got blocks of {} x {}",
                       c.block_rows, c.block_columns);
  }
  if (c.block_rows == 1 && out.turned) return "turns codes of column blocks only";
  if (!is_aligned(out.codes, is_nvfp4 ? 4 : 8) || (out.turned && reinterpret_cast<std::uintptr_t>(out.turned.data) % 16 != 0)) {
    return "needs codes aligned to 8 bytes and turned codes to 16";
  }
  if (is_gated_gradient(call) && c.block_rows == 1 && width_of(call) % block != 0) {
    return fmt::format("needs F in whole blocks of {} columns, got {}", block, width_of(call));
  }
  return {};
}

CodedRows tiles_of(const CodedRows& rows) { return rows.swizzled == nullptr ? rows : CodedRows{}; }

}  // namespace

std::string refuse_activated(const Call& call) {
  const std::int64_t S = call.values.shape[0], F = width_of(call);
  if (S > kMaxRows || S * ((call.values.shape[1] + kWarpColumns - 1) / kWarpColumns) > kMaxRows) {
    return fmt::format("takes {} rows times pieces of {} columns, got [{}, {}]", kMaxRows, kWarpColumns, S, call.values.shape[1]);
  }
  for (const TensorView& view : {call.x.h, call.x.da}) {
    if (!view) continue;
    if (view.dtype != DType::kBF16 || F % 8 != 0 || !is_aligned(view, 8) || reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) {
      return fmt::format("needs bf16 rows aligned to 16 bytes and F in eights, got {}", view.describe());
    }
  }
  const TensorView& sums = call.x.partial_sums;
  const std::int64_t num_sums = (F + 63) / 64;
  if (call.x.d_weight && !(sums && sums.rank == 2 && sums.shape[0] >= S && sums.shape[1] == num_sums && sums.is_contiguous() && sums.dtype == DType::kF32 &&
                           sums.device == call.x.h.device)) {
    return fmt::format("needs partial_sums, contiguous f32 [{}, {}] on {}, beside d_weight", S, num_sums, to_string(call.x.h.device));
  }
  if (std::string why = refuse_direction(call, *call.config, *call.out); !why.empty()) return why;
  return call.columns != nullptr ? refuse_direction(call, *call.columns, *call.columns_out) : std::string();
}

void run_activated(const Call& call) {
  const DeviceGuard guard(call.stream.device.index);
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  const ActivatedRows& x = call.x;
  ActivatedCall fused{};
  fused.x = wide(call.values, call.offsets, call.status), fused.is_gradient = static_cast<bool>(x.da);
  ActivatedSource& source = fused.source;
  source.kind = static_cast<int>(x.activation.kind), source.limit = x.activation.limit, source.alpha = x.activation.alpha;
  source.F = static_cast<int>(width_of(call)), source.h = static_cast<const std::uint16_t*>(x.h.data), source.h_stride = stride(x.h);
  source.weight = static_cast<const float*>(x.weight ? x.weight.data : nullptr);
  if (x.da) source.da = static_cast<const std::uint16_t*>(x.da.data), source.da_stride = stride(x.da);
  if (x.d_weight) source.partial_sums = static_cast<float*>(x.partial_sums.data), source.num_partials = (source.F + 63) / 64;
  const CodedRows out = coded(*call.config, *call.out);
  clear(out.swizzled, out.swizzled_bytes, stream);
  if (out.group_scales != nullptr) {
    clear(out.group_scales, std::int64_t{4} * fused.x.groups, stream);
    launch_activated_group_scales(fused, out.group_scales, stream);
    check_launch("activated_group_scales");
  }
  const bool rows_alone = out.block_rows == 1 && (call.columns == nullptr || out.swizzled != nullptr), has_tiles = call.columns != nullptr || !rows_alone;
  if (rows_alone) {
    fused.is_gradient ? launch_quantize_gradient_rows(fused, out, stream) : launch_quantize_activated_rows(fused, out, stream);
    check_launch(fused.is_gradient ? "quantize_gradient_rows" : "quantize_activated_rows");
  }
  if (has_tiles) {
    const CodedRows rows = call.columns != nullptr ? tiles_of(out) : CodedRows{},
                    columns = call.columns != nullptr ? coded(*call.columns, *call.columns_out) : out;
    fused.is_gradient ? launch_quantize_gradient_tiles(fused, rows, columns, stream) : launch_quantize_activated_tiles(fused, rows, columns, stream);
    check_launch(fused.is_gradient ? "quantize_gradient_tiles" : "quantize_activated_tiles");
  }
  if (x.d_weight) launch_weight_sums(fused, static_cast<float*>(x.d_weight.data), stream), check_launch("weight_sums");
}

}  // namespace waybill::cuda
