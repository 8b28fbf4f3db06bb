// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "model/cuda/device_memory.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"
#include "train/cuda/device_trainer.h"
#include "train/select_device.h"

namespace waybill::cuda {
namespace {

// The first GPUs that can run the kernels of this build (sm_90).
int num_gpus() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  (void)cudaGetLastError();
  for (int major = 0; usable < count; ++usable) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, usable) != cudaSuccess || major != 9) break;
  }
  return usable;
}

void check(const RunConfig& config) { DeviceLanguageModel::check(config.model, config.parallel.W(), DeviceTrainer::model_options(config)); }

std::unique_ptr<StepTrainer> make(const RunConfig& config, Fabric& world, ThreadPool* pool) {
  register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
  return std::make_unique<DeviceTrainer>(config, world, pool);
}

GpuMemoryEstimate memory(const RunConfig& config, bool is_smallest) {
  DeviceModelOptions options = DeviceTrainer::model_options(config);
  options.memory = is_smallest ? 1 : 0;  // bytes that nothing fits
  return device_model_memory(config.model, config.parallel.W(), options);
}

constexpr detail::TrainDeviceBackend kBackend = {num_gpus, check, make, memory};

}  // namespace

void register_training() {
  // A thread a GPU (exchange/cuda/device_exchange.h). Read when CUDA starts, and only a default.
  setenv("CUDA_MODULE_LOADING", "LAZY", /*overwrite=*/0);
  detail::g_train_device_backend = &kBackend;
}

}  // namespace waybill::cuda
