// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the copy engine needs to know about a tensor to load boxes of it. Made on the host, passed to kernels by value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "waybill/dtype.h"

namespace waybill::cuda {

// A map over bf16, f32 or bytes (u8, f8) [planes, rows, columns], contiguous (2 dimensions where planes is 0), whose boxes of box_rows rows of 128 bytes lie in
// shared memory in the 128-byte swizzle; elements outside the tensor arrive as 0 and are not stored.
// data must be aligned to 16 bytes and rows be a multiple of 16 bytes: kInvalidArgument naming `name` otherwise.
CUtensorMap make_tensor_map(const char* name, DType dtype, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns, int box_rows);
// The same with rows and planes at any distance, in elements (multiples of 16 bytes): planes may be blocks of columns side by side.
CUtensorMap make_strided_tensor_map(const char* name, DType dtype, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns,
                                    std::int64_t row_stride, std::int64_t plane_stride, int box_rows);
// A map over f32 [rows, columns], rows row_stride elements apart, whose boxes of one row by box_columns columns (256 at most) lie in shared memory as they are;
// a box must start at a multiple of 4 columns.
CUtensorMap make_row_map(const char* name, const float* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride, int box_columns);

}  // namespace waybill::cuda
