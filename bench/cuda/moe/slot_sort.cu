// SPDX-License-Identifier: Apache-2.0
// Routes in expert order by CUB's radix sort.
#include <cub/device/device_radix_sort.cuh>

#include "bench/cuda/moe/slot_kernels.h"

namespace waybill::cuda::moe_bench {
namespace {

__global__ void iota(std::int32_t* numbers, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) numbers[i] = static_cast<std::int32_t>(i);
}

}  // namespace

void sort_routes(const std::int16_t* ids, std::uint16_t* sorted, const std::int32_t* numbers, std::int32_t* order, std::int64_t count, int end_bit, void* temp,
                 std::size_t& temp_bytes, cudaStream_t stream) {
  // As unsigned keys -1 is the largest.
  (void)cub::DeviceRadixSort::SortPairs(temp, temp_bytes, reinterpret_cast<const std::uint16_t*>(ids), sorted, numbers, order, static_cast<int>(count), 0,
                                        end_bit, stream);
}

void launch_iota(std::int32_t* numbers, std::int64_t count, cudaStream_t stream) {
  if (count > 0) iota<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(numbers, count);
}

}  // namespace waybill::cuda::moe_bench
