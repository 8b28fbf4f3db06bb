// SPDX-License-Identifier: Apache-2.0
// Tensors as the quantiser kernels take them.
#pragma once

#include "core/cuda/cuda_error.h"
#include "ops/quantize/cuda/quantize_params.h"
#include "waybill/quantize.h"

namespace waybill::cuda {

inline constexpr std::int64_t kMaxRows = std::int64_t{1} << 30, kWarpColumns = 256;

inline WideRows wide(const TensorView& x, const TensorView& offsets, StatusWord* status) {
  return {x.data,
          x.dtype == DType::kBF16,
          x.shape[0] > 1 ? x.stride[0] : x.shape[1],
          x.shape[0],
          static_cast<int>(x.shape[1]),
          static_cast<const std::int32_t*>(offsets ? offsets.data : nullptr),
          offsets ? static_cast<int>(offsets.shape[0] - 1) : 1,
          status};
}

inline std::uint8_t* bytes(const TensorView& view) { return static_cast<std::uint8_t*>(view ? view.data : nullptr); }
inline std::int64_t stride(const TensorView& view) { return !view ? 0 : (view.shape[0] > 1 ? view.stride[0] : view.shape[1]); }

inline CodedRows coded(const QuantConfig& c, const QuantizedView& q) {
  CodedRows out{};
  out.element = c.element, out.scale = c.scale, out.rule = c.rule;
  out.block_rows = static_cast<int>(c.block_rows), out.block_columns = static_cast<int>(c.block_columns);
  out.codes = bytes(q.codes), out.code_stride = stride(q.codes);
  out.scales = q.scales.data, out.scale_stride = q.scales.stride[0], out.scale_column_stride = q.scales.stride[1], out.scale_rows = q.scales.shape[0];
  out.group_scales = c.scale == ScaleFormat::kE4M3 ? static_cast<float*>(q.group_scales.data) : nullptr;
  out.turned = bytes(q.turned), out.turned_blocks = q.turned ? q.turned.shape[0] : 0;
  out.swizzled = bytes(q.swizzled), out.swizzled_bytes = q.swizzled ? q.swizzled.shape[0] : 0;
  out.stochastic = c.stochastic, out.seed = c.seed;
  return out;
}

inline bool is_fp8(const QuantConfig& c) { return c.element != ElementFormat::kE2M1 && c.scale != ScaleFormat::kE4M3; }
inline bool is_aligned(const TensorView& view, std::int64_t by) {
  return !view || (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(by) == 0 && stride(view) % by == 0);
}

inline void clear(void* data, std::int64_t size, cudaStream_t stream) {
  if (data != nullptr && size > 0) WB_TRY_CUDA(cudaMemsetAsync(data, 0, static_cast<std::size_t>(size), stream));
}

}  // namespace waybill::cuda
