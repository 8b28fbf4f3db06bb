// SPDX-License-Identifier: Apache-2.0
// Recipes and argument checks. On the CPU the block loops are the reference ones: this op is the oracle of the GPU kernels.
#include <algorithm>
#include <cstring>

#include "core/implementation.h"
#include "ops/quantize/device_backend.h"
#include "ops/quantize/quantize_ref.h"
#include "waybill/quantize_gathered.h"

namespace waybill {

QuantConfig mxfp8_rows(ElementFormat element, ScaleRule rule) { return {element, ScaleFormat::kE8M0, rule, 1, 32}; }
QuantConfig mxfp8_columns(ElementFormat element, ScaleRule rule) { return {element, ScaleFormat::kE8M0, rule, 32, 1}; }
QuantConfig fp8_rows(ScaleFormat scale) { return {ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 1, 128}; }
QuantConfig fp8_tiles(ScaleFormat scale) { return {ElementFormat::kE4M3, scale, ScaleRule::kRoundUp, 128, 128}; }
QuantConfig nvfp4_rows() { return {ElementFormat::kE2M1, ScaleFormat::kE4M3, ScaleRule::kRoundUp, 1, 16}; }

void validate(const QuantConfig& config) {
  WB_CHECK(static_cast<int>(config.element) <= 2, "quantize: unknown element format {}", static_cast<int>(config.element));
  WB_CHECK(static_cast<int>(config.scale) <= 3, "quantize: unknown scale format {}", static_cast<int>(config.scale));
  WB_CHECK(static_cast<int>(config.rule) <= 1, "quantize: unknown scale rule {}", static_cast<int>(config.rule));
  WB_CHECK(config.block_rows >= 1 && config.block_columns >= 1, "quantize: a block must have rows and columns, got {} x {}", config.block_rows,
           config.block_columns);
}

void check_block_fit(const QuantConfig& config, const char* dimension, std::int64_t value) {
  const bool needs_whole_blocks = config.scale == ScaleFormat::kE8M0 || config.scale == ScaleFormat::kE4M3;
  const char* format = config.scale == ScaleFormat::kE4M3 ? "NVFP4" : "MXFP8";
  WB_CHECK(!needs_whole_blocks || value % config.block_columns == 0, "{} = {} does not fit {}: it must be a multiple of {} ({} mod {} = {})", dimension, value,
           format, config.block_columns, value, config.block_columns, value % config.block_columns);
  WB_CHECK(config.element != ElementFormat::kE2M1 || value % 2 == 0, "{} = {} does not fit 4-bit elements: it must be even", dimension, value);
}

std::vector<std::int64_t> block_row_offsets(const TensorView& offsets, std::int64_t block_rows) {
  WB_CHECK(offsets.rank == 1 && offsets.shape[0] >= 1, "offsets must be [L + 1], got {}", offsets.describe());
  WB_CHECK(block_rows >= 1, "a block must have rows, got {}", block_rows);
  const std::int32_t* values = offsets.as<std::int32_t>();
  std::vector<std::int64_t> first{0};
  for (std::int64_t g = 0; g + 1 < offsets.shape[0]; ++g) {
    WB_CHECK(values[g + 1] >= values[g], "offsets decrease at group {}: {} then {}", g, values[g], values[g + 1]);
    first.push_back(first.back() + (static_cast<std::int64_t>(values[g + 1]) - values[g] + block_rows - 1) / block_rows);
  }
  return first;
}

std::int64_t max_block_rows(std::int64_t S, std::int64_t L, std::int64_t block_rows) {
  WB_CHECK(S >= 0 && L >= 0 && block_rows >= 1, "max_block_rows: S {}, L {} and block_rows {} must not be negative, blocks have rows", S, L, block_rows);
  return (S + std::min(L, S) * (block_rows - 1)) / block_rows;
}

namespace detail {

const QuantizeDeviceBackend* g_quantize_device_backend = nullptr;

}  // namespace detail

namespace {

constexpr std::int64_t kTurnedRows = 128, kMaxDeviceGroups = 4096;

void check_matrix(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns, Device device, bool any_stride = false) {
  WB_CHECK(view.rank == 2 && view.shape[0] >= rows && view.shape[1] == columns, "quantize: {} must be [{}, {}], got {}", name, rows, columns, view.describe());
  WB_CHECK(view.device == device, "quantize: {} is not on {}: {}", name, to_string(device), view.describe());
  WB_CHECK(any_stride || columns <= 1 || view.stride[1] == 1, "quantize: the columns of {} must be adjacent, got stride {}", name, view.stride[1]);
  WB_CHECK(view.data != nullptr || view.size() == 0, "quantize: {} has no memory: {}", name, view.describe());
}

bool is_code_dtype(ElementFormat element, DType dtype) {
  return dtype == DType::kU8 || (element == ElementFormat::kE4M3 && dtype == DType::kF8E4M3) || (element == ElementFormat::kE5M2 && dtype == DType::kF8E5M2);
}

bool is_scale_dtype(ScaleFormat scale, DType dtype) {
  switch (scale) {
    case ScaleFormat::kE8M0:
      return dtype == DType::kU8;
    case ScaleFormat::kE4M3:
      return dtype == DType::kU8 || dtype == DType::kF8E4M3;
    case ScaleFormat::kPowerOfTwo:
    case ScaleFormat::kF32:
      break;
  }
  return dtype == DType::kF32;
}

// What is known of the groups: their number, rows and blocks. On a device the values of offsets are not: zeros stand for them.
struct Groups {
  std::int64_t L = 1, rows, blocks, turned_blocks;
};

Groups groups_of(const QuantConfig& config, const TensorView& wide, const TensorView& offsets) {
  const std::int64_t S = wide.shape[0];
  if (!offsets) return {1, S, (S + config.block_rows - 1) / config.block_rows, (S + kTurnedRows - 1) / kTurnedRows};
  if (wide.device.type != DeviceType::kCpu) {
    WB_CHECK(offsets.rank == 1 && offsets.shape[0] >= 1 && offsets.dtype == DType::kI32 && offsets.device == wide.device,
             "quantize: offsets must be int32 [L + 1] on {}, got {}", to_string(wide.device), offsets.describe());
    WB_CHECK(offsets.shape[0] - 1 <= kMaxDeviceGroups, "quantize: a GPU takes {} groups, got {}", kMaxDeviceGroups, offsets.shape[0] - 1);
    return {offsets.shape[0] - 1, 0, 0, 0};
  }
  const std::vector<std::int64_t> first = block_row_offsets(offsets, config.block_rows);
  const std::int64_t L = offsets.shape[0] - 1;
  const std::int32_t* values = offsets.as<std::int32_t>();
  WB_CHECK(values[0] == 0, "quantize: offsets[0] must be 0, got {}", values[0]);
  WB_CHECK(values[L] <= S, "quantize: offsets[{}] = {} exceeds the {} rows", L, values[L], S);
  return {L, values[L], first.back(), block_row_offsets(offsets, kTurnedRows).back()};
}

void check_turned(const QuantConfig& config, const TensorView& turned, std::int64_t C, std::int64_t blocks, Device device) {
  WB_CHECK(config.element != ElementFormat::kE2M1, "quantize: turned codes have 8 bits, E2M1 has 4");
  WB_CHECK(turned.rank == 3 && turned.shape[0] >= blocks && turned.shape[1] == C && turned.shape[2] == kTurnedRows && turned.is_contiguous(),
           "quantize: turned must be contiguous [{}, {}, {}], got {}", blocks, C, kTurnedRows, turned.describe());
  WB_CHECK(is_code_dtype(config.element, turned.dtype) && turned.device == device, "quantize: turned has the wrong type or device: {}", turned.describe());
}

void check_swizzled(const QuantConfig& config, const TensorView& swizzled, Device device) {
  WB_CHECK(config.block_rows == 1 && config.scale != ScaleFormat::kPowerOfTwo && config.scale != ScaleFormat::kF32,
           "quantize: swizzled scales are bytes of blocks within a row, got blocks of {} x {}", config.block_rows, config.block_columns);
  WB_CHECK(swizzled.rank == 1 && swizzled.dtype == DType::kU8 && swizzled.is_contiguous() && swizzled.device == device,
           "quantize: swizzled must be contiguous u8 [bytes], got {}", swizzled.describe());
}

void check(const QuantConfig& config, const TensorView& wide, const TensorView& offsets, const QuantizedView& q, bool writes) {
  validate(config);
  WB_CHECK(wide.rank == 2, "quantize: the tensor must be [S, C], got {}", wide.describe());
  const std::int64_t S = wide.shape[0], C = wide.shape[1];
  const Device device = wide.device;
  check_matrix("the tensor", wide, S, C, device);
  WB_CHECK(wide.dtype == DType::kF32 || wide.dtype == DType::kBF16, "quantize: the tensor must be f32 or bf16, got {}", wide.describe());
  check_block_fit(config, "C (columns)", C);
  const Groups groups = groups_of(config, wide, offsets);
  if (q.codes || !q.turned || !writes) {
    // On a device the rows that are written are not known: codes must hold all.
    check_matrix("codes", q.codes, device.type == DeviceType::kCpu ? groups.rows : S, config.element == ElementFormat::kE2M1 ? C / 2 : C, device);
    WB_CHECK(is_code_dtype(config.element, q.codes.dtype), "quantize: codes have the wrong type: {}", q.codes.describe());
  }
  check_matrix("scales", q.scales, groups.blocks, (C + config.block_columns - 1) / config.block_columns, device, true);
  WB_CHECK(is_scale_dtype(config.scale, q.scales.dtype), "quantize: scales have the wrong type: {}", q.scales.describe());
  if (config.scale == ScaleFormat::kE4M3) {
    WB_CHECK(q.group_scales.rank == 1 && q.group_scales.shape[0] == groups.L && q.group_scales.dtype == DType::kF32 && q.group_scales.device == device,
             "quantize: group_scales must be f32 [{}] on {}, got {}", groups.L, to_string(device), q.group_scales.describe());
  }
  if (q.turned) check_turned(config, q.turned, C, groups.turned_blocks, device);
  if (!q.swizzled) return;
  check_swizzled(config, q.swizzled, device);
  WB_CHECK(q.scales.shape[1] <= 1 || q.scales.stride[1] == 1, "quantize: the columns of scales must be adjacent beside swizzled ones, got stride {}",
           q.scales.stride[1]);
}

// --- CPU: the further copies, from codes and scales ---
void turn_codes(const TensorView& codes, const TensorView& offsets, const TensorView& turned) {
  const std::int64_t S = codes.shape[0], C = codes.shape[1], L = offsets ? offsets.shape[0] - 1 : 1;
  auto* out = static_cast<std::uint8_t*>(turned.data);
  for (std::int64_t g = 0; g < L; ++g) {
    const std::int64_t begin = offsets ? offsets.as<std::int32_t>()[g] : 0, end = offsets ? offsets.as<std::int32_t>()[g + 1] : S;
    for (std::int64_t row = begin; row < end; row += kTurnedRows, out += C * kTurnedRows) {
      std::memset(out, 0, static_cast<std::size_t>(C * kTurnedRows));
      for (std::int64_t r = 0; r < std::min(kTurnedRows, end - row); ++r) {
        const auto* in = static_cast<const std::uint8_t*>(codes.data) + (row + r) * codes.stride[0];
        for (std::int64_t c = 0; c < C; ++c) out[c * kTurnedRows + r] = in[c];
      }
    }
  }
}

void quantize_cpu(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, ThreadPool* pool) {
  QuantizedView view = out;
  Tensor codes;
  if (!out.codes) {
    codes.resize(DType::kU8, {x.shape[0], x.shape[1]});
    view.codes = codes;
  }
  quantize_ref(config, x, offsets, view, pool);
  if (out.turned) turn_codes(view.codes, offsets, out.turned);
  if (!out.swizzled) return;
  Tensor all(DType::kI32, {2});
  all.as<std::int32_t>()[0] = 0, all.as<std::int32_t>()[1] = static_cast<std::int32_t>(x.shape[0]);
  const SwizzledLayout layout = swizzled_layout(offsets ? offsets : all.view(), out.scales.shape[1]);
  WB_CHECK(out.swizzled.shape[0] >= layout.byte_offsets.back(), "quantize: swizzled must hold {} bytes, got {}", layout.byte_offsets.back(),
           out.swizzled.describe());
  TensorView bytes = out.scales;
  bytes.dtype = DType::kU8;
  swizzle_scales(layout, bytes, static_cast<std::uint8_t*>(out.swizzled.data));
}

// --- GPU ---
using detail::QuantizeCall;

template <bool kPortable>
std::string refuse_device(const QuantizeCall& call) {
  if (detail::g_quantize_device_backend == nullptr) return "no CUDA backend is linked";
  return detail::g_quantize_device_backend->refuse(call, kPortable);
}
template <bool kPortable>
void run_device(const QuantizeCall& call) {
  detail::g_quantize_device_backend->run(call, kPortable);
}

void check_stream(const TensorView& x, Stream stream) {
  WB_CHECK(stream.device == x.device, "quantize: the stream is on {}, the tensors are on {}", to_string(stream.device), to_string(x.device));
}

void quantize_device(const QuantizeCall& call) {
  static constexpr Implementation<QuantizeCall> kList[] = {
      {"cuda", refuse_device<false>, run_device<false>},
      {"cuda_portable", refuse_device<true>, run_device<true>},
  };
  check_stream(call.x, call.stream);
  select_implementation("quantize", kList, call).run(call);
}

}  // namespace

namespace {

// x as the quantiser sees it: S rows, which a list finds.
TensorView as_listed(const TensorView& x, const TensorView& rows) {
  WB_CHECK(rows.rank == 1 && rows.dtype == DType::kI32 && rows.is_contiguous() && rows.device == x.device,
           "quantize: rows must be contiguous int32 [S] on {}, got {}", to_string(x.device), rows.describe());
  TensorView listed = x;
  listed.shape[0] = rows.shape[0];
  if (x.shape[0] <= 1) listed.stride[0] = x.shape[1];
  return listed;
}

// CPU.
Tensor gathered_rows(const TensorView& x, const TensorView& rows) {
  const std::int64_t S = rows.shape[0], C = x.shape[1];
  Tensor copy = Tensor::zeros(x.dtype, {S, C});
  const std::size_t element = size_bytes(x.dtype);
  for (std::int64_t s = 0; s < S; ++s) {
    const std::int32_t row = rows.as<std::int32_t>()[s];
    WB_CHECK(row >= -1 && row < x.shape[0], "quantize: rows[{}] = {} is outside [-1, {})", s, row, x.shape[0]);
    if (row < 0 || C == 0) continue;
    std::memcpy(static_cast<std::byte*>(copy.view().data) + static_cast<std::size_t>(s * C) * element,
                static_cast<const std::byte*>(x.data) + static_cast<std::size_t>(row * x.stride[0]) * element, static_cast<std::size_t>(C) * element);
  }
  return copy;
}

}  // namespace

namespace detail {

void check_quantize(const QuantConfig& config, const TensorView& wide, const TensorView& offsets, const QuantizedView& out) {
  check(config, wide, offsets, out, true);
}

void check_quantize_both(const QuantConfig& rows, const QuantConfig& columns) {
  WB_CHECK(rows.block_rows == 1 && columns.block_columns == 1 && rows.block_columns == columns.block_rows && rows.element == columns.element &&
               rows.scale == columns.scale && rows.rule == columns.rule,
           "quantize_both: blocks of 1 x B and B x 1 of one format are quantized together, got {} x {} and {} x {}", rows.block_rows, rows.block_columns,
           columns.block_rows, columns.block_columns);
}

}  // namespace detail

void quantize_gathered(const QuantConfig& config, const TensorView& x, const TensorView& rows, const TensorView& offsets, const QuantizedView& out,
                       Stream stream, StatusWord* status) {
  WB_CHECK(x.rank == 2, "quantize: the tensor must be [rows, C], got {}", x.describe());
  if (x.device.type == DeviceType::kCpu) return quantize(config, gathered_rows(x, rows), offsets, out, stream, status);
  const TensorView listed = as_listed(x, rows);
  check(config, listed, offsets, out, true);
  quantize_device({&config, &out, nullptr, nullptr, listed, offsets, stream, status, rows});
}

void quantize(const QuantConfig& config, const TensorView& x, const TensorView& offsets, const QuantizedView& out, Stream stream, StatusWord* status) {
  check(config, x, offsets, out, true);
  if (x.device.type == DeviceType::kCpu) return quantize_cpu(config, x, offsets, out, stream.pool);
  quantize_device({&config, &out, nullptr, nullptr, x, offsets, stream, status});
}

void quantize_both(const QuantConfig& rows, const QuantConfig& columns, const TensorView& x, const TensorView& offsets, const QuantizedView& rows_out,
                   const QuantizedView& columns_out, Stream stream, StatusWord* status) {
  detail::check_quantize_both(rows, columns);
  check(rows, x, offsets, rows_out, true);
  check(columns, x, offsets, columns_out, true);
  if (x.device.type != DeviceType::kCpu) return quantize_device({&rows, &rows_out, &columns, &columns_out, x, offsets, stream, status});
  quantize_cpu(rows, x, offsets, rows_out, stream.pool);
  quantize_cpu(columns, x, offsets, columns_out, stream.pool);
}

void quantize_both_gathered(const QuantConfig& rows, const QuantConfig& columns, const TensorView& x, const TensorView& list, const TensorView& offsets,
                            const QuantizedView& rows_out, const QuantizedView& columns_out, Stream stream, StatusWord* status) {
  WB_CHECK(x.rank == 2, "quantize: the tensor must be [rows, C], got {}", x.describe());
  if (x.device.type == DeviceType::kCpu) return quantize_both(rows, columns, gathered_rows(x, list), offsets, rows_out, columns_out, stream, status);
  detail::check_quantize_both(rows, columns);
  const TensorView listed = as_listed(x, list);
  check(rows, listed, offsets, rows_out, true);
  check(columns, listed, offsets, columns_out, true);
  quantize_device({&rows, &rows_out, &columns, &columns_out, listed, offsets, stream, status, list});
}

void dequantize(const QuantConfig& config, const QuantizedView& q, const TensorView& offsets, const TensorView& y, Stream stream, StatusWord* status) {
  check(config, y, offsets, q, false);
  if (y.device.type == DeviceType::kCpu) return dequantize_ref(config, q, offsets, y, stream.pool);
  if (detail::g_quantize_device_backend == nullptr) WB_FAIL(ErrorCode::kUnsupported, "dequantize: no CUDA backend is linked");
  check_stream(y, stream);
  detail::g_quantize_device_backend->dequantize(config, q, offsets, y, stream, status);
}

}  // namespace waybill
