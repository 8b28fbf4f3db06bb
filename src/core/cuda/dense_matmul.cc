// SPDX-License-Identifier: Apache-2.0
#include "core/cuda/dense_matmul.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream_map.h"
#include "core/cuda/work_room.h"

namespace waybill::cuda {
namespace {

// clang-format off
#define WB_CUBLASLT_FUNCTIONS(F) \
  F(cublasLtCreate) \
  F(cublasLtMatmul) \
  F(cublasLtMatmulDescCreate) \
  F(cublasLtMatmulDescSetAttribute) \
  F(cublasLtMatrixLayoutCreate) \
  F(cublasLtMatmulPreferenceCreate) \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatmulPreferenceDestroy) \
  F(cublasLtMatmulAlgoGetHeuristic)
// clang-format on

// The functions, looked up once.
struct CublasLt {
#define WB_DECLARE(name) decltype(&::name) name = nullptr;
  WB_CUBLASLT_FUNCTIONS(WB_DECLARE)
#undef WB_DECLARE

  static const CublasLt& get() {
    static const CublasLt library;
    return library;
  }

 private:
  CublasLt() {
    void* handle = nullptr;
    std::string tried;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so", "/usr/local/cuda/lib64/libcublasLt.so.13"}) {
      handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle != nullptr) break;
      tried += (tried.empty() ? "" : ", ") + std::string(name);
    }
    if (handle == nullptr) WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt was not found (tried {}); put its folder on LD_LIBRARY_PATH", tried);
#define WB_LOOK_UP(function)                                                    \
  function = reinterpret_cast<decltype(&::function)>(dlsym(handle, #function)); \
  if (function == nullptr) WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt has no {}", #function);
    WB_CUBLASLT_FUNCTIONS(WB_LOOK_UP)
#undef WB_LOOK_UP
  }
};

void try_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) WB_FAIL(ErrorCode::kCuda, "{} failed with cuBLAS status {}", call, static_cast<int>(status));
}
#define WB_TRY_CUBLAS(call) try_cublas((call), #call)

constexpr std::uint32_t kAlignment = 16;  // of operands, bytes

using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, DType, DType>;
Key key_of(const DenseMatmul& x) { return {x.M, x.N, x.C, x.transpose_a, x.transpose_b, x.dtype, x.out}; }

cudaDataType_t data_type(DType dtype) { return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

// One a device, made at the first call: making one allocates device memory. The library takes calls of several threads on one handle.
cublasLtHandle_t handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;  // kept for the process
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = handles.try_emplace(device, nullptr);
  if (is_new) WB_TRY_CUBLAS(CublasLt::get().cublasLtCreate(&at->second));
  return at->second;
}

// Plans of one stream; created once a shape, kept for the process.
class Plans {
 public:
  explicit Plans(int device) : device_(device), handle_(handle_of(device)) {}

  void run(const DenseMatmul& x, const void* a, const void* b, void* c, ScratchBuffer& workspace, cudaStream_t stream) {
    const Plan& plan = find(x);
    workspace.reserve(kDenseWorkspaceBytes, /*zero=*/false, device_, stream);
    const float alpha = 1.0f, beta = x.accumulate ? 1.0f : 0.0f;
    WB_TRY_CUBLAS(lt_.cublasLtMatmul(handle_, plan.operation, &alpha, b, plan.a, a, plan.b, &beta, c, plan.d, c, plan.d, &plan.algorithm, workspace.data(),
                                     kDenseWorkspaceBytes, stream));
  }

 private:
  // Row-major [rows, columns] is column-major [columns, rows]: the plan's a is the caller's b, and its result c turned.
  struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };

  const Plan& find(const DenseMatmul& x) {
    const auto found = plans_.find(key_of(x));
    if (found != plans_.end()) return found->second;
    Plan plan;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = x.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = x.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    plan.a = layout(x.dtype, x.transpose_b ? x.N : x.C, x.transpose_b ? x.C : x.N);
    plan.b = layout(x.dtype, x.transpose_a ? x.C : x.M, x.transpose_a ? x.M : x.C);
    plan.d = layout(x.out, x.M, x.N);
    cublasLtMatmulPreference_t preference = nullptr;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceCreate(&preference));
    WB_TRY_CUBLAS(
        lt_.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kDenseWorkspaceBytes, sizeof(kDenseWorkspaceBytes)));
    for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &kAlignment, sizeof(kAlignment)));
    }
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    const cublasStatus_t status = lt_.cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.a, plan.b, plan.d, plan.d, preference, 1, &result, &count);
    WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt has no matmul of M {}, N {}, C {} in {}", x.M, x.N, x.C, to_string(x.dtype));
    }
    plan.algorithm = result.algo;
    return plans_.emplace(key_of(x), plan).first->second;
  }
  // A row-major [rows, columns] matrix.
  cublasLtMatrixLayout_t layout(DType dtype, std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t made = nullptr;
    WB_TRY_CUBLAS(lt_.cublasLtMatrixLayoutCreate(&made, data_type(dtype), static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows), columns));
    return made;
  }

  const CublasLt& lt_ = CublasLt::get();
  int device_;
  cublasLtHandle_t handle_;
  std::map<Key, Plan> plans_;
};

// One set a (device, stream).
Plans& plans_of(int device, cudaStream_t stream) {
  static StreamMap<std::unique_ptr<Plans>> all;
  std::unique_ptr<Plans>& found = all.at(device, stream);
  if (found == nullptr) found = std::make_unique<Plans>(device);
  return *found;
}

}  // namespace

void dense_matmul(const DenseMatmul& x, const void* a, const void* b, void* c, int device, cudaStream_t stream) {
  WB_CHECK(x.M >= 0 && x.N >= 1 && x.C >= 0, "a matmul needs M >= 0, N >= 1, C >= 0, got M = {}, N = {}, C = {}", x.M, x.N, x.C);
  WB_CHECK((x.dtype == DType::kBF16 && (x.out == DType::kF32 || x.out == DType::kBF16)) || (x.dtype == DType::kF32 && x.out == DType::kF32),
           "a matmul takes bf16 -> f32 or bf16, or f32 -> f32; got {} -> {}", to_string(x.dtype), to_string(x.out));
  if (x.M == 0) return;
  const DeviceGuard guard(device);
  if (x.C == 0) {
    if (!x.accumulate) WB_TRY_CUDA(cudaMemsetAsync(c, 0, static_cast<std::size_t>(x.M * x.N) * size_bytes(x.out), stream));
    return;
  }
  plans_of(device, stream).run(x, a, b, c, work_room(device, stream), stream);
}

void prepare_dense_matmul(int device) {
  static std::mutex mutex;
  static std::set<int> done;
  const std::lock_guard lock(mutex);
  if (done.contains(device)) return;
  const DeviceGuard guard(device);
  const CudaStream stream(device);
  constexpr std::int64_t kLarge = 1024;
  const DeviceBuffer operands(kLarge * kLarge * 4, device), result(kLarge * kLarge * 4, device);
  operands.fill(0, stream);
  Plans plans(device);
  ScratchBuffer workspace;  // not a room that is kept for a stream which goes
  for (const std::int64_t size : {std::int64_t{64}, kLarge}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
          plans.run({.M = size, .N = size, .C = size, .transpose_a = transpose_a, .transpose_b = transpose_b, .dtype = dtype}, operands.data(), operands.data(),
                    result.data(), workspace, stream);
        }
      }
    }
  }
  stream.synchronize();
  done.insert(device);
}

}  // namespace waybill::cuda
