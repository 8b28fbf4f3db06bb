// SPDX-License-Identifier: Apache-2.0
// Device functions that the router's kernels share: reading logits, exact keys, weights of the chosen experts, counting.
// Candidate rules, keys and their order are those of router_ref.cc bit for bit (scalar_math.h on both sides).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/cuda/ptx.cuh"
#include "core/scalar_math.h"
#include "ops/router/cuda/router_params.h"

namespace waybill::cuda {

inline constexpr float kInfinity = __builtin_inff();

// Kernels started by launch_kernel() may run while the one before them ends. begin_kernel() lets the next one come; what a kernel does
// then must leave global memory alone until await_previous(), in every thread.
__device__ __forceinline__ void begin_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  ptx::launch_dependents();
#endif
}
__device__ __forceinline__ void await_previous() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  ptx::wait_for_dependencies();
#endif
}

template <class T>
__device__ __forceinline__ float to_float(T v);
template <>
__device__ __forceinline__ float to_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ float to_float<__nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <>
__device__ __forceinline__ float to_float<__half>(__half v) {
  return __half2float(v);
}

template <class T>
__device__ __forceinline__ void widen4(uint2 v, float (&x)[4]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
  } else {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
  }
}
// Four neighbouring logits. The address is aligned to four elements. kGlobal: read-once global memory; else shared or cached memory.
template <class T, bool kGlobal>
__device__ __forceinline__ void load4(const T* p, float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    uint4 v;
    if constexpr (kGlobal) {
      v = ptx::ld_stream_v4(p);
    } else {
      v = *reinterpret_cast<const uint4*>(p);
    }
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  } else {
    uint2 v;
    if constexpr (kGlobal) {
      v = ptx::ld_stream_v2(p);
    } else {
      v = *reinterpret_cast<const uint2*>(p);
    }
    widen4<T>(v, x);
  }
}

// The raw score whose order decides (before the bias); the logit itself for softmax scores.
__device__ __forceinline__ float selection_score(int score, float x) {
  if (score == kScoreSigmoid) return scalar::sigmoid(x);
  if (score == kScoreSqrtSoftplus) return scalar::sqrt_softplus(x);
  return x;
}

// The float of a scalar::order_key().
__device__ __forceinline__ float value_of(std::uint32_t u) { return __uint_as_float(u ^ ((u >> 31) != 0 ? 0x80000000u : 0xffffffffu)); }

// Sortable key, 0 for an expert that is no candidate: a finite logit with a finite score + bias. bias NaN: masked.
__device__ __forceinline__ std::uint32_t exact_key(int score, float x, float bias) {
  const float key = scalar::add(selection_score(score, x), bias);
  return scalar::is_finite(x) && scalar::is_finite(key) ? scalar::order_key(key) : 0u;
}

// Key above id: one comparison gives "key descending, id ascending".
__device__ __forceinline__ std::uint64_t composite_of(std::uint32_t key, std::uint32_t id) {
  return (static_cast<std::uint64_t>(key) << 32) | (0xffffffffu - id);
}
__device__ __forceinline__ std::uint32_t id_of(std::uint64_t composite) { return 0xffffffffu - static_cast<std::uint32_t>(composite); }

// The bias the kernels add: NaN where the expert is masked, -Inf where the given bias is not finite (both: never chosen).
__device__ __forceinline__ float effective_bias(const RouterRows& rows, int e, float bias) {
  if (rows.mask != nullptr && rows.mask[e] != 0) return __uint_as_float(0x7fc00000u);
  return scalar::is_finite(bias) ? bias : -kInfinity;
}
__device__ __forceinline__ float effective_bias(const RouterRows& rows, int e) { return effective_bias(rows, e, rows.bias == nullptr ? 0.0f : rows.bias[e]); }
__device__ __forceinline__ bool is_masked(float effective) { return effective != effective; }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(ptx::kFullWarp, v, step);
  return v;
}
__device__ __forceinline__ float warp_max(float v) { return value_of(ptx::redux_max(scalar::order_key(v))); }

// One lane a row: what the row's weights were made with; 0 where they were not made as score * factor.
__device__ __forceinline__ void store_factor(const RouterRows& rows, float* factors, int t, float factor) {
  if (factors != nullptr) factors[t] = rows.score == kScoreSigmoid ? factor : 0.0f;
}

__device__ __forceinline__ void store_id(void* ids, int id_bytes, std::int64_t i, std::int32_t id) {
  if (id_bytes == 2) {
    static_cast<std::int16_t*>(ids)[i] = static_cast<std::int16_t>(id);
  } else {
    static_cast<std::int32_t*>(ids)[i] = id;
  }
}
__device__ __forceinline__ std::int32_t load_id(const void* ids, int id_bytes, std::int64_t i) {
  return id_bytes == 2 ? static_cast<const std::int16_t*>(ids)[i] : static_cast<const std::int32_t*>(ids)[i];
}

__device__ __forceinline__ float log_selection_score(int score, float x) {
  if (score == kScoreSigmoid) return scalar::log_sigmoid(x);
  if (score == kScoreSqrtSoftplus) return scalar::log_sqrt_softplus(x);
  return x;
}

// e^(x - shift) with the rounding of the difference put right: 2 ulp for any x.
__device__ __forceinline__ float exp_difference(float x, float shift) {
  const float d = scalar::sub(x, shift), back = scalar::sub(d, x);
  const float error = scalar::sub(scalar::sub(x, scalar::sub(d, back)), scalar::add(shift, back));
  const float e = scalar::exp(d);
  return scalar::fma(e, error, e);
}

// Weights of one row's chosen experts by one warp. x [K] logits in shared memory, NaN where the slot has no route; `row_max` and
// `row_sum` are the softmax denominator over all experts, used without renormalisation only. w [K] may be x itself: each lane reads
// and writes its own slots. Sums run over the slots in a fixed order (stride 32, then the butterfly). Out of line: the warp kernel has
// its own short form for the common scores.
__device__ __noinline__ inline void row_weights(const RouterRows& rows, const float* x, float row_max, float row_sum, float* out) {
  const auto store = [out](int k, float w) { out[k] = w; };
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const bool is_softmax = rows.score == kScoreSoftmax || rows.score == kScoreSoftmaxSelected;
  const bool renormalise = rows.renormalise != 0 || rows.score == kScoreSoftmaxSelected;
  if (!renormalise) {
    const float inverse = is_softmax ? scalar::div(1.0f, row_sum) : 1.0f;
    for (int k = lane; k < rows.K; k += 32) {
      const float v = x[k];
      const float s = is_softmax ? scalar::mul(exp_difference(v, row_max), inverse) : selection_score(rows.score, v);
      store(k, v == v ? scalar::mul(rows.scale, s) : 0.0f);
    }
    return;
  }
  if (rows.epsilon > 0.0f) {  // parity: s / (sum + epsilon)
    float sum = 0.0f, count = 0.0f;
    for (int k = lane; k < rows.K; k += 32) {
      const float v = x[k];
      sum += v == v ? selection_score(rows.score, v) : 0.0f;
      count += v == v ? 1.0f : 0.0f;
    }
    sum = warp_sum(sum), count = warp_sum(count);
    for (int k = lane; k < rows.K; k += 32) {
      const float v = x[k];
      const float w = sum > 0.0f ? scalar::div(selection_score(rows.score, v), sum + rows.epsilon) : scalar::div(1.0f, count);
      store(k, v == v ? scalar::mul(rows.scale, w) : 0.0f);
    }
    return;
  }
  // Log domain: finite at every logit. For ordinary sigmoid rows the plain quotient has the same value and costs less.
  float shift = -kInfinity;
  for (int k = lane; k < rows.K; k += 32) {
    const float v = x[k];
    shift = fmaxf(shift, v == v ? v : -kInfinity);
  }
  shift = warp_max(shift);
  if (shift == -kInfinity) {  // no route
    for (int k = lane; k < rows.K; k += 32) store(k, 0.0f);
    return;
  }
  const bool by_quotient = !is_softmax && shift > -30.0f;
  if (!is_softmax && !by_quotient) shift = log_selection_score(rows.score, shift);
  const auto term = [&](float v) {
    if (v != v) return 0.0f;
    if (by_quotient) return selection_score(rows.score, v);
    return exp_difference(is_softmax ? v : log_selection_score(rows.score, v), shift);
  };
  float sum = 0.0f;
  for (int k = lane; k < rows.K; k += 32) sum += term(x[k]);
  sum = warp_sum(sum);
  for (int k = lane; k < rows.K; k += 32) store(k, scalar::mul(rows.scale, scalar::div(term(x[k]), sum)));
}

// One ticket a CTA: true for every thread of the CTA that comes last; what the others wrote before is then visible. The barrier
// orders the CTA's own writes before its first thread's release (which is cumulative).
__device__ __forceinline__ bool is_last_cta(std::uint32_t* ticket) {
  __shared__ std::uint32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::atom_add_acq_rel_gpu(ticket, 1u) == gridDim.x - 1;
    if (is_last != 0) *ticket = 0;
  }
  __syncthreads();
  return is_last != 0;
}

// Rows that are out of the ordinary, added to the status word where they are met (warp uniform; rare, so no register keeps a count).
__device__ __forceinline__ void add_to_status(std::int64_t* word, int n) {
  if (n != 0 && (threadIdx.x & 31) == 0) atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(n));
}
__device__ __forceinline__ void count_nonfinite_rows(StatusWord* status, int n) {
  if (status != nullptr) add_to_status(&status->num_nonfinite_rows, n);
}
__device__ __forceinline__ void count_short_rows(StatusWord* status, int n) {
  if (status != nullptr) add_to_status(&status->num_short_rows, n);
}
__device__ __forceinline__ void count_bad_ids(StatusWord* status, int n) {
  if (status == nullptr || n == 0) return;
  add_to_status(&status->num_bad_ids, n);
  if ((threadIdx.x & 31) == 0) atomicOr(&status->flags, static_cast<unsigned>(kStatusBadId));
}

}  // namespace waybill::cuda
