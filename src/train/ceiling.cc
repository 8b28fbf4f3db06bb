// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>

#include "waybill/grouped_gemm.h"
#include "waybill/trainer.h"

namespace waybill {

double measure_matmul_ceiling() {
  constexpr std::int64_t kSize = 768;
  constexpr double kSeconds = 0.3;
  using Clock = std::chrono::steady_clock;
  ThreadPool pool(num_usable_cores());
  Tensor a(DType::kF32, {kSize, kSize}), b(DType::kF32, {kSize, kSize}), c = Tensor::zeros(DType::kF32, {kSize, kSize});
  for (std::int64_t i = 0; i < a.size(); ++i) {
    a.as<float>()[i] = static_cast<float>(i % 7) - 3;
    b.as<float>()[i] = static_cast<float>(i % 5) - 2;
  }
  GemmArgs args;
  args.a = a;
  args.b = b;
  args.c = c;
  double best = 1e30;
  const auto start = Clock::now();
  do {
    const auto begin = Clock::now();
    gemm(args, Stream::cpu(&pool));
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  } while (std::chrono::duration<double>(Clock::now() - start).count() < kSeconds);
  return 2.0 * kSize * kSize * kSize / best * 1e-12;
}

}  // namespace waybill
