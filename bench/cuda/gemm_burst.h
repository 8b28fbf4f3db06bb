// SPDX-License-Identifier: Apache-2.0
// Bursts of calls, as the matmul benchmarks time them.
#pragma once

#include <algorithm>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
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

}  // namespace waybill::cuda
