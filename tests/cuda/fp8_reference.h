// SPDX-License-Identifier: Apache-2.0
// Checks an 8-bit grouped product on the device against sums in double of the decoded codes under their scales.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/gemm_reference.h"
#include "ops/gemm/cuda/fp8_run.h"

namespace waybill::cuda {

// before, poison, d_rows, samples: as check_grouped(). is_exact: every partial sum fits the tensor cores' accumulators, so D must be the sum
// rounded once. Otherwise the bound of an element with value v and sum of magnitudes s is 2^-8 |v| where D is bf16, plus 2^-11 s: the tensor
// cores keep about 14 bits of a k block's sum.
GemmCheck check_fp8(const Fp8Problem& problem, const float* before, unsigned char poison, std::int64_t d_rows, std::int64_t samples, bool is_exact,
                    cudaStream_t stream);

// What the kernel adds up.
void launch_check_fp8(const Fp8Problem& problem, const float* before, unsigned char poison, std::int64_t elements, std::int64_t step, bool is_exact,
                      GemmCheckTotals* totals, cudaStream_t stream);

// Values from -2 to 2, as bf16: products and sums of 128 of them are exact.
void fill_small_integers(void* data, std::size_t count, std::uint64_t seed, cudaStream_t stream);

}  // namespace waybill::cuda
