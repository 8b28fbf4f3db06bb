// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/tensor_map.h"

#include <algorithm>

#include "core/cuda/driver_function.h"

namespace waybill::cuda {
namespace {

CUtensorMapDataType map_type(DType dtype) {
  if (dtype == DType::kBF16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return dtype == DType::kF32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

}  // namespace

CUtensorMap make_tensor_map(const char* name, DType dtype, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns, int box_rows) {
  return make_strided_tensor_map(name, dtype, data, planes, rows, columns, columns, std::max<std::int64_t>(rows, 1) * columns, box_rows);
}

CUtensorMap make_strided_tensor_map(const char* name, DType dtype, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns,
                                    std::int64_t row_stride, std::int64_t plane_stride, int box_rows) {
  WB_CHECK(reinterpret_cast<std::uintptr_t>(data) % 16 == 0, "{} must be aligned to 16 bytes, got address {}", name, fmt::ptr(data));
  const std::int64_t size = static_cast<std::int64_t>(size_bytes(dtype));
  WB_CHECK(columns * size % 16 == 0 && row_stride * size % 16 == 0, "rows of {} must be multiples of {} elements, got {} at a distance of {}", name, 16 / size,
           columns, row_stride);
  const cuuint32_t rank = planes > 0 ? 3 : 2;
  // An empty tensor is never loaded from, but every extent must be at least 1.
  const auto at_least_1 = [](std::int64_t value) { return static_cast<cuuint64_t>(std::max<std::int64_t>(value, 1)); };
  const cuuint64_t extents[3] = {at_least_1(columns), at_least_1(rows), at_least_1(planes)};
  const cuuint64_t strides[2] = {at_least_1(row_stride) * static_cast<cuuint64_t>(size), at_least_1(plane_stride) * static_cast<cuuint64_t>(size)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  static const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  const CUresult result = encode(&map, map_type(dtype), rank, const_cast<void*>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    WB_FAIL(ErrorCode::kCuda, "cuTensorMapEncodeTiled of {} [{}, {}, {}] failed: {}", name, planes, rows, columns, driver_error_text(result));
  }
  return map;
}

}  // namespace waybill::cuda
