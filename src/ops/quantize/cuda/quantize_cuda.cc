// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize/cuda/quantize_cuda.h"

#include <fmt/format.h>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/quantize/cuda/quantize_activated_cuda.h"
#include "ops/quantize/cuda/quantize_views.h"
#include "ops/quantize/device_backend.h"

namespace waybill::cuda {
namespace {

using detail::QuantizeCall;

// Why the fast kernels cannot take one direction.
std::string refuse_config(const QuantConfig& c, const QuantizedView& out) {
  if (c.stochastic) return "rounds to nearest only";
  const bool is_row = c.block_rows == 1 && (c.block_columns == 32 || c.block_columns == 128);
  const bool is_column = (c.block_rows == 32 || c.block_rows == 128) && c.block_columns == 1, is_tile = c.block_rows == 128 && c.block_columns == 128;
  const bool is_nvfp4 = c.element == ElementFormat::kE2M1 && c.scale == ScaleFormat::kE4M3 && c.block_rows == 1 && c.block_columns == 16;
  if (!is_nvfp4 && !(is_fp8(c) && (is_row || is_column || is_tile))) {
    return fmt::format("takes 8-bit elements in blocks of 1 x 32, 1 x 128, 32 x 1, 128 x 1 and 128 x 128 and NVFP4 in 1 x 16, got blocks of {} x {}",
                       c.block_rows, c.block_columns);
  }
  if (c.block_rows == 1 && out.turned) return "turns codes of column blocks and tiles only";
  if (!is_aligned(out.codes, is_nvfp4 ? 4 : 8) || (out.turned && reinterpret_cast<std::uintptr_t>(out.turned.data) % 16 != 0)) {
    return "needs codes aligned to 8 bytes and turned codes to 16";
  }
  return {};
}

std::string refuse(const QuantizeCall& call, bool portable) {
  const TensorView& x = call.x;
  if (x.shape[0] > kMaxRows || x.shape[0] * ((x.shape[1] + kWarpColumns - 1) / kWarpColumns) > kMaxRows) {
    return fmt::format("takes {} rows times pieces of {} columns, got [{}, {}]", kMaxRows, kWarpColumns, x.shape[0], x.shape[1]);
  }
  if (portable) return {};
  const std::int64_t per_vector = x.dtype == DType::kBF16 ? 8 : 4;
  if (x.shape[1] % 8 != 0 || !is_aligned(x, per_vector) || reinterpret_cast<std::uintptr_t>(x.data) % 16 != 0) {
    return fmt::format("needs columns in eights and rows aligned to 16 bytes, got {}", x.describe());
  }
  if (std::string why = refuse_config(*call.config, *call.out); !why.empty()) return why;
  return call.columns != nullptr ? refuse_config(*call.columns, *call.columns_out) : std::string();
}

// What a kernel of one direction finds prepared.
void prepare(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  clear(out.swizzled, out.swizzled_bytes, stream);
  if (out.group_scales == nullptr) return;
  clear(out.group_scales, std::int64_t{4} * x.groups, stream);
  launch_group_scales(x, out.group_scales, stream);
  check_launch("group_scales");
}

void run_portable(const WideRows& x, const CodedRows& out, cudaStream_t stream) {
  clear(out.turned, out.turned_blocks * x.columns * 128, stream);
  launch_quantize_portable(x, out, stream);
  check_launch("quantize_portable");
}

void run(const QuantizeCall& call, bool portable) {
  const DeviceGuard guard(call.stream.device.index);
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  WideRows x = wide(call.x, call.offsets, call.status);
  x.list = static_cast<const std::int32_t*>(call.rows ? call.rows.data : nullptr);
  const CodedRows out = coded(*call.config, *call.out);
  prepare(x, out, stream);
  if (portable) {
    run_portable(x, out, stream);
    if (call.columns == nullptr) return;
    const CodedRows columns = coded(*call.columns, *call.columns_out);
    prepare(x, columns, stream);
    return run_portable(x, columns, stream);
  }
  if (call.columns == nullptr && out.block_rows == 1) {
    launch_quantize_rows(x, out, stream);
    return check_launch("quantize_rows");
  }
  const bool has_both = call.columns != nullptr;
  // Swizzled scales beside both directions: the rows by themselves.
  const bool together = has_both && out.swizzled == nullptr;
  if (has_both && !together) launch_quantize_rows(x, out, stream);
  launch_quantize_tiles(x, together ? out : CodedRows{}, has_both ? coded(*call.columns, *call.columns_out) : out, stream);
  check_launch("quantize_tiles");
}

void run_dequantize(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream, StatusWord* status) {
  WB_CHECK(config.block_rows == 1 || config.block_rows == 16 || config.block_rows == 32 || config.block_rows == 128,
           "dequantize: a GPU takes blocks of 1, 16, 32 or 128 rows, got {}", config.block_rows);
  WB_CHECK(y.shape[0] <= kMaxRows && y.shape[0] * ((y.shape[1] + kWarpColumns - 1) / kWarpColumns) <= kMaxRows,
           "dequantize: a GPU takes {} rows times pieces of {} columns, got {}", kMaxRows, kWarpColumns, y.describe());
  const DeviceGuard guard(stream.device.index);
  launch_dequantize(wide(y, offsets, status), coded(config, q), static_cast<cudaStream_t>(stream.native));
  check_launch("dequantize");
}

constexpr detail::QuantizeDeviceBackend kBackend = {refuse, run, run_dequantize, refuse_activated, run_activated};

}  // namespace

void register_quantize() { detail::g_quantize_device_backend = &kBackend; }

}  // namespace waybill::cuda
