// SPDX-License-Identifier: Apache-2.0
// grouped_gemm() and its siblings on CUDA tensors against the same calls on the CPU's reference loops.
#include "cuda/gemm_twin.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/gemm_ref.h"
#include "waybill/grouped_gemm.h"

namespace waybill::cuda {
namespace {

struct Sizes {
  std::int64_t L = 5, N = 72, C = 104;
  std::vector<std::int32_t> offsets = {0, 40, 40, 57, 190, 200};
  std::int64_t rows = 210;
};

struct Variant {
  DType operands, result;
  WeightLayout layout;
  bool accumulate, bias, listed;
};

std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const WeightLayout layout : {WeightLayout::kLNC, WeightLayout::kLCN}) {
    for (const DType operands : {DType::kBF16, DType::kF32}) {
      for (const bool listed : {false, true}) {
        all.push_back({operands, DType::kBF16, layout, false, true, listed});
        all.push_back({operands, DType::kF32, layout, false, false, listed});
        all.push_back({operands, DType::kF32, layout, true, true, listed});
      }
    }
  }
  return all;
}

std::string text(const Variant& v) {
  return std::string(to_string(v.operands)) + " to " + to_string(v.result) + (v.layout == WeightLayout::kLNC ? ", LNC" : ", LCN") +
         (v.accumulate ? ", accumulate" : "") + (v.listed ? ", listed" : "");
}

std::vector<std::int32_t> row_list(const Sizes& s) {
  std::vector<std::int32_t> rows(static_cast<std::size_t>(s.rows));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = i % 11 == 5 ? -1 : static_cast<std::int32_t>((i * 37) % static_cast<std::size_t>(s.rows));
  return rows;
}

GroupedGemmArgs forward_args(const TensorView& a, const TensorView& weights, const TensorView& offsets, const TensorView& y,
                             WeightLayout layout = WeightLayout::kLNC) {
  GroupedGemmArgs args;
  args.a = a, args.weights = weights, args.offsets = offsets, args.y = y, args.layout = layout;
  return args;
}
GroupedGemmDgradArgs dgrad_args(const TensorView& dy, const TensorView& weights, const TensorView& offsets, const TensorView& da, WeightLayout layout) {
  GroupedGemmDgradArgs args;
  args.dy = dy, args.weights = weights, args.offsets = offsets, args.da = da, args.layout = layout;
  return args;
}
GroupedGemmWgradArgs wgrad_args(const TensorView& a, const TensorView& dy, const TensorView& offsets, const TensorView& d_weights, WeightLayout layout) {
  GroupedGemmWgradArgs args;
  args.a = a, args.dy = dy, args.offsets = offsets, args.d_weights = d_weights, args.layout = layout;
  return args;
}

Twin weights_twin(const Sizes& s, DType dtype, WeightLayout layout, unsigned seed) {
  return layout == WeightLayout::kLNC ? Twin(dtype, {s.L, s.N, s.C}, seed) : Twin(dtype, {s.L, s.C, s.N}, seed);
}

TEST(GroupedGemmApiCuda, ForwardMatchesTheReference) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_gemm();
  const Sizes s;
  const CudaStream stream;
  for (const Variant& v : variants()) {
    const Twin a(v.operands, {s.rows, s.C}, 1), w = weights_twin(s, v.operands, v.layout, 2), y(v.result, {s.rows, s.N}, 3), bias(DType::kF32, {s.L, s.N}, 4);
    const Twin offsets(s.offsets), rows(row_list(s));
    auto host = forward_args(a.host, w.host, offsets.host, y.host, v.layout),
         device = forward_args(a.device(), w.device(), offsets.device(), y.device(), v.layout);
    host.accumulate = device.accumulate = v.accumulate;
    if (v.bias) host.bias = bias.host, device.bias = bias.device();
    if (v.listed) host.a_rows = rows.host, device.a_rows = rows.device();
    grouped_gemm(device, stream_of(stream));
    stream.synchronize();
    grouped_gemm_ref(host);
    expect_close(y, "forward " + text(v));
  }
}

TEST(GroupedGemmApiCuda, DgradMatchesTheReference) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_gemm();
  const Sizes s;
  const CudaStream stream;
  for (const Variant& v : variants()) {
    if (v.listed) continue;
    const Twin dy(v.operands, {s.rows, s.N}, 1), w = weights_twin(s, v.operands, v.layout, 2), da(v.result, {s.rows, s.C}, 3), offsets(s.offsets);
    auto host = dgrad_args(dy.host, w.host, offsets.host, da.host, v.layout),
         device = dgrad_args(dy.device(), w.device(), offsets.device(), da.device(), v.layout);
    host.accumulate = device.accumulate = v.accumulate;
    grouped_gemm_dgrad(device, stream_of(stream));
    stream.synchronize();
    grouped_gemm_dgrad_ref(host);
    expect_close(da, "dgrad " + text(v));
  }
}

TEST(GroupedGemmApiCuda, WgradMatchesTheReference) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_gemm();
  const Sizes s;
  const CudaStream stream;
  for (const Variant& v : variants()) {
    const Twin a(v.operands, {s.rows, s.C}, 1), dy(v.operands, {s.rows, s.N}, 2), dw = weights_twin(s, v.result, v.layout, 3), db(DType::kF32, {s.L, s.N}, 4);
    const Twin offsets(s.offsets), rows(row_list(s));
    auto host = wgrad_args(a.host, dy.host, offsets.host, dw.host, v.layout),
         device = wgrad_args(a.device(), dy.device(), offsets.device(), dw.device(), v.layout);
    host.accumulate = device.accumulate = v.accumulate;
    host.d_bias = db.host, device.d_bias = db.device();
    if (v.listed) host.a_rows = rows.host, device.a_rows = rows.device();
    grouped_gemm_wgrad(device, stream_of(stream));
    stream.synchronize();
    grouped_gemm_wgrad_ref(host);
    expect_close(dw, "wgrad " + text(v));
    expect_close(db, "d_bias " + text(v));
  }
}

TEST(GroupedGemmApiCuda, UnalignedOperandsTakeThePortableKernel) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_gemm();
  Sizes s;
  s.N = 37, s.C = 51;
  const CudaStream stream;
  const Twin a(DType::kBF16, {s.rows, s.C}, 1), w(DType::kBF16, {s.L, s.N, s.C}, 2), y(DType::kBF16, {s.rows, s.N}, 3), offsets(s.offsets);
  grouped_gemm(forward_args(a.device(), w.device(), offsets.device(), y.device()), stream_of(stream));
  stream.synchronize();
  grouped_gemm_ref(forward_args(a.host, w.host, offsets.host, y.host));
  expect_close(y, "37 x 51");
}

TEST(GroupedGemmApiCuda, WrongDevicesAreRefusedBeforeALaunch) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  register_gemm();
  const Sizes s;
  const CudaStream stream;
  const Twin a(DType::kBF16, {s.rows, s.C}, 1), w(DType::kBF16, {s.L, s.N, s.C}, 2), y(DType::kBF16, {s.rows, s.N}, 3), offsets(s.offsets);
  const auto message = [&](const GroupedGemmArgs& args, Stream on) {
    try {
      grouped_gemm(args, on);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message(forward_args(a.host, w.device(), offsets.device(), y.device()), stream_of(stream)),
            "grouped_gemm: a is not on cuda:0: bf16 [210, 104] on cpu");
  EXPECT_EQ(message(forward_args(a.device(), w.device(), offsets.host, y.device()), stream_of(stream)),
            "grouped_gemm: offsets is not on cuda:0: i32 [6] on cpu");
  EXPECT_EQ(message(forward_args(a.device(), w.device(), offsets.device(), y.device()), Stream::cpu()),
            "grouped_gemm: the stream is on cpu, the tensors are on cuda:0");
  TensorView odd = a.device();
  odd.data = static_cast<std::byte*>(odd.data) + 1;
  EXPECT_NE(message(forward_args(odd, w.device(), offsets.device(), y.device()), stream_of(stream)).find("must be aligned to its elements of 2 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace waybill::cuda
