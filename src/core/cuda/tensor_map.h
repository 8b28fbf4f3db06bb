// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the copy engine needs to know about a tensor to load boxes of it. Made on the host, passed to kernels by value.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace waybill::cuda {

// A map over bf16 [planes, rows, columns], contiguous (2 dimensions where planes is 0), whose boxes of box_rows x 64 elements arrive in
// shared memory as rows of 128 bytes in the 128-byte swizzle; elements outside the tensor arrive as 0.
// data must be aligned to 16 bytes and columns a multiple of 8: kInvalidArgument naming `name` otherwise.
CUtensorMap make_tensor_map_bf16(const char* name, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns, int box_rows);

}  // namespace waybill::cuda
