// SPDX-License-Identifier: Apache-2.0
// A shared library needs a source of its own; everything it carries comes from the folders' archives.
#include "waybill/waybill.h"
#if defined(WAYBILL_WITH_CUDA)
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"

namespace {
// Sets pointers; no CUDA call is made before the first call with device memory.
[[gnu::constructor]] void make_kernels_known() {
  waybill::cuda::register_router();
  waybill::cuda::register_activation();
  waybill::cuda::register_gemm();
  waybill::cuda::register_quantize();
  waybill::cuda::register_quantized_gemm();
}
}  // namespace
#endif

static_assert(sizeof(wb_tensor) == 88, "wb_tensor has a frozen layout");
