// SPDX-License-Identifier: Apache-2.0
#include "ops/router/row_kernels.h"

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
      return {label, widen_bf16, widen_f16, keys, has_nonfinite, threshold, collect, full_scores, log_sum_exp, scale, dot,                                     \
              selected_weights, slopes, loss_gradient};                                                                                                       \
    }                                                                                                                                                         \
  };
// clang-format on

#define WB_NO_ATTRIBUTE
WB_DEFINE_ROW_KERNELS(Portable, "portable", WB_NO_ATTRIBUTE)
#if defined(__x86_64__)
WB_DEFINE_ROW_KERNELS(Avx2, "avx2", __attribute__((target("avx2,fma"))))
#if defined(__clang__)
WB_DEFINE_ROW_KERNELS(Avx512, "avx512", __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))))
#else
WB_DEFINE_ROW_KERNELS(Avx512, "avx512", __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))))
#endif
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
      add(Avx512::table());
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
