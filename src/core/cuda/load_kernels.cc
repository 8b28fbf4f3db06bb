// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/load_kernels.h"

#include <vector>

#include "core/cuda/driver_function.h"
#include "core/cuda/scratch_buffer.h"

namespace waybill::cuda {
namespace {

void check(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) WB_FAIL(ErrorCode::kCuda, "{} failed: {}", call, driver_error_text(result));
}

void load(cudaGraph_t graph) {
  static const auto get_params = driver_function<decltype(cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams", 12000);
  static const auto function_of = driver_function<decltype(cuKernelGetFunction)>("cuKernelGetFunction", 12000);
  static const auto load_function = driver_function<decltype(cuFuncLoad)>("cuFuncLoad", 12040);
  std::size_t count = 0;
  WB_TRY_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) WB_TRY_CUDA(cudaGraphGetNodes(graph, nodes.data(), &count));
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    WB_TRY_CUDA(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS params{};
    check(get_params(node, &params), "cuGraphKernelNodeGetParams");
    CUfunction function = params.func;
    if (function == nullptr) check(function_of(&function, params.kern), "cuKernelGetFunction");
    check(load_function(function), "cuFuncLoad");
  }
}

}  // namespace

void load_kernels(cudaStream_t stream, const std::function<void()>& body) {
  cudaGraph_t graph = nullptr;
  {
    const Rehearsal rehearsal;
    WB_TRY_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    try {
      body();
    } catch (...) {
      WB_TRY_CUDA_NOEXCEPT(cudaStreamEndCapture(stream, &graph));
      if (graph != nullptr) WB_TRY_CUDA_NOEXCEPT(cudaGraphDestroy(graph));
      throw;
    }
    WB_TRY_CUDA(cudaStreamEndCapture(stream, &graph));
  }
  try {
    load(graph);
  } catch (...) {
    WB_TRY_CUDA_NOEXCEPT(cudaGraphDestroy(graph));
    throw;
  }
  WB_TRY_CUDA(cudaGraphDestroy(graph));
}

}  // namespace waybill::cuda
