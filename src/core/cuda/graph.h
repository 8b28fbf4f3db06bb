// SPDX-License-Identifier: Apache-2.0
// Capture of a stream into a graph that can be replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace waybill::cuda {

// Owns an executable graph. Destroy graphs that hold NCCL calls before their communicator.
class GraphExec {
 public:
  GraphExec() = default;
  // Runs body(stream) under capture (relaxed to this thread) and instantiates the result. A throw inside body ends the capture
  // and is passed on. Nothing in body may wait for the device or allocate.
  static GraphExec capture(cudaStream_t stream, const std::function<void(cudaStream_t)>& body);
  ~GraphExec();
  GraphExec(GraphExec&& other) noexcept : exec_(other.exec_) { other.exec_ = nullptr; }
  GraphExec& operator=(GraphExec&& other) noexcept;
  GraphExec(const GraphExec&) = delete;
  GraphExec& operator=(const GraphExec&) = delete;

  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace waybill::cuda
