// SPDX-License-Identifier: Apache-2.0
// AVX-512 kernel set: register tile 14 x 32 (28 accumulators of 16 lanes), fused multiply-add.
#include "ops/gemm/kernel.h"

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 reports its own _mm512_undefined_*
#endif
#include <immintrin.h>

#include <utility>

#include "ops/gemm/kernel_rows.h"

#define WB_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define WB_AVX512_INLINE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"), always_inline)) inline

namespace waybill::detail {
namespace {

constexpr int kRows = 14;
constexpr int kColumns = 32;
constexpr int kPrefetchBytes = 512;

// Keeps the compiler from holding one pointer for every row of a tile: with 28 accumulators they would live on the stack.
template <class T>
WB_AVX512_INLINE void step(T*& pointer, std::int64_t elements) {
  pointer += elements;
  asm("" : "+r"(pointer));
}

template <int kTileRows>
WB_AVX512_INLINE void multiply_add(const float* a, const float* b, __m512 (&acc)[kTileRows][2]) {
  const __m512 b0 = _mm512_loadu_ps(b);
  const __m512 b1 = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 14
  for (int m = 0; m < kTileRows; ++m) {
    const __m512 scale = _mm512_set1_ps(a[m]);
    acc[m][0] = _mm512_fmadd_ps(scale, b0, acc[m][0]);
    acc[m][1] = _mm512_fmadd_ps(scale, b1, acc[m][1]);
  }
}

template <int kTileRows>
WB_AVX512 void tile(const TileArgs& args) {
  __m512 acc[kTileRows][2];
  const char* line = reinterpret_cast<const char*>(args.next_c);
#pragma GCC unroll 14
  for (int m = 0; m < kTileRows; ++m) {
    acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    _mm_prefetch(line, _MM_HINT_T0);  // the next tile's c is on its way while this one's sums are formed
    _mm_prefetch(line + 124, _MM_HINT_T0);
    step(line, args.c_stride * 4);
  }
  if (args.start != nullptr) {
    const float* start = args.start;
#pragma GCC unroll 14
    for (int m = 0; m < kTileRows; ++m) {
      acc[m][0] = _mm512_loadu_ps(start);
      acc[m][1] = _mm512_loadu_ps(start + 16);
      step(start, args.start_stride);
    }
  }
  const float* a = args.a;
  const float* b = args.b;
  const char* next = args.next.at;
  const std::int64_t next_step = args.next.step;
  std::int64_t left = args.next.left;
  for (std::int64_t k = args.depth / 4; k > 0; --k) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(next, _MM_HINT_T1);
      next += next_step;
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
  if (args.add) {
#pragma GCC unroll 14
    for (int m = 0; m < kTileRows; ++m) {
      _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), acc[m][0]));
      _mm512_storeu_ps(c + 16, _mm512_add_ps(_mm512_loadu_ps(c + 16), acc[m][1]));
      step(c, args.c_stride);
    }
    return;
  }
#pragma GCC unroll 14
  for (int m = 0; m < kTileRows; ++m) {
    _mm512_storeu_ps(c, acc[m][0]);
    _mm512_storeu_ps(c + 16, acc[m][1]);
    step(c, args.c_stride);
  }
}

// Four 32-bit columns of 16 rows, transposed: out[j] holds column j of all rows in order. Rows i, i+4, i+8, i+12 share a register, so
// that the cross-lane part of the transpose is done by the loads.
WB_AVX512_INLINE void transpose_4x16(const char* const* rows, std::int64_t byte, __m512i* out) {
  __m512i r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + byte)));
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 4] + byte)), 1);
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 8] + byte)), 2);
    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i + 12] + byte)), 3);
  }
  const __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), high01 = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(r[2], r[3]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
  out[0] = _mm512_unpacklo_epi64(low01, low23);
  out[1] = _mm512_unpackhi_epi64(low01, low23);
  out[2] = _mm512_unpacklo_epi64(high01, high23);
  out[3] = _mm512_unpackhi_epi64(high01, high23);
}

// 16 rows at a time. A 32-bit column is one fp32 or a pair of bf16, which shifts and masks take apart. Whole registers are stored: what
// lies past the panel's width is overwritten by the next k, and the engine leaves kPackSlack floats after the last panel. (Stores
// under a mask cost several times as much on some machines.)
template <bool kBf16>
WB_AVX512 void pack_sixteen(const char* const* in, int count, int width, std::int64_t depth, float* out) {
  constexpr std::int64_t kStep = kBf16 ? 8 : 4;  // k values in 16 bytes
  const std::int64_t whole = depth / kStep * kStep;
  const char* source[16];
  for (int i = 0; i < 16; ++i) source[i] = in[i < count ? i : 0];  // a missing row repeats row 0
  for (std::int64_t k = 0; k < whole; k += kStep) {
    __m512i column[4];
    // Rows are far apart, so every sixteen bytes a quarter of them asks for a line further on.
    for (int i = 0; i < 4; ++i) _mm_prefetch(source[(k / kStep % 4) * 4 + i] + k * (kBf16 ? 2 : 4) + kPrefetchBytes, _MM_HINT_T1);
    transpose_4x16(source, k * (kBf16 ? 2 : 4), column);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBf16) {
        _mm512_storeu_si512(out, _mm512_slli_epi32(column[j], 16));
        _mm512_storeu_si512(out + width, _mm512_and_si512(column[j], _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        out += 2 * width;
      } else {
        _mm512_storeu_si512(out, column[j]);
        out += width;
      }
    }
  }
  for (std::int64_t k = whole; k < depth; ++k, out += width) {
    for (int i = 0; i < count; ++i) {
      out[i] = kBf16 ? widen_bf16(reinterpret_cast<const std::uint16_t*>(in[i])[k]) : reinterpret_cast<const float*>(in[i])[k];
    }
  }
}

template <bool kBf16>
WB_AVX512 void pack_rows(const void* const* rows, int width, std::int64_t depth, float* panel) {
  const char* const* in = reinterpret_cast<const char* const*>(rows);
  // Right half first: what it writes past the end of a row is the left half of the next.
  if (width > 16) pack_sixteen<kBf16>(in + 16, width - 16, width, depth, panel + 16);
  pack_sixteen<kBf16>(in, width < 16 ? width : 16, width, depth, panel);
}

template <bool kBf16>
WB_AVX512_INLINE __m512 load_sixteen(const char* in) {
  if constexpr (kBf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in))), 16));
  } else {
    return _mm512_loadu_ps(in);
  }
}

template <bool kBf16>
WB_AVX512_INLINE __m512 load_masked(const char* in, __mmask16 mask) {
  if constexpr (kBf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, in)), 16));
  } else {
    return _mm512_maskz_loadu_ps(mask, in);
  }
}

WB_AVX512_INLINE __mmask16 lanes(int count) { return static_cast<__mmask16>(count <= 0 ? 0u : count >= 16 ? 0xffffu : (1u << count) - 1u); }

template <bool kBf16>
WB_AVX512 void pack_columns(const void* const* rows, int num_rows, std::int64_t byte, int width, int panel_width, float* panel) {
  constexpr int kBytes = kBf16 ? 2 : 4;
  const bool full = width == kColumns && panel_width == kColumns;
  const __mmask16 in0 = lanes(width), in1 = lanes(width - 16);
  for (int k = 0; k < num_rows; ++k, panel += panel_width) {
    const char* in = static_cast<const char*>(rows[k]);
    if (full && in != nullptr) {
      _mm512_storeu_ps(panel, load_sixteen<kBf16>(in + byte));
      _mm512_storeu_ps(panel + 16, load_sixteen<kBf16>(in + byte + 16 * kBytes));
      continue;
    }
    const __mmask16 given = in == nullptr ? 0 : 0xffff;
    // Whole registers, as in pack_sixteen; but the call's last row must not touch the panel behind, which may be complete already.
    const __m512 low = load_masked<kBf16>(in + byte, in0 & given);
    if (panel_width <= 16) {
      k + 1 < num_rows ? _mm512_storeu_ps(panel, low) : _mm512_mask_storeu_ps(panel, lanes(panel_width), low);
      continue;
    }
    _mm512_storeu_ps(panel, low);
    _mm512_mask_storeu_ps(panel + 16, lanes(panel_width - 16), load_masked<kBf16>(in + byte + 16 * kBytes, in1 & given));
  }
}

WB_AVX512 void finish_f32(const float* acc, const float* bias, std::int64_t width, bool accumulate, void* out) {
  finish_f32_loop(acc, bias, width, accumulate, out);
}
WB_AVX512 void finish_bf16(const float* acc, const float* bias, std::int64_t width, bool, void* out) { finish_bf16_loop(acc, bias, width, out); }

}  // namespace

const KernelSet kAvx512Kernels = {
    "avx512",
    kRows,
    kColumns,
    {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>},
    pack_rows<false>,
    pack_rows<true>,
    pack_columns<false>,
    pack_columns<true>,
    finish_f32,
    finish_bf16};

}  // namespace waybill::detail
#endif
