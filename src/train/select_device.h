// SPDX-License-Identifier: Apache-2.0
// CPU or GPU for a run, and where training on GPUs plugs in without a CUDA header here: its library sets the pointer once, before the first run.
#pragma once

#include <memory>

#include "step_trainer.h"
#include "waybill/fabric.h"
#include "waybill/trainer.h"

namespace waybill {

// What train.device comes to. kCuda that cannot be is refused, saying why; kAuto logs why a GPU that is there is not used.
bool choose_gpu(const RunConfig& config, const TrainOptions& options);

namespace detail {

struct TrainDeviceBackend {
  int (*num_gpus)();
  void (*check)(const RunConfig& config);  // throws kUnsupported, by name, what GPUs cannot train
  // All ranks of the run; world is a group of one.
  std::unique_ptr<StepTrainer> (*make)(const RunConfig& config, Fabric& world, ThreadPool* pool);
  GpuMemoryEstimate (*memory)(const RunConfig& config, bool is_smallest);
};
extern const TrainDeviceBackend* g_train_device_backend;

}  // namespace detail
}  // namespace waybill
