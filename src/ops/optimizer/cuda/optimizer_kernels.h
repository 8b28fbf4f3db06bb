// SPDX-License-Identifier: Apache-2.0
// AdamW on the GPU, exactly as src/ops/optimizer: fp32 values, gradients and moments, and bf16 working copies of the values. What decides about an update
// (budgets held, loss and gradient norm finite) is decided on the device: an invalid step changes nothing, and no host waits for it.
//
//   launch_sum_squares -> launch_decide_update -> launch_adamw
// All parameters of a device lie in arrays of one layout (value, grad, m, v, copy): an element has the same index in each. Chunks cut the trainable ones
// into pieces of one unit each: a unit is a replicated parameter or one expert of one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace waybill::cuda {

inline constexpr int kMaxUpdateDevices = 8;
inline constexpr std::int32_t kOptimizerChunk = 4096;  // most elements of a chunk

struct OptimizerChunk {
  std::int64_t first;
  std::int32_t count, unit;
  std::int32_t decay, unused;
};

// Squares of the gradients' elements, in double and in a fixed order: chunk_squares [num_chunks], then squares[u] for every unit of units [num_units]
// with its chunks [unit_begin[i], unit_begin[i + 1]). squares is indexed by the unit's number over all devices.
struct SumSquares {
  const OptimizerChunk* chunks;
  std::int64_t num_chunks;
  const float* grad;
  double* chunk_squares;
  const std::int64_t* unit_begin;  // [num_units + 1]
  const std::int32_t* units;       // [num_units]
  std::int64_t num_units;
  double* squares;
};
void launch_sum_squares(const SumSquares& call, cudaStream_t stream);

// In device memory. What a step came to, and the count of updates.
struct UpdateState {
  std::int64_t updates;       // so far
  std::int32_t valid;         // 1: this step is applied
  std::int32_t budgets_held;  // 0: a receive budget was exceeded
  double loss, norm, clip_scale;
  float step_size, second_inverse, shrink, gradient_scale;
};

struct DecideUpdate {
  float beta1, beta2, weight_decay, learning_rate;
  double clip_norm;
  const std::uint8_t* owner;  // [all_units] the device whose `squares` counts; own = this device's index among the devices
  const double* squares[kMaxUpdateDevices];
  std::int64_t all_units;
  const double* loss_sums[kMaxUpdateDevices];
  int num_devices;
  double loss_scale;              // loss = loss_scale * sum of loss_sums
  const std::int32_t* overflows;  // of this device's layers and micro-batches; 0 = every budget held. The same verdict on all devices
  UpdateState* state;
};
void launch_decide_update(const DecideUpdate& call, cudaStream_t stream);

struct AdamW {
  const OptimizerChunk* chunks;
  std::int64_t num_chunks;
  float *value, *m, *v;
  const float* grad;
  void* copy;  // bf16
  float beta1, beta2, epsilon;
  const UpdateState* state;
};
void launch_adamw(const AdamW& call, cudaStream_t stream);

}  // namespace waybill::cuda
