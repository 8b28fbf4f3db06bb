// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/tensor_map.h"

#include <algorithm>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {
namespace {

// The driver's function, found through the runtime, so that nothing links to libcuda.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    WB_TRY_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || found == nullptr) WB_FAIL(ErrorCode::kUnsupported, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

struct Boxes {
  cuuint32_t rank;
  cuuint64_t extents[3], strides[2];
  cuuint32_t box[3];
  CUtensorMapSwizzle swizzle;
};

CUtensorMap encode(const char* name, CUtensorMapDataType type, const void* data, const Boxes& b) {
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(&map, type, b.rank, const_cast<void*>(data), b.extents, b.strides, b.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    WB_FAIL(ErrorCode::kCuda, "cuTensorMapEncodeTiled of {} [{}, {}, {}] failed with driver error {}", name, b.rank > 2 ? b.extents[2] : 1, b.extents[1],
            b.extents[0], static_cast<int>(result));
  }
  return map;
}

// An empty tensor is never loaded from, but every extent must be at least 1.
cuuint64_t at_least_1(std::int64_t value) { return static_cast<cuuint64_t>(std::max<std::int64_t>(value, 1)); }

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
  const auto bytes = static_cast<cuuint64_t>(size);
  return encode(name, map_type(dtype), data,
                {planes > 0 ? 3U : 2U,
                 {at_least_1(columns), at_least_1(rows), at_least_1(planes)},
                 {at_least_1(row_stride) * bytes, at_least_1(plane_stride) * bytes},
                 {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows), 1},
                 CU_TENSOR_MAP_SWIZZLE_128B});
}

CUtensorMap make_row_map(const char* name, const float* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride, int box_columns) {
  WB_CHECK(reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && row_stride % 4 == 0,
           "{} must be aligned to 16 bytes, rows too, got address {} and a distance of {}", name, fmt::ptr(data), row_stride);
  return encode(name, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data,
                {2,
                 {at_least_1(columns), at_least_1(rows), 1},
                 {at_least_1(row_stride) * 4, 0},
                 {static_cast<cuuint32_t>(box_columns), 1, 1},
                 CU_TENSOR_MAP_SWIZZLE_NONE});
}

}  // namespace waybill::cuda
