// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/widened_sm90.cuh"

namespace waybill::cuda {

const void* widened_nt_e2m1() { return reinterpret_cast<const void*>(widened_gemm_sm90<WidenedConfig, ElementFormat::kE2M1>); }

}  // namespace waybill::cuda
