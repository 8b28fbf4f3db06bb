// SPDX-License-Identifier: Apache-2.0
// The second matmul's bias, which is multiplied by the routing weight, and its gradients (see src/moe/second_bias.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// dy: the gradient of slot s at the second matmul's output is row s, or row rows[s] where a list is given (outside [0, list_rows): none).
struct SecondBias {
  const void* dy;  // bf16 [*, W]
  const std::int32_t* rows;
  std::int64_t list_rows;
  const std::int32_t* offsets;  // [L + 1], at most num_slots
  std::int64_t num_slots;
  const float* weight;  // [S] routing weights
  std::int64_t L, W;    // W a multiple of 8
};

// y [S, W] bf16 += weight * b2 of the slot's expert. dy and its list are not used.
void launch_second_bias_add(const SecondBias& args, const float* b2, void* y, cudaStream_t stream);

// d_b2 [L, W] (+)= sum over the expert's slots of weight * dy. Deterministic: the order of the sums depends on the expert's rows alone.
void launch_second_bias_sums(const SecondBias& args, float* d_b2, bool accumulate, cudaStream_t stream);

// d_weight [S] += <b2 of the slot's expert, dy>.   b2 [L, W] f32
void launch_second_bias_dots(const SecondBias& args, const float* b2, float* d_weight, cudaStream_t stream);

}  // namespace waybill::cuda
