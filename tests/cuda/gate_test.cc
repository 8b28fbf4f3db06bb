// SPDX-License-Identifier: Apache-2.0
// The gate matmul against sums in double, eager and captured.
#include "waybill/gate.h"

#include "cuda/router_harness.h"
#include "ops/router/cuda/gate_gemm.h"

namespace waybill::cuda {
namespace {

struct Operands {
  std::vector<float> x, w, g;  // already rounded to the type
};

Operands make_operands(const GateShape& s) {
  std::mt19937 random(static_cast<unsigned>(s.T + s.E));
  std::normal_distribution<float> normal;
  const auto fill = [&](std::int64_t count, bool round) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (float& e : v) e = round ? static_cast<float>(bf16(normal(random))) : normal(random);
    return v;
  };
  const bool round = s.dtype == DType::kBF16;
  return {fill(s.T * s.H, round), fill(s.E * s.H, round), fill(s.T * s.E, false)};
}

DeviceBuffer upload(const std::vector<float>& v, DType dtype) {
  DeviceBuffer buffer(v.size() * size_bytes(dtype) + 16);
  if (dtype == DType::kF32) {
    buffer.upload(v.data(), v.size() * 4);
  } else {
    std::vector<std::uint16_t> bits(v.size());
    for (std::size_t i = 0; i < v.size(); ++i) bits[i] = bf16::from_float(v[i]);
    buffer.upload(bits.data(), bits.size() * 2);
  }
  WB_TRY_CUDA(cudaDeviceSynchronize());
  return buffer;
}

TEST(GateCuda, ForwardAndBackwardMatchSumsInDouble) {
  WB_NEEDS_GPU();
  for (const GateShape s : {GateShape{33, 64, 16, DType::kF32}, GateShape{40, 128, 24, DType::kBF16}, GateShape{8, 256, 256, DType::kBF16}}) {
    const Operands o = make_operands(s);
    const DeviceBuffer x = upload(o.x, s.dtype), w = upload(o.w, s.dtype), g = upload(o.g, DType::kF32);
    const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count) * 4; };
    const DeviceBuffer logits(bytes(s.T * s.E)), dx(bytes(s.T * s.H)), dw(bytes(s.E * s.H));
    const CudaStream stream;
    const auto launch = [&] {
      gate_forward(s, x.data(), w.data(), logits.as<float>(), 0, stream);
      gate_backward(s, x.data(), w.data(), g.as<float>(), dx.as<float>(), dw.as<float>(), false, 0, stream);
    };
    launch();
    const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t) { launch(); });
    logits.fill(0xcd, stream), dx.fill(0xcd, stream), dw.fill(0xcd, stream);
    graph.launch(stream);
    std::vector<float> got_logits(o.g.size()), got_dx(o.x.size()), got_dw(o.w.size());
    logits.download(got_logits.data(), logits.bytes(), stream), dx.download(got_dx.data(), dx.bytes(), stream), dw.download(got_dw.data(), dw.bytes(), stream);
    stream.synchronize();
    const auto at = [](const std::vector<float>& v, std::int64_t i) { return static_cast<double>(v[static_cast<std::size_t>(i)]); };
    // fp32 sums of up to 256 products; split gradients carry 2^-17 relative.
    for (std::int64_t t = 0; t < s.T; ++t) {
      for (std::int64_t e = 0; e < s.E; ++e) {
        double sum = 0;
        for (std::int64_t h = 0; h < s.H; ++h) sum += at(o.x, t * s.H + h) * at(o.w, e * s.H + h);
        ASSERT_NEAR(at(got_logits, t * s.E + e), sum, 1e-4) << "logit " << t << ", " << e;
      }
      for (std::int64_t h = 0; h < s.H; ++h) {
        double sum = 0;
        for (std::int64_t e = 0; e < s.E; ++e) sum += at(o.g, t * s.E + e) * at(o.w, e * s.H + h);
        ASSERT_NEAR(at(got_dx, t * s.H + h), sum, 3e-4) << "d_x " << t << ", " << h;
      }
    }
    for (std::int64_t e = 0; e < s.E; ++e) {
      for (std::int64_t h = 0; h < s.H; ++h) {
        double sum = 0;
        for (std::int64_t t = 0; t < s.T; ++t) sum += at(o.g, t * s.E + e) * at(o.x, t * s.H + h);
        ASSERT_NEAR(at(got_dw, e * s.H + h), sum, 3e-4) << "d_weight " << e << ", " << h;
      }
    }
  }
}

// waybill/gate.h with device memory: the same bits as the kernels' own entry; what does not fit is refused.
TEST(GateCuda, ThePublicApiTakesDeviceMemory) {
  WB_NEEDS_GPU();
  register_router();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const GateShape s{24, 64, 16, dtype};
    const Operands o = make_operands(s);
    const DeviceBuffer x = upload(o.x, dtype), w = upload(o.w, dtype), g = upload(o.g, DType::kF32);
    const auto bytes = [](std::int64_t count) { return static_cast<std::size_t>(count) * 4; };
    const DeviceBuffer logits[2] = {DeviceBuffer(bytes(s.T * s.E)), DeviceBuffer(bytes(s.T * s.E))},
                       dx[2] = {DeviceBuffer(bytes(s.T * s.H)), DeviceBuffer(bytes(s.T * s.H))},
                       dw[2] = {DeviceBuffer(bytes(s.E * s.H)), DeviceBuffer(bytes(s.E * s.H))};
    const CudaStream stream;
    const Stream queue{x.device(), stream.get(), nullptr};
    const TensorView vx(x.data(), dtype, {s.T, s.H}, x.device()), vw(w.data(), dtype, {s.E, s.H}, x.device());
    const auto f32 = [&](const DeviceBuffer& b, std::int64_t rows, std::int64_t columns) {
      return TensorView(b.data(), DType::kF32, {rows, columns}, x.device());
    };
    waybill::gate_forward(vx, vw, f32(logits[0], s.T, s.E), queue);
    waybill::gate_backward(vx, vw, f32(g, s.T, s.E), f32(dx[0], s.T, s.H), f32(dw[0], s.E, s.H), false, queue);
    gate_forward(s, x.data(), w.data(), logits[1].as<float>(), 0, stream);
    gate_backward(s, x.data(), w.data(), g.as<float>(), dx[1].as<float>(), dw[1].as<float>(), false, 0, stream);
    for (const DeviceBuffer* pair : {logits, dx, dw}) {
      std::vector<std::byte> a(pair[0].bytes()), b(a.size());
      pair[0].download(a.data(), a.size(), stream), pair[1].download(b.data(), b.size(), stream);
      stream.synchronize();
      EXPECT_EQ(a, b) << to_string(dtype);
    }
    EXPECT_THROW(waybill::gate_forward(vx, vw, f32(logits[0], s.T, s.E - 1), queue), Error);
  }
}

}  // namespace
}  // namespace waybill::cuda
