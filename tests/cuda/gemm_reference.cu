// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include "cuda/gemm_reference.h"

namespace waybill::cuda {
namespace {

using Totals = GemmCheckTotals;

struct Problem {
  int form, output, groups;
  long long rows, m, n, k;
  const __nv_bfloat16 *a, *b;
  const int* offsets;
  const void* d;
  const float *bias, *before;
  const int *a_list, *b_list;
  long long a_rows, b_rows;
  unsigned poison;
};

__device__ float value(const __nv_bfloat16* p, long long i) { return __bfloat162float(p[i]); }

// Where row s is; -1: a padding row.
__device__ long long source_of(const int* list, long long rows, long long s) {
  const long long source = list == nullptr ? s : list[s];
  return list == nullptr || (source >= 0 && source < rows) ? source : -1;
}

__device__ int group_of(const Problem& p, long long row) {
  int low = 0, high = p.groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  // Empty groups share their offset with the next: the last one that starts at or before the row owns it.
  return low;
}

__device__ void note(const Problem& p, Totals* totals, long long index, double sum, double magnitude, long long terms, bool is_owned) {
  double got = 0, bound = 0, error = 0;
  bool is_wrong = false;
  if (p.output == static_cast<int>(GemmOutput::kBf16)) {
    const auto bits = static_cast<const unsigned short*>(p.d)[index];
    got = __bfloat162float(static_cast<const __nv_bfloat16*>(p.d)[index]);
    if (!is_owned) is_wrong = bits != (p.poison | p.poison << 8);
    bound = fabs(sum) * 0.00390625;
  } else {
    const auto bits = static_cast<const unsigned*>(p.d)[index];
    got = static_cast<const float*>(p.d)[index];
    if (!is_owned) is_wrong = bits != p.poison * 0x01010101u;
    if (p.before != nullptr && is_owned) sum += static_cast<double>(p.before[index]), magnitude += fabs(static_cast<double>(p.before[index]));
  }
  if (is_owned) {
    bound += magnitude * (1.2e-7 * sqrt(static_cast<double>(terms)) + 4.8e-7) + 1e-30;
    error = fabs(got - sum) / bound;
    is_wrong = !(error <= 1);
    if (!is_wrong) atomicMax(&totals->worst_bits, static_cast<unsigned long long>(__double_as_longlong(error)));
  }
  atomicAdd(&totals->checked, 1ull);
  if (is_wrong) {
    atomicAdd(&totals->wrong, 1ull);
    atomicMin(&totals->first_wrong, static_cast<unsigned long long>(index));
  }
}

__global__ void check(Problem p, long long elements, long long step, Totals* totals) {
  for (long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * step; i < elements;
       i += static_cast<long long>(gridDim.x) * blockDim.x * step) {
    double sum = 0, magnitude = 0;
    long long terms = 0;
    bool is_owned = true;
    if (p.form == static_cast<int>(GemmForm::kTN)) {
      const long long g = i / (p.m * p.n), row = i / p.n % p.m, column = i % p.n;
      for (long long s = p.offsets[g]; s < p.offsets[g + 1]; ++s) {
        const long long a_row = source_of(p.a_list, p.a_rows, s), b_row = source_of(p.b_list, p.b_rows, s);
        if (a_row < 0 || b_row < 0) continue;
        const double product = static_cast<double>(value(p.a, a_row * p.m + row)) * value(p.b, b_row * p.n + column);
        sum += product, magnitude += fabs(product);
      }
      terms = p.offsets[g + 1] - p.offsets[g];
    } else {
      const long long row = i / p.n, column = i % p.n;
      is_owned = row < p.offsets[p.groups];
      const long long g = is_owned ? group_of(p, row) : 0;
      const long long source = is_owned ? source_of(p.a_list, p.a_rows, row) : -1;
      const bool is_there = source >= 0;
      for (long long c = 0; is_there && c < p.k; ++c) {
        const float b = p.form == static_cast<int>(GemmForm::kNT) ? value(p.b, (g * p.n + column) * p.k + c) : value(p.b, (g * p.k + c) * p.n + column);
        const double product = static_cast<double>(value(p.a, source * p.k + c)) * b;
        sum += product, magnitude += fabs(product);
      }
      terms = p.k;
      if (is_there && p.bias != nullptr) sum += static_cast<double>(p.bias[g * p.n + column]), magnitude += fabs(static_cast<double>(p.bias[g * p.n + column]));
    }
    note(p, totals, i, sum, magnitude, terms, is_owned);
  }
}

}  // namespace

void launch_check_grouped(const GroupedProblem& problem, const float* before, unsigned char poison, std::int64_t elements, std::int64_t step,
                          GemmCheckTotals* totals, cudaStream_t stream) {
  const auto as_bf16 = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  const Problem p{static_cast<int>(problem.form),
                  static_cast<int>(problem.output),
                  static_cast<int>(problem.groups),
                  problem.rows,
                  problem.m,
                  problem.n,
                  problem.k,
                  as_bf16(problem.a),
                  as_bf16(problem.b),
                  problem.offsets,
                  problem.d,
                  problem.bias,
                  before,
                  problem.a_list,
                  problem.b_list,
                  problem.a_rows,
                  problem.b_rows,
                  poison};
  check<<<2048, 128, 0, stream>>>(p, elements, step, totals);
}

}  // namespace waybill::cuda
