// SPDX-License-Identifier: Apache-2.0
// Values of the router's losses, and the counts that the losses of a call need.
//
// losses: one warp per token, the row is read once (online sums); rows go from the last to the first, because the end of the logits
//   is what the forward pass has left in L2. Row values are summed in double: per warp in row order, per CTA in warp order, and the
//   last CTA sums the CTAs in their order: the result depends on the grid only, never on timing. No float atomics.
// prepare: integer counts per expert and sequence from the ids, and the valid tokens (only where a call needs them).
#include <algorithm>

#include "ops/router/cuda/router_backward.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 6;   // vectors of 128 experts in flight
constexpr int kBlocks = 3;  // CTAs an SM: what the registers of a batch allow

struct OnlineSums {
  float max = -kInfinity, exp_sum = 0.0f, exp_dot = 0.0f, score_sum = 0.0f, score_dot = 0.0f;
};

template <class T>
__device__ __forceinline__ void read_vector(const RouterRows& rows, const T* row, int v, bool vectorised, float (&x)[4]) {
  const int e = v * 128 + (static_cast<int>(threadIdx.x) & 31) * 4;
  if (vectorised && e < rows.E) {
    load4<T, true>(row + e, x);
  } else {
    for (int i = 0; i < 4; ++i) x[i] = e + i < rows.E ? to_float(row[e + i]) : -kInfinity;
  }
}

template <class T, bool kSoftmax>
__device__ __forceinline__ OnlineSums scan_losses(const RouterRows& rows, const T* row, bool vectorised, const RowFactors& a, bool need_exp, bool need_score,
                                                  bool deep, float deep_max) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  OnlineSums s;
  for (int begin = 0; begin * 128 < rows.E; begin += kBatch) {
    float x[kBatch][4];
#pragma unroll
    for (int c = 0; c < kBatch; ++c) {
      if ((begin + c) * 128 < rows.E) {
        read_vector(rows, row, begin + c, vectorised, x[c]);
      } else {
        x[c][0] = x[c][1] = x[c][2] = x[c][3] = -kInfinity;
      }
    }
    float largest = s.max;
#pragma unroll
    for (int c = 0; c < kBatch; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = (begin + c) * 128 + lane * 4 + i;
        const bool masked = rows.mask != nullptr && e < rows.E && rows.mask[e] != 0;
        x[c][i] = scalar::is_finite(x[c][i]) && !masked ? x[c][i] : -kInfinity;
        largest = fmaxf(largest, x[c][i]);
      }
    }
    if (largest == -kInfinity) continue;
    const float rescale = exp_fast(s.max - largest);
    s.exp_sum *= rescale, s.exp_dot *= rescale, s.max = largest;
#pragma unroll
    for (int c = 0; c < kBatch; ++c) {
      const int e = (begin + c) * 128 + lane * 4;
      if ((begin + c) * 128 >= rows.E) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = e + i < rows.E ? a.at(e + i) : 0.0f;
        if (need_exp) {
          const float y = exp_fast(x[c][i] - largest);
          s.exp_sum += y;
          if (kSoftmax) s.exp_dot = __fmaf_rn(factor, y, s.exp_dot);
        }
        if (!kSoftmax && need_score) {
          const float v = score_and_slope(rows.score, x[c][i], deep_max, deep).s;
          s.score_sum += v;
          s.score_dot = __fmaf_rn(factor, v, s.score_dot);
        }
      }
    }
  }
  return s;
}

template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kThreads, kBlocks) router_losses(const __grid_constant__ RouterLossParams p) {
  extern __shared__ __align__(16) float a_smem[];  // [E]
  __shared__ double partial[kThreads / 32][3];
  __shared__ std::uint32_t is_last;
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const LossFactors factors = loss_factors(p);
  const float per_sequence = sequence_scale(p);
  load_aux_factors(p, 1.0f, a_smem);  // the factor is applied in double at the end
  const bool vectorised = rows.E % 4 == 0 && rows.row_stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(rows.logits) % (4 * sizeof(T)) == 0;
  const bool need_exp = kSoftmax || p.z_coefficient != 0.0f;
  const bool has_sequence = p.sequence_counts != nullptr;
  double aux = 0, sequence = 0, z = 0;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t t = rows.T - 1 - (static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + warp); t >= 0; t -= num_warps) {
    if (rows.padding != nullptr && rows.padding[t] != 0) continue;
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    for (int pass = 0; pass < (has_sequence && p.aux_coefficient != 0.0f ? 2 : 1); ++pass) {
      // With both losses the row is read twice: the sums differ in a_e only.
      const bool is_sequence = has_sequence && (pass == 1 || p.aux_coefficient == 0.0f);
      RowFactors a{is_sequence ? nullptr : a_smem, nullptr, 0.0f};
      if (is_sequence) a.sequence_row = p.sequence_counts + t / p.sequence_length * rows.E, a.sequence = 1.0f;
      OnlineSums s = scan_losses<T, kSoftmax>(rows, row, vectorised, a, need_exp, true, false, 0.0f);
      const float row_max = warp_max(s.max);
      if (row_max == -kInfinity) continue;
      if (!kSoftmax && row_max < -30.0f) s = scan_losses<T, kSoftmax>(rows, row, vectorised, a, need_exp, true, true, row_max);
      const float rescale = s.max == -kInfinity ? 0.0f : exp_fast(s.max - row_max);
      const float exp_sum = warp_sum(s.exp_sum * rescale);
      const float dot = kSoftmax ? warp_sum(s.exp_dot * rescale) : warp_sum(s.score_dot);
      const float norm = kSoftmax ? exp_sum : warp_sum(s.score_sum);
      const double value = static_cast<double>(dot) / static_cast<double>(norm);
      if (is_sequence) {
        sequence += value * static_cast<double>(sequence_factor(p, t, per_sequence));
      } else {
        aux += value;
      }
      if (pass == 0 && p.z_coefficient != 0.0f) {
        const double lse = static_cast<double>(row_max) + static_cast<double>(scalar::log(exp_sum));
        z += lse * lse;
      }
    }
  }
  if (lane == 0) partial[warp][0] = aux, partial[warp][1] = sequence, partial[warp][2] = z;
  __syncthreads();
  if (threadIdx.x < 3) {
    double sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += partial[w][threadIdx.x];
    p.row_partials[static_cast<std::size_t>(blockIdx.x) * 3 + threadIdx.x] = sum;
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(p.ticket, 1u) == gridDim.x - 1;
  __syncthreads();
  if (is_last == 0) return;
  __threadfence();
  if (warp < 3) {
    double sum = 0;
    for (unsigned c = static_cast<unsigned>(lane); c < gridDim.x; c += 32) sum += __ldcg(p.row_partials + static_cast<std::size_t>(c) * 3 + warp);
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
    const double factor = warp == 0 ? (p.aux_coefficient != 0.0f ? static_cast<double>(factors.aux) : 0.0) : (warp == 1 ? 1.0 : static_cast<double>(factors.z));
    if (lane == 0) p.out[warp] = sum * factor;
  }
  if (threadIdx.x == 0) *p.ticket = 0;
}

// aux_counts [E], sequence_counts [B, E], sequence_valid [B], valid_tokens [1]: zeroed before. Integer atomics only.
__global__ void __launch_bounds__(kThreads) router_loss_prepare(const __grid_constant__ RouterLossParams p, std::int32_t* aux_counts) {
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  int valid = 0;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + (threadIdx.x >> 5); t < rows.T; t += num_warps) {
    if (rows.padding != nullptr && rows.padding[t] != 0) continue;
    ++valid;
    const std::int64_t b = p.sequence_counts == nullptr ? 0 : t / p.sequence_length;
    if (p.sequence_counts != nullptr && lane == 0) atomicAdd(p.sequence_valid + b, 1);
    for (int k = lane; k < rows.K; k += 32) {
      const int id = load_id(p.ids, p.id_bytes, t * rows.K + k);
      if (id < 0 || id >= rows.E) continue;
      if (p.sequence_counts != nullptr) atomicAdd(p.sequence_counts + b * rows.E + id, 1);
      if (aux_counts != nullptr) atomicAdd(aux_counts + id, 1);
    }
  }
  if (p.valid_tokens != nullptr && lane == 0 && valid > 0) atomicAdd(p.valid_tokens, valid);
}

template <class T>
void launch(const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const std::size_t smem = static_cast<std::size_t>(p.rows.E) * sizeof(float);
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>((p.rows.T + kThreads / 32 - 1) / (kThreads / 32), 1, static_cast<std::int64_t>(limits.num_sms) * kBlocks));
  if (p.rows.score == kScoreSoftmax || p.rows.score == kScoreSoftmaxSelected) {
    router_losses<T, true><<<grid, kThreads, smem, stream>>>(p);
  } else {
    router_losses<T, false><<<grid, kThreads, smem, stream>>>(p);
  }
}

}  // namespace

void launch_router_loss_prepare(const RouterLossParams& p, std::int32_t* aux_counts, const DeviceLimits& limits, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>((p.rows.T + kThreads / 32 - 1) / (kThreads / 32), 1, static_cast<std::int64_t>(limits.num_sms) * 4));
  router_loss_prepare<<<grid, kThreads, 0, stream>>>(p, aux_counts);
}

void launch_router_losses(LogitType type, const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch<__nv_bfloat16>(p, limits, stream);
  launch<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
