// SPDX-License-Identifier: Apache-2.0
// The dense product that stands beside every run of the BF16 benchmarks.
#pragma once

#include "bench/cuda/gemm_burst.h"
#include "bench/cuda/gemm_dense.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"

namespace waybill::cuda {

// cuBLASLt bf16, 8192^3.
class Anchor {
 public:
  static constexpr std::int64_t kDense = 8192;
  Anchor() : gemm_(kDense, kDense, kDense), a_(kBytes), b_(kBytes), c_(kBytes) {
    fill_normal(a_.data(), DType::kBF16, kBytes / 2, 11, 1.0f, nullptr), fill_normal(b_.data(), DType::kBF16, kBytes / 2, 12, 1.0f, nullptr);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  double tflops() {
    const Spread t = time_burst(stream_, 5, 10, 15, [&] { gemm_.run(a_.data(), b_.data(), c_.data(), stream_); });
    return 2.0 * static_cast<double>(kDense * kDense * kDense) / t.us * 1e-6;
  }

 private:
  static constexpr std::size_t kBytes = static_cast<std::size_t>(kDense * kDense) * 2;
  DenseGemm gemm_;
  CudaStream stream_;
  DeviceBuffer a_, b_, c_;
};

}  // namespace waybill::cuda
