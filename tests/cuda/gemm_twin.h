// SPDX-License-Identifier: Apache-2.0
// Tensors with the same values on the CPU and on the GPU, for tests of the public calls.
#pragma once

#include <cmath>

#include "cuda/gemm_harness.h"
#include "waybill/grouped_gemm.h"

namespace waybill::cuda {

inline constexpr Device kGpu{DeviceType::kCuda, 0};

inline bool has_gpu() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  return found;
}

// A tensor on both sides with the same values.
struct Twin {
  Tensor host;
  DeviceBuffer memory;

  Twin() = default;
  Twin(DType dtype, std::initializer_list<std::int64_t> shape, unsigned seed) : host(dtype, shape), memory(bytes(host) + 16) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < host.size(); ++i) {
      if (dtype == DType::kF32) host.as<float>()[i] = normal(random);
      if (dtype == DType::kBF16) host.as<bf16>()[i] = bf16(normal(random));
    }
    upload();
  }
  Twin(const std::vector<std::int32_t>& values) : host(DType::kI32, {static_cast<std::int64_t>(values.size())}), memory(values.size() * 4 + 16) {
    std::copy(values.begin(), values.end(), host.as<std::int32_t>());
    upload();
  }
  static std::size_t bytes(const Tensor& t) { return static_cast<std::size_t>(t.size()) * size_bytes(t.view().dtype); }
  void upload() const {
    memory.upload(host.view().data, bytes(host));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  TensorView device() const {
    TensorView view = host.view();
    if (!host) return {};
    view.data = memory.data(), view.device = kGpu;
    return view;
  }
  float host_at(std::int64_t i) const { return host.view().dtype == DType::kF32 ? host.as<float>()[i] : static_cast<float>(host.as<bf16>()[i]); }
  std::vector<float> download() const {
    std::vector<std::byte> raw(bytes(host));
    memory.download(raw.data(), raw.size());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    std::vector<float> values(static_cast<std::size_t>(host.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (host.view().dtype == DType::kF32) {
        std::memcpy(&values[i], raw.data() + 4 * i, 4);
      } else {
        std::uint16_t bits;
        std::memcpy(&bits, raw.data() + 2 * i, 2);
        values[i] = bf16::to_float(bits);
      }
    }
    return values;
  }
};

// The device's values against the host tensor, to the rounding of its type and of fp32 sums.
inline void expect_close(const Twin& twin, const std::string& what) {
  const std::vector<float> got = twin.download();
  const float step = twin.host.view().dtype == DType::kBF16 ? 0.0079f : 3e-5f;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float want = twin.host_at(static_cast<std::int64_t>(i));
    ASSERT_NEAR(got[i], want, step * std::fabs(want) + 3e-4f) << what << ", element " << i;
  }
}

// The same within `step` of the value and of the tensor's largest one: for chains of calls that round in between.
inline void expect_near(const Twin& twin, float step, const std::string& what) {
  const std::vector<float> got = twin.download();
  float largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) largest = std::max(largest, std::fabs(twin.host_at(static_cast<std::int64_t>(i))));
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float want = twin.host_at(static_cast<std::int64_t>(i));
    ASSERT_NEAR(got[i], want, step * (std::fabs(want) + 0.1f * largest)) << what << ", element " << i;
  }
}

inline Stream stream_of(const CudaStream& stream) { return Stream{kGpu, stream.get(), nullptr}; }

}  // namespace waybill::cuda
