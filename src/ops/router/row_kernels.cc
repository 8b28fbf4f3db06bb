// SPDX-License-Identifier: Apache-2.0
#include "ops/router/row_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>

#include "ops/router/row_kernels_body.h"

namespace waybill::router_impl {
namespace {

// Calls body<kScore>(...) for the score at hand. Both softmax kinds share one body.
#define WB_BY_SCORE(function, ...)                                      \
  switch (score) {                                                      \
    case ScoreFunction::kSigmoid:                                       \
      return body::function<ScoreFunction::kSigmoid>(__VA_ARGS__);      \
    case ScoreFunction::kSqrtSoftplus:                                  \
      return body::function<ScoreFunction::kSqrtSoftplus>(__VA_ARGS__); \
    default:                                                            \
      return body::function<ScoreFunction::kSoftmax>(__VA_ARGS__);      \
  }

// One build of all kernels: `attribute` chooses the instruction set of what the bodies are inlined into.
// clang-format off
// NOLINTBEGIN(bugprone-macro-parentheses): neither an attribute nor a name can stand in parentheses.
#define WB_DEFINE_ROW_KERNELS(Build, label, attribute)                                                                                                        \
  struct Build {                                                                                                                                              \
    attribute static void widen_bf16(const std::uint16_t* in, std::int64_t n, float* out) { body::widen_bf16(in, n, out); }                                   \
    attribute static void widen_f16(const std::uint16_t* in, std::int64_t n, float* out) { body::widen_f16(in, n, out); }                                     \
    attribute static bool keys(ScoreFunction score, const float* x, const float* bias, const std::uint32_t* keep, std::int64_t n, std::uint32_t* out) {       \
      WB_BY_SCORE(keys, x, bias, keep, n, out)                                                                                                                \
    }                                                                                                                                                         \
    attribute static bool has_nonfinite(const float* x, std::int64_t n) { return body::has_nonfinite(x, n); }                                                 \
    attribute static std::uint32_t threshold(const std::uint32_t* in, std::int64_t n, std::int64_t k, std::int64_t num_buckets, std::uint32_t* buckets) {     \
      if (num_buckets == kLanes) return body::threshold(in, n, k, kLanes, buckets);                                                                           \
      return body::threshold(in, n, k, num_buckets, buckets);                                                                                                 \
    }                                                                                                                                                         \
    attribute static std::int64_t collect(const std::uint32_t* in, std::int64_t n, std::uint32_t bound, std::uint64_t* out) {                                 \
      return body::collect(in, n, bound, out);                                                                                                                \
    }                                                                                                                                                         \
    attribute static void sort_small(std::uint64_t* values, std::int64_t count, std::uint64_t* out) { body::sort_small(values, count, out); }                 \
    attribute static RowSum full_scores(ScoreFunction score, const float* x, const std::uint32_t* keep, std::int64_t n, float* u) {                           \
      WB_BY_SCORE(full_scores, x, keep, n, u)                                                                                                                 \
    }                                                                                                                                                         \
    attribute static float log_sum_exp(RowSum row) { return body::log_sum_exp(row); }                                                                         \
    attribute static void scale(float* u, std::int64_t n, float factor) { body::scale(u, n, factor); }                                                        \
    attribute static float dot(const float* a, const float* b, std::int64_t n) { return body::dot(a, b, n); }                                                 \
    attribute static void selected_weights(ScoreFunction score, bool renormalise, const RowSum* row, float scale, float epsilon, const float* x,              \
                                           const std::uint8_t* valid, std::int64_t padded_k, float* scratch, float* weights) {                                \
      WB_BY_SCORE(selected_weights, renormalise, row, scale, epsilon, x, valid, padded_k, scratch, weights)                                                   \
    }                                                                                                                                                         \
    attribute static void slopes(ScoreFunction score, const float* x, std::int64_t n, float* out) { WB_BY_SCORE(slopes, x, n, out) }                          \
    attribute static void loss_gradient(ScoreFunction score, const float* x, const float* p, const float* a, float mean, float scale,                         \
                                        const float* softmax, float softmax_scale, std::int64_t n, float* d) {                                                \
      WB_BY_SCORE(loss_gradient, x, p, a, mean, scale, softmax, softmax_scale, n, d)                                                                          \
    }                                                                                                                                                         \
    static constexpr RowKernels table() {                                                                                                                     \
      return {label, widen_bf16, widen_f16, keys, has_nonfinite, threshold, collect, sort_small, full_scores, log_sum_exp, scale, dot,                        \
              selected_weights, slopes, loss_gradient};                                                                                                       \
    }                                                                                                                                                         \
  };
// NOLINTEND(bugprone-macro-parentheses)
// clang-format on

#define WB_NO_ATTRIBUTE
#if defined(__clang__)
#define WB_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,popcnt")))
#else
#define WB_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,popcnt,prefer-vector-width=512")))
#endif
WB_DEFINE_ROW_KERNELS(Portable, "portable", WB_NO_ATTRIBUTE)
#if defined(__x86_64__)
WB_DEFINE_ROW_KERNELS(Avx2, "avx2", __attribute__((target("avx2,fma"))))
WB_DEFINE_ROW_KERNELS(Avx512, "avx512", WB_AVX512)

// body::threshold a vector of buckets at a time.
WB_AVX512 std::uint32_t threshold_avx512(const std::uint32_t* in, std::int64_t n, std::int64_t k, std::int64_t num_buckets, std::uint32_t* buckets) {
  for (std::int64_t block = 0; block < num_buckets; block += kLanes) {
    __m512i largest = _mm512_setzero_si512();
    std::int64_t i = block;
    for (; i + kLanes <= n; i += num_buckets) largest = _mm512_maskz_max_epu32(0xffff, largest, _mm512_loadu_si512(in + i));
    if (i < n) largest = _mm512_maskz_max_epu32(0xffff, largest, _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (n - i)) - 1), in + i));
    _mm512_storeu_si512(buckets + block, largest);
  }
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(k)), one = _mm512_set1_epi32(1);
  __m512i bound = _mm512_set1_epi32(-1);
  for (std::int64_t block = 0; block < num_buckets; block += kLanes) {
    const __m512i mine = _mm512_loadu_si512(buckets + block);
    __m512i num_larger = _mm512_setzero_si512();
    for (std::int64_t b = 0; b < num_buckets; ++b) {
      const __mmask16 is_larger = _mm512_cmpgt_epu32_mask(_mm512_set1_epi32(static_cast<int>(buckets[b])), mine);
      num_larger = _mm512_mask_add_epi32(num_larger, is_larger, num_larger, one);
    }
    bound = _mm512_mask_min_epu32(bound, _mm512_cmplt_epi32_mask(num_larger, limit), bound, mine);
  }
  alignas(64) std::uint32_t lanes[kLanes];
  _mm512_store_si512(lanes, bound);
  std::uint32_t smallest = lanes[0];
  for (std::int64_t lane = 1; lane < kLanes; ++lane) smallest = lanes[lane] < smallest ? lanes[lane] : smallest;
  return smallest > 1 ? smallest : 1;
}

// body::collect with compressed stores: no branch depends on the data. (Full-mask forms: g++ 12 warns inside the plain ones.)
WB_AVX512 std::int64_t collect_avx512(const std::uint32_t* in, std::int64_t n, std::uint32_t bound, std::uint64_t* out) {
  const __m256i bounds = _mm256_set1_epi32(static_cast<int>(bound));
  __m512i low = _mm512_sub_epi64(_mm512_set1_epi64(0xffffffff), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  std::int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {  // a full store at out + count <= out + i stays inside [0, n)
    const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __mmask8 passed = _mm256_cmpge_epu32_mask(keys, bounds);
    const __m512i composites = _mm512_or_si512(_mm512_maskz_slli_epi64(0xff, _mm512_maskz_cvtepu32_epi64(0xff, keys), 32), low);
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi64(passed, composites));
    count += __builtin_popcount(passed);
    low = _mm512_sub_epi64(low, _mm512_set1_epi64(8));
  }
  for (; i < n; ++i) {
    if (in[i] >= bound) out[count++] = body::composite(in[i], i);
  }
  return count;
}
#endif

struct Builds {
  std::array<RowKernels, 3> tables{};
  std::array<const RowKernels*, 4> pointers{};  // best first, null-terminated

  Builds() {
    std::size_t count = 0;
    const auto add = [&](const RowKernels& table) {
      tables[count] = table;
      pointers[count] = &tables[count];
      ++count;
    };
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      RowKernels table = Avx512::table();
      table.threshold = threshold_avx512;
      table.collect = collect_avx512;
      add(table);
    }
    if (has_avx2) add(Avx2::table());
#endif
    add(Portable::table());
  }
};

const Builds& builds() {
  static const Builds instance;
  return instance;
}

}  // namespace

const RowKernels& row_kernels() { return *builds().pointers[0]; }
const RowKernels* const* all_row_kernels() { return builds().pointers.data(); }

}  // namespace waybill::router_impl
