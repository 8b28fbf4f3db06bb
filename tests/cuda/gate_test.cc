// SPDX-License-Identifier: Apache-2.0
// The gate matmul against sums in double, eager and captured.
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

}  // namespace
}  // namespace waybill::cuda
