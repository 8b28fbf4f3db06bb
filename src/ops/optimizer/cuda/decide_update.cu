// SPDX-License-Identifier: Apache-2.0
// One CTA: gradient norm, verdict, clip factor and bias corrections, all in double. Every device computes the same bits.
#include "core/cuda/block_sum.cuh"
#include "ops/optimizer/cuda/optimizer_kernels.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

__device__ double power(double base, std::int64_t exponent) {  // fewer than 1 ulp a factor off, 64 factors at most
  double result = 1.0;
  for (; exponent > 0; exponent /= 2, base *= base) result = exponent % 2 != 0 ? result * base : result;
  return result;
}

__global__ void __launch_bounds__(kThreads) decide_update(const DecideUpdate c) {
  __shared__ double room[kThreads / 32];
  double part = 0.0;
  for (std::int64_t u = threadIdx.x; u < c.all_units; u += kThreads) part += c.squares[c.owner[u]][u];
  const double norm = sqrt(block_sum<kThreads>(part, room));
  if (threadIdx.x != 0) return;
  double loss = 0.0;
  for (int d = 0; d < c.num_devices; ++d) loss += *c.loss_sums[d];
  UpdateState s = *c.state;
  s.loss = loss * c.loss_scale, s.norm = norm;
  s.clip_scale = c.clip_norm > 0 && norm > c.clip_norm ? c.clip_norm / norm : 1.0;
  s.budgets_held = *c.overflows == 0 ? 1 : 0;
  s.valid = s.budgets_held != 0 && isfinite(norm) && isfinite(s.loss) ? 1 : 0;
  s.updates += s.valid;
  s.gradient_scale = static_cast<float>(s.clip_scale);
  s.step_size = static_cast<float>(c.learning_rate / (1 - power(c.beta1, s.updates)));
  s.second_inverse = static_cast<float>(1 / (1 - power(c.beta2, s.updates)));
  s.shrink = c.learning_rate * c.weight_decay;
  *c.state = s;
}

}  // namespace

void launch_decide_update(const DecideUpdate& c, cudaStream_t stream) { decide_update<<<1, kThreads, 0, stream>>>(c); }

}  // namespace waybill::cuda
