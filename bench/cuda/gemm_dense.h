// SPDX-License-Identifier: Apache-2.0
// The anchor of the matmul figures: cuBLASLt's dense product in the same run, through dlopen (the library is the GPU machine's).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace waybill::cuda {

// c [m, n] bf16 = a [m, k] b [n, k]^T, bf16 or (is_fp8) E4M3 with fast accumulation and without scales, row-major. Throws kUnsupported where cuBLASLt is
// missing.
class DenseGemm {
 public:
  DenseGemm(std::int64_t m, std::int64_t n, std::int64_t k, bool is_fp8 = false);
  ~DenseGemm();
  DenseGemm(const DenseGemm&) = delete;
  DenseGemm& operator=(const DenseGemm&) = delete;
  void run(const void* a, const void* b, void* c, cudaStream_t stream) const;

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

}  // namespace waybill::cuda
