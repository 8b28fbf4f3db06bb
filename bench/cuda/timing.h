// SPDX-License-Identifier: Apache-2.0
// Timing on a GPU: one graph of `iterations` launches over rotating buffers, replayed; microseconds a launch.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/graph.h"

namespace waybill::cuda {

struct Timing {
  double p50 = 0, p10 = 0, p90 = 0, p99 = 0;
  int iterations = 0;  // launches in one graph
  int replays = 0;
  double spread() const { return p90 - p10; }
};

// body(i) queues launch number i on `stream`; i selects the buffers. The median over replays of (replay time / iterations): gaps
// between kernels inside a graph are part of it, the launch of the graph is spread over its iterations.
inline Timing time_captured(const CudaStream& stream, int iterations, int replays, const std::function<void(int)>& body) {
  for (int i = 0; i < 2; ++i) body(i % iterations);
  stream.synchronize();
  const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t) {
    for (int i = 0; i < iterations; ++i) body(i);
  });
  const CudaEvent begin, end;
  std::vector<double> us;
  for (int r = 0; r < replays + 3; ++r) {
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    end.synchronize();
    if (r >= 3) us.push_back(static_cast<double>(end.elapsed_us_since(begin)) / iterations);
  }
  std::sort(us.begin(), us.end());
  const auto at = [&](double q) { return us[static_cast<std::size_t>(q * static_cast<double>(us.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.1), at(0.9), at(0.99), iterations, replays};
}

}  // namespace waybill::cuda
