// SPDX-License-Identifier: Apache-2.0
// A CTA a chunk. The order of operations is that of src/ops/optimizer/optimizer.cc, so are the bits. Bytes an element: 16 read, 14 written.
#include <cuda_bf16.h>

#include "ops/optimizer/cuda/optimizer_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) adamw(const AdamW c) {
  const UpdateState s = *c.state;
  if (s.valid == 0) return;
  const OptimizerChunk chunk = c.chunks[blockIdx.x];
  const float one_minus_beta1 = 1 - c.beta1, one_minus_beta2 = 1 - c.beta2, shrink = chunk.decay != 0 ? s.shrink : 0.0f;
  for (std::int64_t i = chunk.first + threadIdx.x; i < chunk.first + chunk.count; i += kThreads) {
    const float g = s.gradient_scale * c.grad[i];
    const float mi = c.beta1 * c.m[i] + one_minus_beta1 * g;
    const float vi = c.beta2 * c.v[i] + one_minus_beta2 * (g * g);
    c.m[i] = mi;
    c.v[i] = vi;
    const float update = s.step_size * mi / (sqrtf(vi * s.second_inverse) + c.epsilon);
    const float value = (c.value[i] - shrink * c.value[i]) - update;
    c.value[i] = value;
    static_cast<__nv_bfloat16*>(c.copy)[i] = __float2bfloat16_rn(value);
  }
}

}  // namespace

void launch_adamw(const AdamW& c, cudaStream_t stream) {
  if (c.num_chunks > 0) adamw<<<static_cast<unsigned>(c.num_chunks), kThreads, 0, stream>>>(c);
}

}  // namespace waybill::cuda
