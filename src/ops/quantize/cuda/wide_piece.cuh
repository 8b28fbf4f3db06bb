// SPDX-License-Identifier: Apache-2.0
// Eight adjacent elements of a row in a thread's registers, as they lie in memory.
#pragma once

#include "core/cuda/ptx.cuh"
#include "ops/quantize/cuda/codec.cuh"

namespace waybill::cuda {

template <bool kIsBf16>
struct Piece;

template <>
struct Piece<true> {
  static constexpr int kVectors = 1;  // of 16 bytes
  uint4 w;
  __device__ __forceinline__ void take(const uint4* from, int) { w = *from; }
  __device__ __forceinline__ void load(const void* data, std::int64_t element, bool is_there) {
    w = is_there ? ptx::ld_stream_v4(static_cast<const std::uint16_t*>(data) + element) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ std::uint32_t word(int i) const { return i == 0 ? w.x : (i == 1 ? w.y : (i == 2 ? w.z : w.w)); }
  __device__ __forceinline__ float value(int i) const { return __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xffff0000u); }
  // Bits of the largest magnitude, as fp32.
  __device__ __forceinline__ std::uint32_t largest() const {
    const std::uint32_t m = __vmaxu2(__vmaxu2(w.x & 0x7fff7fffu, w.y & 0x7fff7fffu), __vmaxu2(w.z & 0x7fff7fffu, w.w & 0x7fff7fffu));
    return max(m << 16, m & 0xffff0000u);
  }
};

template <>
struct Piece<false> {
  static constexpr int kVectors = 2;
  uint4 w[2];
  __device__ __forceinline__ void take(const uint4* from, int apart) { w[0] = from[0], w[1] = from[apart]; }
  __device__ __forceinline__ void load(const void* data, std::int64_t element, bool is_there) {
    const float* at = static_cast<const float*>(data) + element;
    w[0] = is_there ? ptx::ld_stream_v4(at) : make_uint4(0, 0, 0, 0);
    w[1] = is_there ? ptx::ld_stream_v4(at + 4) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ std::uint32_t word(int i) const {
    const uint4& v = w[i / 4];
    return i % 4 == 0 ? v.x : (i % 4 == 1 ? v.y : (i % 4 == 2 ? v.z : v.w));
  }
  __device__ __forceinline__ float value(int i) const { return __uint_as_float(word(i)); }
  __device__ __forceinline__ std::uint32_t largest() const {
    std::uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) m = max(m, word(i) & kMagnitudeBits);
    return m;
  }
};

// Magnitudes of eight columns, the largest of the pieces seen so far; bf16 packed in pairs.
template <bool kIsBf16>
struct ColumnMaximum {
  static constexpr int kWords = kIsBf16 ? 4 : 8;
  std::uint32_t m[kWords] = {};
  __device__ __forceinline__ void add(const Piece<kIsBf16>& p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) m[i] = kIsBf16 ? __vmaxu2(m[i], p.word(i) & 0x7fff7fffu) : max(m[i], p.word(i) & kMagnitudeBits);
  }
  __device__ __forceinline__ void join_lane(int mask) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t other = __shfl_xor_sync(ptx::kFullWarp, m[i], mask);
      m[i] = kIsBf16 ? __vmaxu2(m[i], other) : max(m[i], other);
    }
  }
  __device__ __forceinline__ std::uint32_t column(int i) const {
    if constexpr (kIsBf16) return i % 2 == 0 ? m[i / 2] << 16 : m[i / 2] & 0xffff0000u;
    return m[i];
  }
};

// Eight values to codes: 8 bytes, or 4 bytes of E2M1 in .x.
template <ElementFormat kFormat, class Value>
__device__ __forceinline__ uint2 encode_eight(const Value& value) {
  if constexpr (kFormat == ElementFormat::kE2M1) {
    std::uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= encode_e2m1(value(i)) << (4 * i);
    return make_uint2(codes, 0);
  } else {
    return make_uint2(encode_pair<kFormat>(value(0), value(1)) | encode_pair<kFormat>(value(2), value(3)) << 16,
                      encode_pair<kFormat>(value(4), value(5)) | encode_pair<kFormat>(value(6), value(7)) << 16);
  }
}

}  // namespace waybill::cuda
