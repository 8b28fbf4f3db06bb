// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM: one argument struct for the three products.
#include "convert.h"
#include "waybill/group_rows.h"
#include "waybill/grouped_gemm.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

struct GemmViews {
  TensorView a, weights, offsets, y, a_rows, bias;
  WeightLayout layout;
  bool accumulate;
};

GemmViews to_views(const wb_grouped_gemm_args* args) {
  const wb_grouped_gemm_args given = read_struct(args, "args");
  GemmViews views;
  views.a = to_view(&given.a, "args.a", Memory::kAny);
  views.weights = to_view(&given.weights, "args.weights", Memory::kAny);
  views.offsets = to_view(&given.offsets, "args.offsets", Memory::kAny);
  views.y = to_view(&given.y, "args.y", Memory::kAny);
  views.a_rows = to_view(given.a_rows, "args.a_rows", Memory::kAny);
  views.bias = to_view(given.bias, "args.bias", Memory::kAny);
  views.layout = given.weights_are_lcn != 0 ? WeightLayout::kLCN : WeightLayout::kLNC;
  views.accumulate = given.accumulate != 0;
  return views;
}

}  // namespace

wb_status wb_grouped_gemm(const wb_grouped_gemm_args* args, const wb_stream* stream) noexcept {
  return guarded([&] {
    const GemmViews v = to_views(args);
    grouped_gemm({v.a, v.weights, v.offsets, v.y, v.layout, v.a_rows, v.bias, v.accumulate}, stream_on(stream, v.weights.device, "args.weights"));
  });
}

wb_status wb_grouped_gemm_dgrad(const wb_grouped_gemm_args* args, const wb_stream* stream) noexcept {
  return guarded([&] {
    const GemmViews v = to_views(args);
    WB_CHECK(!v.a_rows && !v.bias, "args.a_rows and args.bias do not apply to dgrad");
    grouped_gemm_dgrad({v.y, v.weights, v.offsets, v.a, v.layout, v.accumulate}, stream_on(stream, v.weights.device, "args.weights"));
  });
}

wb_status wb_grouped_gemm_wgrad(const wb_grouped_gemm_args* args, const wb_stream* stream) noexcept {
  return guarded([&] {
    const GemmViews v = to_views(args);
    grouped_gemm_wgrad({v.a, v.y, v.offsets, v.weights, v.layout, v.a_rows, v.bias, v.accumulate}, stream_on(stream, v.weights.device, "args.weights"));
  });
}

wb_status wb_group_rows(const wb_tensor* sizes, const wb_tensor* offsets, const wb_tensor* rows, int64_t S, const wb_stream* stream) noexcept {
  return guarded([&] {
    GroupRowsArgs args;
    if (sizes != nullptr) args.sizes = to_view(*sizes, "sizes", Memory::kAny);
    args.offsets = to_view(offsets, "offsets", Memory::kAny);
    if (rows != nullptr) args.rows = to_view(*rows, "rows", Memory::kAny);
    args.S = S;
    group_rows(args, stream_on(stream, args.offsets.device, "offsets"));
  });
}
