// SPDX-License-Identifier: Apache-2.0
// Rows as vectors of 16 bytes, and fp32 sums of them.
#pragma once

#include <cuda_bf16.h>

#include "core/cuda/ptx.cuh"
#include "exchange/cuda/exchange_kernels.h"

namespace waybill::cuda {

// Past L1: rows are read once, and peers' memory must not stay in it.
__device__ __forceinline__ uint4 load_row(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ void store_row(void* p, uint4 v) { __stcs(static_cast<uint4*>(p), v); }

// How the warps of a grid row share rows of `pieces` pieces: item = a row, or an equal part of its pieces where there are fewer than four rows
// a warp. Items of a warp are `step` apart. Counts in 31 bits: rows times parts stay below rows + 4 * warps * pieces.
struct RowItems {
  int parts, per_part, pieces, count, first, step;
  __device__ __forceinline__ RowItems(int rows, int num_pieces) : RowItems(rows, num_pieces, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), 4) {}
  // The warps of `ctas` CTAs, of which this one is number `cta`; `least` items a warp where rows can be parted so.
  __device__ __forceinline__ RowItems(int rows, int num_pieces, int cta, int ctas, int least) : pieces(num_pieces) {
    step = ctas * static_cast<int>(blockDim.x / 32);
    first = static_cast<int>(threadIdx.x >> 5) * ctas + cta;
    split(rows, rows > 0 ? min(pieces, max(1, (least * step + rows - 1) / rows)) : 1);
  }
  __device__ __forceinline__ void split(int rows, int into) { parts = min(into, pieces), per_part = (pieces + parts - 1) / parts, count = rows * parts; }
  // Somewhat more parts where those are of equal size: a warp may always have the same part.
  __device__ __forceinline__ void split_evenly(int rows) {
    for (int into = parts; into <= min(pieces, 3 * parts); ++into) {
      if (pieces % into == 0) return split(rows, into);
    }
  }
  __device__ __forceinline__ int row(int item) const { return parts == 1 ? item : item / parts; }
  __device__ __forceinline__ int begin(int item) const { return parts == 1 ? 0 : item % parts * per_part; }
  __device__ __forceinline__ int end(int item) const { return min(pieces, begin(item) + per_part); }
};

// 16 bytes as floats and back; bf16 rounds to nearest even.
template <class T>
struct Vector;
template <>
struct Vector<float> {
  static constexpr int kValues = 4;
  static __device__ __forceinline__ void to_float(const uint4& v, float (&x)[4]) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 from_float(const float (&x)[4]) {
    return uint4{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
  }
};
template <>
struct Vector<__nv_bfloat16> {
  static constexpr int kValues = 8;
  static __device__ __forceinline__ void to_float(const uint4& v, float (&x)[8]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  static __device__ __forceinline__ uint4 from_float(const float (&x)[8]) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const unsigned*>(&pair);
    }
    return uint4{words[0], words[1], words[2], words[3]};
  }
};

// kValues floats to memory as Out, 16-byte aligned (8 for bf16 from four floats).
template <class Out, int kValues>
__device__ __forceinline__ void store_values(Out* p, const float (&x)[kValues]) {
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) *reinterpret_cast<float4*>(p + i) = float4{x[i], x[i + 1], x[i + 2], x[i + 3]};
  } else if constexpr (kValues == 8) {
    *reinterpret_cast<uint4*>(p) = Vector<Out>::from_float(x);
  } else {
    const __nv_bfloat162 a = __floats2bfloat162_rn(x[0], x[1]), b = __floats2bfloat162_rn(x[2], x[3]);
    *reinterpret_cast<uint2*>(p) = uint2{*reinterpret_cast<const unsigned*>(&a), *reinterpret_cast<const unsigned*>(&b)};
  }
}

// Calls body(bf16 or float tag) for a RowType.
template <class Body>
auto with_row_type(RowType type, const Body& body) {
  return type == RowType::kF32 ? body(static_cast<float*>(nullptr)) : body(static_cast<__nv_bfloat16*>(nullptr));
}

}  // namespace waybill::cuda
