// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/status_device.h"

#include <type_traits>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

static_assert(std::is_trivially_copyable_v<StatusWord>);

DeviceStatus::DeviceStatus(int device) : memory_(sizeof(StatusWord), device) {
  const DeviceGuard guard(device);
  clear(nullptr);
  WB_TRY_CUDA(cudaStreamSynchronize(nullptr));  // other streams do not wait for this one
}

void DeviceStatus::clear(cudaStream_t stream) const {
  static const StatusWord kClear{};
  memory_.upload(&kClear, sizeof(kClear), stream);
}

StatusWord DeviceStatus::read(cudaStream_t stream) const {
  StatusWord word;
  memory_.download(&word, sizeof(word), stream);
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
  return word;
}

}  // namespace waybill::cuda
