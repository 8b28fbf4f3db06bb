// SPDX-License-Identifier: Apache-2.0
// Routes that name an expert twice: the router's backward kernels write a logit once, for distinct ids. Each of the m routes of one expert gives it the
// same; this adds the other m - 1. A thread a route; the first of an expert's routes acts.
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;

template <class Id>
__global__ void __launch_bounds__(kThreads) moe_scale_duplicates(const DuplicateRoutes a, float* d_logits) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.T * a.K; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const std::int64_t t = i / a.K, k = i % a.K;
    const auto* ids = static_cast<const Id*>(a.ids) + t * a.K;
    const Id id = ids[k];
    if (id < 0 || id >= a.E) continue;
    int times = 0;
    bool is_first = true;
    for (std::int64_t j = 0; j < a.K; ++j) {
      if (ids[j] != id) continue;
      ++times;
      is_first = is_first && j >= k;
    }
    if (!is_first || times == 1) continue;
    float& d = d_logits[t * a.E + id];
    d = a.over_all ? fmaf(static_cast<float>(times - 1), a.weights[i] * a.d_weights[i], d) : d * static_cast<float>(times);
  }
}

}  // namespace

void launch_scale_duplicates(const DuplicateRoutes& a, float* d_logits, cudaStream_t stream) {
  if (a.T == 0) return;
  if (a.id_bytes == 2) {
    moe_scale_duplicates<std::int16_t><<<264, kThreads, 0, stream>>>(a, d_logits);
  } else {
    moe_scale_duplicates<std::int32_t><<<264, kThreads, 0, stream>>>(a, d_logits);
  }
}

}  // namespace waybill::cuda
