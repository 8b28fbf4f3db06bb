// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/graph.h"

#include <utility>

#include "core/cuda/cuda_error.h"

namespace waybill::cuda {

GraphExec GraphExec::capture(cudaStream_t stream, const std::function<void(cudaStream_t)>& body) {
  cudaGraph_t graph = nullptr;
  WB_TRY_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    body(stream);
  } catch (...) {
    WB_TRY_CUDA_NOEXCEPT(cudaStreamEndCapture(stream, &graph));
    if (graph != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaGraphDestroy(graph));
    throw;
  }
  WB_TRY_CUDA(cudaStreamEndCapture(stream, &graph));
  GraphExec result;
  const cudaError_t error = cudaGraphInstantiate(&result.exec_, graph, 0);
  WB_TRY_CUDA_NOEXCEPT(cudaGraphDestroy(graph));
  WB_TRY_CUDA(error);
  return result;
}

GraphExec::~GraphExec() {
  if (exec_ != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaGraphExecDestroy(exec_));
}

GraphExec& GraphExec::operator=(GraphExec&& other) noexcept {
  std::swap(exec_, other.exec_);
  return *this;
}

void GraphExec::launch(cudaStream_t stream) const {
  WB_CHECK(exec_ != nullptr, "an empty graph cannot be launched");
  WB_TRY_CUDA(cudaGraphLaunch(exec_, stream));
}

}  // namespace waybill::cuda
