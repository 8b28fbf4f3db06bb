// SPDX-License-Identifier: Apache-2.0
// Device memory of the language model on GPUs, from its config alone; needs no GPU. Follows DevicePart and DeviceParameters, allocation by allocation.
#pragma once

#include "model/cuda/device_language_model.h"
#include "waybill/model_math.h"

namespace waybill::cuda {

// Of the GPU that holds the first ranks; all are alike.
GpuMemoryEstimate device_model_memory(const ModelConfig& config, int W, const DeviceModelOptions& options);

}  // namespace waybill::cuda
