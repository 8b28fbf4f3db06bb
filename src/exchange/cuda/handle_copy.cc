// SPDX-License-Identifier: Apache-2.0
// Plans in memory of the caller's.
#include "core/cuda/cuda_error.h"
#include "exchange/cuda/device_exchange.h"

namespace waybill::cuda {

void DeviceExchange::save(const DeviceHandle& handle, void* to, cudaStream_t stream) const {
  WB_CHECK(num_ranks() == 1 && handle.memory_.size() == 1, "save: a handle of {} ranks, in a launch of {}; one rank is needed", handle.memory_.size(),
           num_ranks());
  WB_TRY_CUDA(cudaMemcpyAsync(to, handle.memory_[0].data(), handle_bytes_, cudaMemcpyDeviceToDevice, stream));
}

void DeviceExchange::restore(DeviceHandle& handle, const void* from, std::int64_t T, cudaStream_t stream) const {
  WB_CHECK(num_ranks() == 1 && handle.memory_.size() == 1, "restore: a handle of {} ranks, in a launch of {}; one rank is needed", handle.memory_.size(),
           num_ranks());
  handle.T_[0] = T;
  WB_TRY_CUDA(cudaMemcpyAsync(handle.memory_[0].data(), from, handle_bytes_, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace waybill::cuda
