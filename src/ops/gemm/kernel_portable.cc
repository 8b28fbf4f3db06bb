// SPDX-License-Identifier: Apache-2.0
// The kernel set for any machine: plain C++ with the interface of the others.
#include "ops/gemm/kernel.h"
#include "ops/gemm/kernel_rows.h"

namespace waybill::detail {
namespace {

constexpr int kRows = 4;
constexpr int kColumns = 8;

template <int kTileRows>
void tile(const TileArgs& args) {
  float acc[kTileRows][kColumns] = {};
  for (int m = 0; args.start != nullptr && m < kTileRows; ++m) {
    for (int n = 0; n < kColumns; ++n) acc[m][n] = args.start[m * args.start_stride + n];
  }
  for (std::int64_t k = 0; k < args.depth; ++k) {
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < kColumns; ++n) acc[m][n] += args.a[k * kTileRows + m] * args.b[k * args.b_stride + n];
    }
  }
  for (int m = 0; m < kTileRows; ++m) {
    float* out = args.c + m * args.c_stride;
    for (int n = 0; n < kColumns; ++n) out[n] = args.add ? out[n] + acc[m][n] : acc[m][n];
  }
}

template <class Element>
void pack_rows(const void* const* rows, int width, std::int64_t depth, float* panel) {
  for (int row = 0; row < width; ++row) {
    const Element* in = static_cast<const Element*>(rows[row]);
    for (std::int64_t k = 0; k < depth; ++k) panel[k * width + row] = static_cast<float>(in[k]);
  }
}

template <bool kBf16>
void pack_columns(const void* const* rows, int num_rows, std::int64_t byte, int width, int panel_width, float* panel) {
  pack_columns_loop<kBf16>(rows, num_rows, byte, width, panel_width, panel);
}
void finish_f32(const float* acc, const float* bias, std::int64_t width, bool accumulate, void* out) { finish_f32_loop(acc, bias, width, accumulate, out); }
void finish_bf16(const float* acc, const float* bias, std::int64_t width, bool, void* out) { finish_bf16_loop(acc, bias, width, out); }

}  // namespace

const KernelSet kPortableKernels = {
    "portable",         kRows,      kColumns,   {nullptr, tile<1>, tile<2>, tile<3>, tile<4>}, pack_rows<float>, pack_rows<bf16>, pack_columns<false>,
    pack_columns<true>, finish_f32, finish_bf16};

}  // namespace waybill::detail
