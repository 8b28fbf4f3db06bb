// SPDX-License-Identifier: Apache-2.0
// What the GPU quantisers refuse, with the rule and the values, and what they report from the device.
#include <gmock/gmock.h>

#include "cuda/quantize_harness.h"

namespace waybill::cuda {
namespace {

using ::testing::HasSubstr;

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(QuantizeBadInputCuda, NamesRuleAndValues) {
  WB_NEEDS_GPU();
  register_quantize();
  const Pair x(DType::kBF16, {64, 72}), whole(DType::kBF16, {64, 64}), codes(DType::kU8, {64, 64}), scales(DType::kU8, {64, 2}), offsets(DType::kI32, {3});
  const Stream gpu{kGpu, nullptr, nullptr};
  const auto call = [&](const TensorView& in, const QuantizedView& to) { return refusal([&] { quantize(mxfp8_rows(), in, {}, to, gpu); }); };
  const QuantizedView out{codes.gpu(), scales.gpu(), {}};
  EXPECT_THAT(call(x.gpu(), out), HasSubstr("C (columns) = 72 does not fit MXFP8: it must be a multiple of 32"));
  EXPECT_THAT(call(whole.gpu(), {codes.cpu(), scales.gpu(), {}}), HasSubstr("codes is not on cuda:0"));
  EXPECT_THAT(refusal([&] {
                quantize(fp8_rows(), x.gpu(), offsets.cpu(), {codes.gpu(), scales.gpu(), {}}, gpu);
              }),
              HasSubstr("offsets must be int32 [L + 1] on cuda:0"));
  EXPECT_THAT(refusal([&] { quantize(mxfp8_rows(), whole.gpu(), {}, out, {}); }), HasSubstr("the stream is on cpu"));
}

TEST(QuantizeBadInputCuda, BrokenOffsetsAreReportedAndStayInside) {
  WB_NEEDS_GPU();
  register_quantize();
  const Pair x(DType::kBF16, {300, 128}, true), offsets(DType::kI32, {4}, false);
  const QuantConfig config{ElementFormat::kE4M3, ScaleFormat::kPowerOfTwo, ScaleRule::kRoundUp, 128, 1};
  for (const std::vector<std::int32_t>& values :
       {std::vector<std::int32_t>{0, 200, 100, 300}, {0, 100, 200, 100000}, {-5, 100, 200, 300}, {7, 100, 200, 300}}) {
    DeviceStatus status;
    const Pair codes(DType::kU8, {300, 128}), scales(DType::kF32, {max_block_rows(300, 3, 128), 128}),
        turned(DType::kU8, {max_block_rows(300, 3, 128), 128, 128});
    offsets.memory.upload(values.data(), 16);
    WB_TRY_CUDA(cudaDeviceSynchronize());
    const CudaStream s;
    quantize(config, x.gpu(), offsets.gpu(), {codes.gpu(), scales.gpu(), {}, turned.gpu(), {}}, {kGpu, s.get(), nullptr}, status.device_ptr());
    EXPECT_EQ(status.read(s).flags, kStatusBadOffsets) << values[0] << " " << values[1] << " " << values[2] << " " << values[3];
  }
  // Too few blocks: what fits is written.
  DeviceStatus status;
  const std::vector<std::int32_t> values = {0, 100, 200, 300};
  const Pair codes(DType::kU8, {300, 128}), scales(DType::kF32, {2, 128});
  offsets.memory.upload(values.data(), 16);
  WB_TRY_CUDA(cudaDeviceSynchronize());
  const CudaStream s;
  quantize(config, x.gpu(), offsets.gpu(), {codes.gpu(), scales.gpu(), {}}, {kGpu, s.get(), nullptr}, status.device_ptr());
  EXPECT_EQ(status.read(s).flags, kStatusBadOffsets);
}

}  // namespace
}  // namespace waybill::cuda
