// SPDX-License-Identifier: Apache-2.0
// Largest magnitudes of groups to NVFP4's scales of groups, in place. A thread a group.
#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/quantize_params.h"

namespace waybill::cuda {
namespace {

__global__ void group_scales_finish(float* scales, int groups) {
  const int g = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (g >= groups) return;
  const float amax = scales[g], finite = __uint_as_float(min(__float_as_uint(amax), kLargestFloatBits));
  scales[g] = amax == 0 ? 1.0f : fminf(__fdiv_rn(448.0f * 6.0f, finite), __uint_as_float(kLargestFloatBits));
}

}  // namespace

void launch_group_scales_finish(float* group_scales, int groups, cudaStream_t stream) {
  group_scales_finish<<<static_cast<unsigned>((groups + 255) / 256), 256, 0, stream>>>(group_scales, groups);
}

}  // namespace waybill::cuda
