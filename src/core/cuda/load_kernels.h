// SPDX-License-Identifier: Apache-2.0
// Kernels loaded before they are needed.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace waybill::cuda {

// Captures what `body` queues on `stream` and drops it: nothing runs, but every kernel of it is loaded onto the current device, and scratch and matmul plans of
// the stream exist afterwards. A kernel that is loaded at its first launch may wait for what the device runs, and that may be a kernel which waits for another
// GPU. Pointers that body hands to kernels are not read. body may allocate, but not wait. The stream may not be the legacy default stream, nor be capturing. A
// throw inside body ends the capture and is passed on.
void load_kernels(cudaStream_t stream, const std::function<void()>& body);

}  // namespace waybill::cuda
