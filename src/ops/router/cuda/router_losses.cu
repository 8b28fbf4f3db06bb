// SPDX-License-Identifier: Apache-2.0
// Values of the router's losses, and the counts that the losses of a call need.
//
// losses: one warp per token, the row is staged in shared memory (sm_90) or read at each pass (generic); rows go from the last to the first, because the end of
// the logits
//   is what the forward pass has left in L2. Row values are summed in double: per warp in row order, per CTA in warp order, and the
//   last CTA sums the CTAs in their order: the result depends on the grid only, never on timing. No float atomics.
// prepare: integer counts per expert and sequence from the ids, and the valid tokens (only where a call needs them).
#include <algorithm>
#include <atomic>

#include "core/cuda/launch.h"
#include "ops/router/cuda/router_staged_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256;        // generic, prepare
constexpr int kStagedThreads = 512;  // at most

// Sums of one warp's rows.
struct LossSums {
  double aux = 0, sequence = 0, z = 0;
};

// What a row adds. sums(is_sequence): the row's sums with a_e = n_e or n_be.
template <bool kSoftmax, class Sums>
__device__ __forceinline__ void add_row(const RouterLossParams& p, std::int64_t t, float per_sequence, LossSums& total, const Sums& sums) {
  const bool has_sequence = p.sequence_counts != nullptr, has_aux = p.aux_coefficient != 0.0f;
  for (int pass = 0; pass < (has_sequence && has_aux ? 2 : 1); ++pass) {  // both losses: the sums differ in a_e
    const bool is_sequence = has_sequence && (pass == 1 || !has_aux);
    const RowSums s = sums(is_sequence);
    if (is_sequence || has_aux) {
      const double value = static_cast<double>(s.a_dot) / static_cast<double>(s.score_sum);
      (is_sequence ? total.sequence : total.aux) += is_sequence ? value * static_cast<double>(sequence_factor(p, t, per_sequence)) : value;
    }
    if (pass == 0 && p.z_coefficient != 0.0f) {
      const double lse = static_cast<double>(row_lse<kSoftmax>(p.rows.score, s));
      total.z += lse * lse;
    }
  }
}

__device__ __forceinline__ RowFactors counts_of_row(const RouterLossParams& p, const float* a_smem, std::int64_t t, bool is_sequence) {
  RowFactors a{is_sequence ? nullptr : a_smem, nullptr, 1.0f, p.rows.E};
  if (is_sequence) a.sequence_row = p.sequence_counts + t / p.sequence_length * p.rows.E;
  return a;
}

// Sums of the CTA, then of all CTAs by the last one, each in a fixed order.
__device__ __forceinline__ void finish_losses(const RouterLossParams& p, const LossFactors& factors, const LossSums& sums) {
  __shared__ double partial[kStagedThreads / 32][3];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  if (lane == 0) partial[warp][0] = sums.aux, partial[warp][1] = sums.sequence, partial[warp][2] = sums.z;
  __syncthreads();
  if (threadIdx.x < 3) {
    double sum = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) sum += partial[w][threadIdx.x];
    p.row_partials[static_cast<std::size_t>(blockIdx.x) * 3 + threadIdx.x] = sum;
  }
  if (!is_last_cta(p.ticket)) return;
  if (warp < 3) {
    double sum = 0;
    for (unsigned c = static_cast<unsigned>(lane); c < gridDim.x; c += 32) sum += __ldcg(p.row_partials + static_cast<std::size_t>(c) * 3 + warp);
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(ptx::kFullWarp, sum, step);
    const double factor = warp == 0 ? static_cast<double>(factors.aux) : (warp == 1 ? 1.0 : static_cast<double>(factors.z));
    if (lane == 0) write_loss(p, warp, sum * factor);
  }
}

template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kThreads) router_losses_generic(const __grid_constant__ RouterLossParams p) {
  extern __shared__ __align__(16) float a_smem[];  // [E padded]
  const RouterRows& rows = p.rows;
  begin_kernel();
  await_previous();
  const LossFactors factors = loss_factors(p);
  const float per_sequence = sequence_scale(p);
  load_aux_factors(p, 1.0f, a_smem);  // the factor is applied in double at the end
  LossSums total;
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t t = rows.T - 1 - (static_cast<std::int64_t>(threadIdx.x >> 5) * gridDim.x + blockIdx.x); t >= 0; t -= num_warps) {
    if (rows.padding != nullptr && rows.padding[t] != 0) continue;
    const T* row = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    const float row_max = generic_row_max(rows, row);
    if (row_max == -kInfinity) continue;
    add_row<kSoftmax>(p, t, per_sequence, total,
                      [&](bool is_sequence) { return generic_row_sums<T, kSoftmax>(rows, row, counts_of_row(p, a_smem, t, is_sequence), row_max); });
  }
  finish_losses(p, factors, total);
}

template <class T, bool kSoftmax>
__global__ void __launch_bounds__(kStagedThreads, 2) router_losses_staged(const __grid_constant__ RouterLossParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float a_smem[];  // [E], then a row per warp
  __shared__ std::uint64_t barriers[kStagedThreads / 32];
  const RouterRows& rows = p.rows;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(rows.E) * sizeof(T);
  T* row = reinterpret_cast<T*>(a_smem + rows.E) + static_cast<std::size_t>(warp) * rows.E;
  std::uint64_t* full = barriers + warp;
  if (lane == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  begin_kernel();
  await_previous();
  const auto fetch = [&](std::int64_t t) {
    if (lane == 0 && t >= 0) {
      ptx::mbarrier_arrive_expect(full, row_bytes);
      ptx::bulk_load(row, static_cast<const T*>(rows.logits) + t * rows.row_stride, row_bytes, full);
    }
  };
  const std::int64_t num_warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / 32);
  const std::int64_t first = rows.T - 1 - (static_cast<std::int64_t>(warp) * gridDim.x + blockIdx.x);
  fetch(first);
  const LossFactors factors = loss_factors(p);
  const float per_sequence = sequence_scale(p);
  load_aux_factors(p, 1.0f, a_smem);
  const bool has_sequence = p.sequence_counts != nullptr, one_loss = !(has_sequence && p.aux_coefficient != 0.0f);
  LossSums total;
  std::uint32_t parity = 0;
  for (std::int64_t t = first; t >= 0; t -= num_warps, parity ^= 1u) {
    ptx::mbarrier_wait(full, parity);
    if (rows.padding != nullptr && rows.padding[t] != 0) {
      fetch(t - num_warps);
      continue;
    }
    // Ordinary rows need one pass: no shift keeps e^x in range. The next row is on its way while the sums are reduced.
    bool ordinary = one_loss;
    RowSums s;
    if (ordinary) ordinary = unshifted_row_sums<T, kSoftmax>(rows, row, counts_of_row(p, a_smem, t, has_sequence), s);
    __syncwarp();
    fetch(t - num_warps);
    if (ordinary) {
      reduce_sums<kSoftmax>(s);
      add_row<kSoftmax>(p, t, per_sequence, total, [&](bool) { return s; });
      continue;
    }
    const T* source = static_cast<const T*>(rows.logits) + t * rows.row_stride;
    const float row_max = generic_row_max(rows, source);
    if (row_max == -kInfinity) continue;
    add_row<kSoftmax>(p, t, per_sequence, total,
                      [&](bool is_sequence) { return generic_row_sums<T, kSoftmax>(rows, source, counts_of_row(p, a_smem, t, is_sequence), row_max); });
  }
  finish_losses(p, factors, total);
#endif
}

// aux_counts [E], sequence_counts [B, E], sequence_valid [B], valid_tokens [1]: zeroed before. Integer atomics only.
__global__ void __launch_bounds__(kThreads) router_loss_prepare(const __grid_constant__ RouterLossParams p, std::int32_t* aux_counts) {
  const RouterRows& rows = p.rows;
  begin_kernel();
  await_previous();
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

template <class T, bool kSoftmax>
void launch_score(const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const RouterRows& rows = p.rows;
  static std::atomic<bool> done[16] = {};
  if (!done[limits.device & 15].exchange(true)) {
    cudaFuncSetAttribute(router_losses_staged<T, kSoftmax>, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_per_block - 2048);
  }
  if (can_stage<T>(rows, limits) && rows.score != kScoreSqrtSoftplus) {
    const StagedShape shape = staged_shape(limits, static_cast<std::size_t>(rows.E) * 4, static_cast<std::size_t>(rows.E) * sizeof(T), kStagedThreads / 32);
    const std::int64_t needed = (rows.T + shape.warps - 1) / shape.warps;
    const auto grid = static_cast<unsigned>(std::clamp<std::int64_t>(needed, 1, static_cast<std::int64_t>(limits.num_sms) * shape.blocks));
    launch_kernel(router_losses_staged<T, kSoftmax>, grid, static_cast<unsigned>(shape.warps) * 32, shape.smem, stream, true, p);
    return;
  }
  const std::size_t smem = static_cast<std::size_t>(padded_to_4(rows.E)) * sizeof(float);
  const auto grid =
      static_cast<unsigned>(std::clamp<std::int64_t>((rows.T + kThreads / 32 - 1) / (kThreads / 32), 1, static_cast<std::int64_t>(limits.num_sms) * 4));
  launch_kernel(router_losses_generic<T, kSoftmax>, grid, kThreads, smem, stream, limits.compute_major >= 9, p);
}

template <class T>
void launch(const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (p.rows.score == kScoreSoftmax || p.rows.score == kScoreSoftmaxSelected) return launch_score<T, true>(p, limits, stream);
  launch_score<T, false>(p, limits, stream);
}

}  // namespace

void launch_router_loss_prepare(const RouterLossParams& p, std::int32_t* aux_counts, const DeviceLimits& limits, cudaStream_t stream) {
  const auto grid =
      static_cast<unsigned>(std::clamp<std::int64_t>((p.rows.T + kThreads / 32 - 1) / (kThreads / 32), 1, static_cast<std::int64_t>(limits.num_sms) * 4));
  launch_kernel(router_loss_prepare, grid, kThreads, 0, stream, limits.compute_major >= 9, p, aux_counts);
}

void launch_router_losses(LogitType type, const RouterLossParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (type == LogitType::kF32) return launch<float>(p, limits, stream);
  if (type == LogitType::kBF16) return launch<__nv_bfloat16>(p, limits, stream);
  launch<__half>(p, limits, stream);
}

}  // namespace waybill::cuda
