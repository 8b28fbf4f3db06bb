// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward kernel share: 8 columns of a row at a time to and from fp32.
#pragma once

#include <cuda_bf16.h>

#include "core/cuda/activation_math.cuh"
#include "ops/activation/cuda/activation_kernels.h"

namespace waybill::cuda {

// How tensors are read and written: all bf16 or all fp32 in pieces of 16 bytes, or any mix element by element.
enum class RowAccess : int { kBf16 = 0, kF32 = 1, kAny = 2 };
constexpr bool is_exact(RowAccess access) { return access != RowAccess::kBf16; }

template <RowAccess kAccess>
__device__ __forceinline__ void load8(float (&v)[8], const ActivationMatrix& m, std::int64_t row, std::int64_t column, std::int64_t count) {
  const std::int64_t at = row * m.stride + column;
  if constexpr (kAccess == RowAccess::kBf16) {
    const uint4 raw = ptx::ld_stream_v4(static_cast<const __nv_bfloat16*>(m.data) + at);
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  } else if constexpr (kAccess == RowAccess::kF32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 raw = ptx::ld_stream_v4(static_cast<const float*>(m.data) + at + 4 * i);
      v[4 * i] = __uint_as_float(raw.x), v[4 * i + 1] = __uint_as_float(raw.y), v[4 * i + 2] = __uint_as_float(raw.z), v[4 * i + 3] = __uint_as_float(raw.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = 0.0f;
      if (i < count) v[i] = m.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(m.data)[at + i]) : static_cast<const float*>(m.data)[at + i];
    }
  }
}

template <RowAccess kAccess>
__device__ __forceinline__ void store8(const float (&v)[8], const ActivationMatrix& m, std::int64_t row, std::int64_t column, std::int64_t count) {
  const std::int64_t at = row * m.stride + column;
  if constexpr (kAccess == RowAccess::kBf16) {
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    uint4 raw;
    memcpy(&raw, pairs, 16);
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(m.data) + at) = raw;
  } else if constexpr (kAccess == RowAccess::kF32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float4*>(static_cast<float*>(m.data) + at + 4 * i) = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count) continue;
      if (m.is_bf16) {
        static_cast<__nv_bfloat16*>(m.data)[at + i] = __float2bfloat16_rn(v[i]);
      } else {
        static_cast<float*>(m.data)[at + i] = v[i];
      }
    }
  }
}

__device__ __forceinline__ std::int64_t rows_of(const ActivationCall& p) {
  return p.num_rows == nullptr ? p.rows : min(max(static_cast<std::int64_t>(__ldg(p.num_rows)), std::int64_t{0}), p.rows);
}

inline constexpr int kActivationWarps = 8;

// kernel(kind, access) for the tensors of a call: pieces of 16 bytes where widths, strides and addresses allow.
template <class Launch>
void dispatch_activation(const ActivationCall& p, std::initializer_list<const ActivationMatrix*> tensors, const Launch& launch) {
  bool all_bf16 = true, all_f32 = true, aligned = p.F % 8 == 0;
  for (const ActivationMatrix* m : tensors) {
    all_bf16 &= m->is_bf16, all_f32 &= !m->is_bf16;
    aligned &= reinterpret_cast<std::uintptr_t>(m->data) % 16 == 0 && m->stride % (m->is_bf16 ? 8 : 4) == 0;
  }
  const RowAccess access = !aligned ? RowAccess::kAny : (all_bf16 ? RowAccess::kBf16 : (all_f32 ? RowAccess::kF32 : RowAccess::kAny));
  const auto of_kind = [&]<ActivationKind kKind>() {
    if (access == RowAccess::kBf16) {
      launch.template operator()<kKind, RowAccess::kBf16>();
    } else if (access == RowAccess::kF32) {
      launch.template operator()<kKind, RowAccess::kF32>();
    } else {
      launch.template operator()<kKind, RowAccess::kAny>();
    }
  };
  switch (static_cast<ActivationKind>(p.kind)) {
    case ActivationKind::kSwiGLU:
      return of_kind.template operator()<ActivationKind::kSwiGLU>();
    case ActivationKind::kClampedSwiGLU:
      return of_kind.template operator()<ActivationKind::kClampedSwiGLU>();
    case ActivationKind::kReluSquared:
      return of_kind.template operator()<ActivationKind::kReluSquared>();
  }
}

inline dim3 activation_grid(const ActivationCall& p, int num_sms) {
  const std::int64_t blocks = (p.rows + kActivationWarps - 1) / kActivationWarps;
  return dim3(static_cast<unsigned>(std::min<std::int64_t>(blocks, static_cast<std::int64_t>(num_sms) * 32)));
}

}  // namespace waybill::cuda
