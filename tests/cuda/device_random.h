// SPDX-License-Identifier: Apache-2.0
// Random data made on the device: tests and benchmarks of large tensors would wait for the host otherwise.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "waybill/dtype.h"

namespace waybill::cuda {

// count normal values (mean 0, deviation `scale`) as f32, bf16 or f16; element i depends on (seed, i) only.
void fill_normal(void* data, DType dtype, std::size_t count, std::uint64_t seed, float scale, cudaStream_t stream);

}  // namespace waybill::cuda
