// SPDX-License-Identifier: Apache-2.0
// `waybill bench exchange --tune FILE --device cuda`: the search of bench/cuda/exchange_tune.h for the rows of one shape, two ranks on two GPUs (on one: two
// virtual ranks).
#include "bench_exchange.h"
#include "exchange/tuning_table.h"

#if defined(WAYBILL_WITH_CUDA)
#include <cstdlib>

#include "bench/cuda/exchange_tune.h"
#endif

namespace waybill::cli {

#if !defined(WAYBILL_WITH_CUDA)

std::string tuned_gpu_rows(const BenchShape&, const std::string&, BenchReport&, const BenchRecord&) {
  WB_FAIL(ErrorCode::kUnsupported, "--device cuda needs a build with CUDA: configure with -DWAYBILL_CUDA=ON where nvcc is installed");
}

#else

std::string tuned_gpu_rows(const BenchShape& shape, const std::string& old_rows, BenchReport& report, const BenchRecord& record) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // loading a kernel at its first launch would wait for a peer that waits for it
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) WB_FAIL(ErrorCode::kUnsupported, "--device cuda: no GPU is usable here");
  std::vector<int> devices{0};
  if (count > 1) devices.push_back(1);
  cuda::ExchangeGroup group({shape.T, shape.H, shape.K, shape.E}, 2, devices);
  WB_CHECK(group.check(), "the exchange does not give back what went in: nothing is tuned");
  const auto add = [&](const cuda::TuneChoice& choice) {
    BenchRecord one = record;
    one.variant = fmt::format("tune {}, {}: {}", choice.what, devices.size() > 1 ? "2 GPUs" : "2 ranks on 1 GPU", choice.numbers);
    one.timing.min_us = one.timing.p10_us = choice.us.p10, one.timing.p50_us = choice.us.p50, one.timing.p90_us = one.timing.p99_us = choice.us.p90;
    one.timing.iterations = choice.iterations;
    report.add(one);
  };
  const RowTuning row = cuda::RowSearch(group, shape.H * 2, add).find();
  return format_tuning(with_row(old_rows.empty() ? built_in_tuning() : parse_tuning(old_rows, "the old table"), row));
}

#endif

}  // namespace waybill::cli
