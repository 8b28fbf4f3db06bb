// SPDX-License-Identifier: Apache-2.0
#include "cuda/fp8_reference.h"

#include <cstring>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"

namespace waybill::cuda {

GemmCheck check_fp8(const Fp8Problem& problem, const float* before, unsigned char poison, std::int64_t d_rows, std::int64_t samples, bool is_exact,
                    cudaStream_t stream) {
  const std::int64_t elements = (problem.form == GemmForm::kTN ? problem.groups * problem.m : d_rows) * problem.n;
  const std::int64_t step = elements <= samples ? 1 : (elements / samples) | 1;  // odd: a sample meets all columns and rows
  const DeviceBuffer totals(sizeof(GemmCheckTotals));
  GemmCheckTotals host{0, 0, 0, ~0ull};
  totals.upload(&host, sizeof(host), stream);
  launch_check_fp8(problem, before, poison, elements, step, is_exact, totals.as<GemmCheckTotals>(), stream);
  check_launch("check_fp8");
  totals.download(&host, sizeof(host), stream);
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
  GemmCheck result;
  result.checked = static_cast<long long>(host.checked), result.wrong = static_cast<long long>(host.wrong);
  std::memcpy(&result.worst, &host.worst_bits, sizeof(double));
  result.first_wrong = host.wrong > 0 ? static_cast<long long>(host.first_wrong) : -1;
  return result;
}

}  // namespace waybill::cuda
