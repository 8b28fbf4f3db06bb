// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA kernel set: register tile 6 x 16 (12 accumulators of 8 lanes).
#include "ops/gemm/kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "ops/gemm/kernel_rows.h"

#define WB_AVX2 __attribute__((target("avx2,fma")))
#define WB_AVX2_INLINE __attribute__((target("avx2,fma"), always_inline)) inline

namespace waybill::detail {
namespace {

constexpr int kRows = 6;
constexpr int kColumns = 16;

// Keeps the compiler from holding one pointer for every row of a tile.
template <class T>
WB_AVX2_INLINE void step(T*& pointer, std::int64_t elements) {
  pointer += elements;
  asm("" : "+r"(pointer));
}

template <int kTileRows>
WB_AVX2_INLINE void multiply_add(const float* a, const float* b, __m256 (&acc)[kTileRows][2]) {
  const __m256 b0 = _mm256_loadu_ps(b);
  const __m256 b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m) {
    const __m256 scale = _mm256_broadcast_ss(a + m);
    acc[m][0] = _mm256_fmadd_ps(scale, b0, acc[m][0]);
    acc[m][1] = _mm256_fmadd_ps(scale, b1, acc[m][1]);
  }
}

template <int kTileRows>
WB_AVX2 void tile(const TileArgs& args) {
  __m256 acc[kTileRows][2];
  const char* line = reinterpret_cast<const char*>(args.next_c);
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m) {
    acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    _mm_prefetch(line, _MM_HINT_T0);  // the next tile's c is on its way while this one's sums are formed
    _mm_prefetch(line + 60, _MM_HINT_T0);
    step(line, args.c_stride * 4);
  }
  if (args.start != nullptr) {
    const float* start = args.start;
#pragma GCC unroll 6
    for (int m = 0; m < kTileRows; ++m) {
      acc[m][0] = _mm256_loadu_ps(start);
      acc[m][1] = _mm256_loadu_ps(start + 8);
      step(start, args.start_stride);
    }
  }
  const float* a = args.a;
  const float* b = args.b;
  const char* next = args.next.at;
  std::int64_t left = args.next.left;
  for (std::int64_t k = args.depth / 4; k > 0; --k) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(next, _MM_HINT_T1);
      next += args.next.step;
      multiply_add<kTileRows>(a, b, acc);
      a += kTileRows;
      b += args.b_stride;
    }
    if (--left == 0) {
      next += args.next.jump;
      left = args.next.period;
    }
  }
  for (std::int64_t k = args.depth % 4; k > 0; --k) {
    multiply_add<kTileRows>(a, b, acc);
    a += kTileRows;
    b += args.b_stride;
  }
  float* c = args.c;
#pragma GCC unroll 6
  for (int m = 0; m < kTileRows; ++m) {
    if (args.add) {
      acc[m][0] = _mm256_add_ps(_mm256_loadu_ps(c), acc[m][0]);
      acc[m][1] = _mm256_add_ps(_mm256_loadu_ps(c + 8), acc[m][1]);
    }
    _mm256_storeu_ps(c, acc[m][0]);
    _mm256_storeu_ps(c + 8, acc[m][1]);
    step(c, args.c_stride);
  }
}

// Four 32-bit columns of 8 rows, transposed; see the AVX-512 set.
WB_AVX2_INLINE void transpose_4x8(const char* const* rows, std::int64_t byte, __m256i* out) {
  __m256i r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + byte)));
    r[i] = _mm256_inserti128_si256(r[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + byte)), 1);
  }
  const __m256i low01 = _mm256_unpacklo_epi32(r[0], r[1]), high01 = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(r[2], r[3]), high23 = _mm256_unpackhi_epi32(r[2], r[3]);
  out[0] = _mm256_unpacklo_epi64(low01, low23);
  out[1] = _mm256_unpackhi_epi64(low01, low23);
  out[2] = _mm256_unpacklo_epi64(high01, high23);
  out[3] = _mm256_unpackhi_epi64(high01, high23);
}

// 8 rows at a time. A 32-bit column is one fp32 or a pair of bf16, which shifts and masks take apart.
template <bool kBf16>
WB_AVX2 void pack_rows(const void* const* rows, int width, std::int64_t depth, float* panel) {
  constexpr std::int64_t kStep = kBf16 ? 8 : 4;  // k values in 16 bytes
  const std::int64_t whole = depth / kStep * kStep;
  for (int first = 0; first < width; first += 8) {
    const char* const* in = reinterpret_cast<const char* const*>(rows) + first;
    const int count = width - first < 8 ? width - first : 8;
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const char* source[8];
    for (int i = 0; i < 8; ++i) source[i] = in[i < count ? i : 0];  // a missing row repeats row 0; its lanes are not stored
    int* out = reinterpret_cast<int*>(panel + first);
    for (std::int64_t k = 0; k < whole; k += kStep) {
      __m256i column[4];
      transpose_4x8(source, k * (kBf16 ? 2 : 4), column);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if constexpr (kBf16) {
          _mm256_maskstore_epi32(out, mask, _mm256_slli_epi32(column[j], 16));
          _mm256_maskstore_epi32(out + width, mask, _mm256_and_si256(column[j], _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
          out += 2 * width;
        } else {
          _mm256_maskstore_epi32(out, mask, column[j]);
          out += width;
        }
      }
    }
    float* tail = panel + whole * width + first;
    for (std::int64_t k = whole; k < depth; ++k, tail += width) {
      for (int i = 0; i < count; ++i) {
        tail[i] = kBf16 ? widen_bf16(reinterpret_cast<const std::uint16_t*>(in[i])[k]) : reinterpret_cast<const float*>(in[i])[k];
      }
    }
  }
}

template <bool kBf16>
WB_AVX2_INLINE __m256 load_eight(const char* in) {
  if constexpr (kBf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))), 16));
  } else {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(in));
  }
}

template <bool kBf16>
WB_AVX2 void pack_columns(const void* const* rows, int num_rows, std::int64_t byte, int width, int panel_width, float* panel) {
  if (width != kColumns || panel_width != kColumns) return pack_columns_loop<kBf16>(rows, num_rows, byte, width, panel_width, panel);
  for (int k = 0; k < num_rows; ++k, panel += kColumns) {
    const char* in = static_cast<const char*>(rows[k]);
    _mm256_storeu_ps(panel, in == nullptr ? _mm256_setzero_ps() : load_eight<kBf16>(in + byte));
    _mm256_storeu_ps(panel + 8, in == nullptr ? _mm256_setzero_ps() : load_eight<kBf16>(in + byte + (kBf16 ? 16 : 32)));
  }
}

WB_AVX2 void finish_f32(const float* acc, const float* bias, std::int64_t width, bool accumulate, void* out) {
  finish_f32_loop(acc, bias, width, accumulate, out);
}
WB_AVX2 void finish_bf16(const float* acc, const float* bias, std::int64_t width, bool, void* out) { finish_bf16_loop(acc, bias, width, out); }

}  // namespace

const KernelSet kAvx2Kernels = {"avx2",
                                kRows,
                                kColumns,
                                {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>},
                                pack_rows<false>,
                                pack_rows<true>,
                                pack_columns<false>,
                                pack_columns<true>,
                                finish_f32,
                                finish_bf16};

}  // namespace waybill::detail
#endif
