// SPDX-License-Identifier: Apache-2.0
// Checks a grouped product on the device against sums in double: every element, or a sample of a large result.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {

struct GemmCheck {
  long long checked = 0;
  long long wrong = 0;         // elements beyond their bound, or not written, or written where nothing belongs
  double worst = 0;            // the largest error over its bound
  long long first_wrong = -1;  // index into D
  std::string describe() const;
};

// before: what D held before an accumulating call (same layout as D), or null. poison: the byte that D was filled with where nothing may be
// written (rows past offsets[groups]). d_rows: rows of D (kNT, kNN). Bound of an element with value v and sum of magnitudes s:
// 2^-8 |v| where D is bf16, plus 2^-23 sqrt(terms) s + 2^-21 s for the fp32 sums. About `samples` elements are checked.
GemmCheck check_grouped(const GroupedProblem& problem, const float* before, unsigned char poison, std::int64_t d_rows, std::int64_t samples,
                        cudaStream_t stream);

// What the kernel adds up; first_wrong starts at ~0.
struct GemmCheckTotals {
  unsigned long long checked, wrong;
  unsigned long long worst_bits;  // of a double
  unsigned long long first_wrong;
};
void launch_check_grouped(const GroupedProblem& problem, const float* before, unsigned char poison, std::int64_t elements, std::int64_t step,
                          GemmCheckTotals* totals, cudaStream_t stream);

}  // namespace waybill::cuda
