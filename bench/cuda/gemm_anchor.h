// SPDX-License-Identifier: Apache-2.0
// What the matmul benchmarks share: bursts of calls, and the dense product that stands beside every run.
#pragma once

#include <algorithm>
#include <vector>

#include "bench/cuda/gemm_dense.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "cuda/gemm_spin.h"

namespace waybill::cuda {

inline constexpr double kBytesPerUs = 4.29e6;  // docs/perf/router.md says where the figure comes from

struct Spread {
  double us = 0, spread = 0;
};

// `repetitions` times: the device spins, so that the host queues ahead, then `calls` calls between two events; microseconds a call, the median.
template <class Body>
Spread time_burst(const CudaStream& stream, int repetitions, int calls, double spin_ms, const Body& body) {
  const CudaEvent begin, end;
  body();
  stream.synchronize();
  std::vector<double> us;
  for (int r = 0; r < repetitions; ++r) {
    spin(spin_ms, stream);
    begin.record(stream);
    for (int i = 0; i < calls; ++i) body();
    end.record(stream);
    end.synchronize();
    us.push_back(static_cast<double>(end.elapsed_us_since(begin)) / calls);
  }
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.back() - us.front()};
}

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
