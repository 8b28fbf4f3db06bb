// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/element.h"
#include "ops/gemm/gemm_ref.h"

namespace waybill {
namespace {

using detail::load_element;
using detail::store_element;

struct Weights {
  std::int64_t N, C;
  WeightLayout layout;
  std::int64_t at(std::int64_t g, std::int64_t n, std::int64_t c) const { return g * N * C + (layout == WeightLayout::kLNC ? n * C + c : c * N + n); }
};

Weights weights_of(const TensorView& weights, WeightLayout layout) {
  const bool lnc = layout == WeightLayout::kLNC;
  return {weights.shape[lnc ? 1 : 2], weights.shape[lnc ? 2 : 1], layout};
}

// The row of `a` behind slot s; -1 = a padding row.
std::int64_t source_row(const TensorView& a_rows, std::int64_t s) { return a_rows ? a_rows.as<std::int32_t>()[s] : s; }

void put(const TensorView& out, std::int64_t index, double value, bool accumulate) {
  store_element(out, index, static_cast<float>(accumulate ? value + load_element(out, index) : value));
}

}  // namespace

void grouped_gemm_ref(const GroupedGemmArgs& args) {
  const Weights w = weights_of(args.weights, args.layout);
  const std::int32_t* offsets = args.offsets.as<std::int32_t>();
  for (std::int64_t g = 0; g < args.weights.shape[0]; ++g) {
    for (std::int64_t s = offsets[g]; s < offsets[g + 1]; ++s) {
      const std::int64_t row = source_row(args.a_rows, s);
      for (std::int64_t n = 0; n < w.N; ++n) {
        double sum = 0;
        for (std::int64_t c = 0; row >= 0 && c < w.C; ++c) {
          sum += static_cast<double>(load_element(args.a, row * w.C + c)) * load_element(args.weights, w.at(g, n, c));
        }
        if (row >= 0 && args.bias) sum += load_element(args.bias, g * w.N + n);
        put(args.y, s * w.N + n, sum, args.accumulate);
      }
    }
  }
}

void grouped_gemm_dgrad_ref(const GroupedGemmDgradArgs& args) {
  const Weights w = weights_of(args.weights, args.layout);
  const std::int32_t* offsets = args.offsets.as<std::int32_t>();
  for (std::int64_t g = 0; g < args.weights.shape[0]; ++g) {
    for (std::int64_t s = offsets[g]; s < offsets[g + 1]; ++s) {
      for (std::int64_t c = 0; c < w.C; ++c) {
        double sum = 0;
        for (std::int64_t n = 0; n < w.N; ++n) sum += static_cast<double>(load_element(args.dy, s * w.N + n)) * load_element(args.weights, w.at(g, n, c));
        put(args.da, s * w.C + c, sum, args.accumulate);
      }
    }
  }
}

void grouped_gemm_wgrad_ref(const GroupedGemmWgradArgs& args) {
  const Weights w = weights_of(args.d_weights, args.layout);
  const std::int32_t* offsets = args.offsets.as<std::int32_t>();
  for (std::int64_t g = 0; g < args.d_weights.shape[0]; ++g) {
    for (std::int64_t n = 0; n < w.N; ++n) {
      for (std::int64_t c = 0; c < w.C; ++c) {
        double sum = 0;
        for (std::int64_t s = offsets[g]; s < offsets[g + 1]; ++s) {
          const std::int64_t row = source_row(args.a_rows, s);
          if (row >= 0) sum += static_cast<double>(load_element(args.dy, s * w.N + n)) * load_element(args.a, row * w.C + c);
        }
        if (offsets[g] < offsets[g + 1] || !args.accumulate) put(args.d_weights, w.at(g, n, c), sum, args.accumulate);
      }
      if (!args.d_bias || (offsets[g] == offsets[g + 1] && args.accumulate)) continue;
      double sum = 0;
      for (std::int64_t s = offsets[g]; s < offsets[g + 1]; ++s) {
        if (source_row(args.a_rows, s) >= 0) sum += load_element(args.dy, s * w.N + n);
      }
      put(args.d_bias, g * w.N + n, sum, args.accumulate);
    }
  }
}

}  // namespace waybill
