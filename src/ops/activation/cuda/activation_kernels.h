// SPDX-License-Identifier: Apache-2.0
// Expert activations on the GPU, forward and backward, at the speed of memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

struct ActivationMatrix {
  void* data = nullptr;
  std::int64_t stride = 0;  // elements from row to row
  bool is_bf16 = false;
};

struct ActivationCall {
  int kind;  // ActivationKind
  float limit, alpha;
  std::int64_t rows, F;
  const std::int32_t* num_rows;  // in device memory: rows from *num_rows on are left alone; or null
  const float* weight;           // [rows] or null
  ActivationMatrix h, a;         // h [rows, 2F or F], a [rows, F]: forward's result, backward's gradient da
  ActivationMatrix dh;           // backward only
  float* d_weight;               // backward only, or null
};
void launch_activation_forward(const ActivationCall& call, int num_sms, cudaStream_t stream);
void launch_activation_backward(const ActivationCall& call, int num_sms, cudaStream_t stream);

}  // namespace waybill::cuda
