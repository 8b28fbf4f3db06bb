// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/gemm_dense.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include "core/cuda/device_buffer.h"
#include "waybill/error.h"

namespace waybill::cuda {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{64} << 20;

void* library() {
  static void* const handle = [] {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
      if (void* found = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return found;
    }
    WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt was not found; put its folder on LD_LIBRARY_PATH");
  }();
  return handle;
}

template <class Function>
Function* find(const char* name) {
  void* found = dlsym(library(), name);
  if (found == nullptr) WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt has no {}", name);
  return reinterpret_cast<Function*>(found);
}
#define WB_CUBLASLT(name, ...)                                                                                                             \
  do {                                                                                                                                     \
    const cublasStatus_t wb_status = find<decltype(::name)>(#name)(__VA_ARGS__);                                                           \
    if (wb_status != CUBLAS_STATUS_SUCCESS) WB_FAIL(ErrorCode::kCuda, #name " failed with cuBLAS status {}", static_cast<int>(wb_status)); \
  } while (0)

}  // namespace

struct DenseGemm::Plan {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  DeviceBuffer workspace{kWorkspaceBytes};
  decltype(::cublasLtMatmul)* matmul = find<decltype(::cublasLtMatmul)>("cublasLtMatmul");
};

// Row-major [rows, columns] is column-major [columns, rows]: c^T = b a^T.
DenseGemm::DenseGemm(std::int64_t m, std::int64_t n, std::int64_t k, bool is_fp8) : plan_(std::make_unique<Plan>()) {
  Plan& p = *plan_;
  const auto extent = [](std::int64_t v) { return static_cast<std::uint64_t>(v); };
  WB_CUBLASLT(cublasLtCreate, &p.handle);
  WB_CUBLASLT(cublasLtMatmulDescCreate, &p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  WB_CUBLASLT(cublasLtMatmulDescSetAttribute, p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  if (is_fp8) {
    const std::int8_t fast = 1;
    WB_CUBLASLT(cublasLtMatmulDescSetAttribute, p.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof(fast));
  }
  const cudaDataType_t type = is_fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
  WB_CUBLASLT(cublasLtMatrixLayoutCreate, &p.b, type, extent(k), extent(n), k);
  WB_CUBLASLT(cublasLtMatrixLayoutCreate, &p.a, type, extent(k), extent(m), k);
  WB_CUBLASLT(cublasLtMatrixLayoutCreate, &p.c, CUDA_R_16BF, extent(n), extent(m), n);
  cublasLtMatmulPreference_t preference = nullptr;
  WB_CUBLASLT(cublasLtMatmulPreferenceCreate, &preference);
  WB_CUBLASLT(cublasLtMatmulPreferenceSetAttribute, preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes, sizeof(kWorkspaceBytes));
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  WB_CUBLASLT(cublasLtMatmulAlgoGetHeuristic, p.handle, p.operation, p.b, p.a, p.c, p.c, preference, 1, &result, &count);
  WB_CUBLASLT(cublasLtMatmulPreferenceDestroy, preference);
  if (count == 0) WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt has no matmul of m {}, n {}, k {} in {}", m, n, k, is_fp8 ? "fp8" : "bf16");
  p.algorithm = result.algo;
}

DenseGemm::~DenseGemm() = default;

void DenseGemm::run(const void* a, const void* b, void* c, cudaStream_t stream) const {
  const Plan& p = *plan_;
  const float one = 1.0f, zero = 0.0f;
  const cublasStatus_t status =
      p.matmul(p.handle, p.operation, &one, b, p.b, a, p.a, &zero, c, p.c, c, p.c, &p.algorithm, p.workspace.data(), kWorkspaceBytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS) WB_FAIL(ErrorCode::kCuda, "cublasLtMatmul failed with cuBLAS status {}", static_cast<int>(status));
}

}  // namespace waybill::cuda
