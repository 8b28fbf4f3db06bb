// SPDX-License-Identifier: Apache-2.0
// Device memory of the language model on GPUs, from its config alone; needs no GPU. Follows DevicePart and DeviceParameters, allocation by allocation.
#pragma once

#include "model/cuda/device_language_model.h"
#include "waybill/model_math.h"

namespace waybill::cuda {

// How MoE layers trade time for memory: slower and smaller one after the other (docs/perf/moe-memory.md). The same bits.
struct MoeForm {
  bool resend_rows = false;
  int column_blocks = 1;
};
// The fastest form with which the model fits options.memory by the prediction, else the smallest.
MoeForm choose_moe_form(const ModelConfig& config, int W, const DeviceModelOptions& options);
// What a layer takes of it: recipes of blocks and expert biases exclude blocks of columns.
DeviceMoeOptions moe_options(const MoeConfig& config, const MoeForm& form);

// Of the GPU that holds the first ranks, with the form that is chosen; all are alike.
GpuMemoryEstimate device_model_memory(const ModelConfig& config, int W, const DeviceModelOptions& options);

}  // namespace waybill::cuda
