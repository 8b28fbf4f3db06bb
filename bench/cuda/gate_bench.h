// SPDX-License-Identifier: Apache-2.0
// The gate matmul (cuBLASLt) of bench_cuda_router: rows against sums in double, then forward and backward in a graph.
// Floor of a pass: its FLOPs over the dense bf16 rate below (fp32: over a 15th of it), or its bytes over the memory rate, whichever is larger.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <random>
#include <string>

#include "bench/cuda/router_check.h"
#include "bench/cuda/timing.h"
#include "cuda/device_random.h"
#include "ops/router/cuda/gate_gemm.h"

namespace waybill::cuda {

constexpr double kDenseBf16FlopsPerUs = 803e6;  // cuBLAS on this card at 8192^3 (docs/perf/router.md)
constexpr double kFp32FlopsPerUs = 60e6;        // 132 SMs x 128 FMA at 1.77 GHz

class GateBench {
 public:
  explicit GateBench(const GateShape& s)
      : s_(s),
        x_(bytes(s.T, s.H, s.dtype)),
        w_(bytes(s.E, s.H, s.dtype)),
        logits_(bytes(s.T, s.E, DType::kF32)),
        g_(logits_.bytes()),
        dx_(bytes(s.T, s.H, DType::kF32)),
        dw_(bytes(s.E, s.H, DType::kF32)) {
    fill_normal(x_.data(), s.dtype, static_cast<std::size_t>(s.T * s.H), 11, 1.0f, nullptr);
    fill_normal(w_.data(), s.dtype, static_cast<std::size_t>(s.E * s.H), 12, 0.05f, nullptr);
    fill_normal(g_.data(), DType::kF32, static_cast<std::size_t>(s.T * s.E), 13, 1.0f, nullptr);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  void forward() const { gate_forward(s_, x_.data(), w_.data(), logits_.as<float>(), 0, stream_); }
  void backward() const { gate_backward(s_, x_.data(), w_.data(), g_.as<float>(), dx_.as<float>(), dw_.as<float>(), false, 0, stream_); }

  // 64 elements of each result, spread over it, within 2e-5 of the sum of the products' sizes.
  bool check() const {
    for (const DeviceBuffer* buffer : {&logits_, &dx_, &dw_}) buffer->fill(0xff, stream_);
    forward(), backward();
    stream_.synchronize();
    const std::vector<float> x = host(x_, s_.T * s_.H), w = host(w_, s_.E * s_.H), g = host_f32(g_, s_.T * s_.E);
    const std::vector<float> logits = host_f32(logits_, s_.T * s_.E), dx = host_f32(dx_, s_.T * s_.H), dw = host_f32(dw_, s_.E * s_.H);
    const auto at = [](const std::vector<float>& v, std::int64_t i) { return static_cast<double>(v[static_cast<std::size_t>(i)]); };
    const auto same = [&](const char* what, double got, std::int64_t n, const std::function<double(std::int64_t)>& product) {
      double sum = 0, size = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += product(i), size += std::abs(product(i));
      return std::abs(got - sum) <= 2e-5 * size || differs(what, 0, got, sum);
    };
    for (std::int64_t i = 0; i < kSampleRows; ++i) {
      const std::int64_t t = (s_.T - 1) * i / (kSampleRows - 1), e = (s_.E - 1) * (kSampleRows - 1 - i) / (kSampleRows - 1),
                         h = (s_.H - 1) * i / (kSampleRows - 1);
      if (!same("a gate logit", at(logits, t * s_.E + e), s_.H, [&](std::int64_t k) { return at(x, t * s_.H + k) * at(w, e * s_.H + k); })) return false;
      if (!same("a gate d_x", at(dx, t * s_.H + h), s_.E, [&](std::int64_t k) { return at(g, t * s_.E + k) * at(w, k * s_.H + h); })) return false;
      if (!same("a gate d_weight", at(dw, e * s_.H + h), s_.T, [&](std::int64_t k) { return at(g, k * s_.E + e) * at(x, k * s_.H + h); })) return false;
    }
    return true;
  }

  // The least time of a forward pass; a backward pass is two of its matmuls, which read and write more.
  double forward_floor_us() const {
    const double flops = 2.0 * static_cast<double>(s_.T) * static_cast<double>(s_.H) * static_cast<double>(s_.E);
    return std::max(flops / rate(), static_cast<double>(x_.bytes() + w_.bytes() + logits_.bytes()) / 4.29e6);
  }
  double backward_floor_us() const {
    const double flops = 4.0 * static_cast<double>(s_.T) * static_cast<double>(s_.H) * static_cast<double>(s_.E);
    return std::max(flops / rate(), static_cast<double>(x_.bytes() + w_.bytes() + g_.bytes() + dx_.bytes() + dw_.bytes()) / 4.29e6);
  }
  const CudaStream& stream() const { return stream_; }

 private:
  static std::size_t bytes(std::int64_t rows, std::int64_t columns, DType dtype) { return static_cast<std::size_t>(rows * columns) * size_bytes(dtype); }
  double rate() const { return s_.dtype == DType::kBF16 ? kDenseBf16FlopsPerUs : kFp32FlopsPerUs; }
  static std::vector<float> host_f32(const DeviceBuffer& b, std::int64_t count) { return whole<float>(b, static_cast<std::size_t>(count)); }
  std::vector<float> host(const DeviceBuffer& b, std::int64_t count) const {
    if (s_.dtype == DType::kF32) return host_f32(b, count);
    std::vector<float> values;
    for (const std::uint16_t bits : whole<std::uint16_t>(b, static_cast<std::size_t>(count))) {
      const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
      float value = 0;
      std::memcpy(&value, &wide, 4);
      values.push_back(value);
    }
    return values;
  }
  GateShape s_;
  CudaStream stream_;
  DeviceBuffer x_, w_, logits_, g_, dx_, dw_;
};

}  // namespace waybill::cuda
