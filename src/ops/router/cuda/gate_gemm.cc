// SPDX-License-Identifier: Apache-2.0
#include "ops/router/cuda/gate_gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "ops/router/cuda/gate_split.h"

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

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

// D [m, n] = op(A) op(B) + beta D, column-major, fp32 accumulation and D.
struct Problem {
  std::int64_t m, n, k, lda, ldb, ldd;
  bool transpose_a, transpose_b;
  DType dtype;
  auto key() const { return std::tuple(m, n, k, lda, ldb, ldd, transpose_a, transpose_b, dtype); }
};

// Plans of one device; created once a shape, kept for the process.
class Plans {
 public:
  explicit Plans(int device) : workspace_(kWorkspaceBytes, device) { WB_TRY_CUBLAS(lt_.cublasLtCreate(&handle_)); }

  void run(const Problem& p, const void* a, const void* b, float* d, float beta, cudaStream_t stream) {
    const Plan& plan = find(p);
    const float alpha = 1.0f;
    WB_TRY_CUBLAS(lt_.cublasLtMatmul(handle_, plan.operation, &alpha, a, plan.a, b, plan.b, &beta, d, plan.d, d, plan.d, &plan.algorithm, workspace_.data(),
                                     kWorkspaceBytes, stream));
  }
  // Room for the two halves of d_logits.
  void* split_room(std::size_t bytes, int device) {
    if (split_.bytes() < bytes) split_ = DeviceBuffer(bytes, device);
    return split_.data();
  }

 private:
  struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };

  const Plan& find(const Problem& p) {
    const auto found = plans_.find(p.key());
    if (found != plans_.end()) return found->second;
    Plan plan;
    const cudaDataType_t type = p.dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t op_a = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)));
    WB_TRY_CUBLAS(lt_.cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)));
    const auto rows = [](std::int64_t r) { return static_cast<std::uint64_t>(r); };
    WB_TRY_CUBLAS(lt_.cublasLtMatrixLayoutCreate(&plan.a, type, rows(p.transpose_a ? p.k : p.m), rows(p.transpose_a ? p.m : p.k), p.lda));
    WB_TRY_CUBLAS(lt_.cublasLtMatrixLayoutCreate(&plan.b, type, rows(p.transpose_b ? p.n : p.k), rows(p.transpose_b ? p.k : p.n), p.ldb));
    WB_TRY_CUBLAS(lt_.cublasLtMatrixLayoutCreate(&plan.d, CUDA_R_32F, rows(p.m), rows(p.n), p.ldd));
    cublasLtMatmulPreference_t preference = nullptr;
    WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceCreate(&preference));
    WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes, sizeof(kWorkspaceBytes)));
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    const cublasStatus_t status = lt_.cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.a, plan.b, plan.d, plan.d, preference, 1, &result, &count);
    WB_TRY_CUBLAS(lt_.cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      WB_FAIL(ErrorCode::kUnsupported, "cuBLASLt has no matmul of m {}, n {}, k {} in {}", p.m, p.n, p.k, to_string(p.dtype));
    }
    plan.algorithm = result.algo;
    return plans_.emplace(p.key(), plan).first->second;
  }

  const CublasLt& lt_ = CublasLt::get();
  cublasLtHandle_t handle_ = nullptr;
  DeviceBuffer workspace_, split_;
  std::map<decltype(std::declval<Problem>().key()), Plan> plans_;
};

// One set a (device, stream): calls on a stream run in order and share its workspace.
Plans& plans_of(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, std::unique_ptr<Plans>> all;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Plans>& found = all[{device, stream}];
  if (found == nullptr) found = std::make_unique<Plans>(device);
  return *found;
}

void check(const GateShape& s) {
  WB_CHECK(s.dtype == DType::kBF16 || s.dtype == DType::kF32, "the gate takes bf16 or f32, got {}", to_string(s.dtype));
  WB_CHECK(s.T >= 0 && s.H >= 1 && s.E >= 1, "the gate needs T >= 0, H >= 1, E >= 1, got T = {}, H = {}, E = {}", s.T, s.H, s.E);
}

}  // namespace

// Row-major [rows, columns] is column-major [columns, rows].
void gate_forward(const GateShape& s, const void* x, const void* weight, float* logits, int device, cudaStream_t stream) {
  check(s);
  if (s.T == 0) return;
  const DeviceGuard guard(device);
  plans_of(device, stream).run(Problem{s.E, s.T, s.H, s.H, s.H, s.E, true, false, s.dtype}, weight, x, logits, 0.0f, stream);
}

void gate_backward(const GateShape& s, const void* x, const void* weight, const float* d_logits, float* d_x, float* d_weight, bool accumulate, int device,
                   cudaStream_t stream) {
  check(s);
  const DeviceGuard guard(device);
  if (s.T == 0) {
    if (d_weight != nullptr && !accumulate) WB_TRY_CUDA(cudaMemsetAsync(d_weight, 0, static_cast<std::size_t>(s.E * s.H) * sizeof(float), stream));
    return;
  }
  Plans& plans = plans_of(device, stream);
  const void* terms[2] = {d_logits, nullptr};
  if (s.dtype == DType::kBF16) {
    const std::size_t bytes = (static_cast<std::size_t>(s.T * s.E) * 2 + 255) / 256 * 256;
    auto* room = static_cast<std::byte*>(plans.split_room(2 * bytes, device));
    launch_gate_split(d_logits, room, room + bytes, static_cast<std::size_t>(s.T * s.E), stream);
    check_launch("gate_split");
    terms[0] = room, terms[1] = room + bytes;
  }
  for (int i = 0; i < 2 && terms[i] != nullptr; ++i) {
    if (d_x != nullptr) plans.run(Problem{s.H, s.T, s.E, s.H, s.E, s.H, false, false, s.dtype}, weight, terms[i], d_x, i == 0 ? 0.0f : 1.0f, stream);
    if (d_weight != nullptr) {
      plans.run(Problem{s.H, s.E, s.T, s.H, s.E, s.H, false, true, s.dtype}, x, terms[i], d_weight, i == 0 && !accumulate ? 0.0f : 1.0f, stream);
    }
  }
}

}  // namespace waybill::cuda
