// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/wgrad_control.h"

#include <algorithm>

#include "bench/cuda/gemm_burst.h"
#include "bench/cuda/moe/check.h"
#include "bench/negative/cuda/unordered_wgrad.h"
#include "core/cuda/cuda_error.h"
#include "cuda/device_random.h"
#include "waybill/grouped_gemm.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr int kRounds = 15, kCalls = 4;

// d [L, m, n] from a [S, m] and b [S, n].
class Control {
 public:
  Control(const Problem& problem, std::int64_t m, std::int64_t n) : device_(problem.devices()[0]), L_(problem.L()), m_(m), n_(n), stream_(device_) {
    std::vector<std::int32_t> offsets{0};
    for (std::int64_t e = 0; e < L_; ++e) offsets.push_back(offsets.back() + static_cast<std::int32_t>(problem.counts()[static_cast<std::size_t>(e)]));
    S_ = std::max(offsets.back(), 1);
    offsets_ = DeviceBuffer(offsets.size() * 4, device_), a_ = normal(m, 21), b_ = normal(n, 22);
    offsets_.upload(offsets.data(), offsets_.bytes());
    const auto count = static_cast<std::size_t>(values());
    ordered_ = DeviceBuffer(count * 4, device_), sums_ = DeviceBuffer(count * 4, device_), rounded_ = DeviceBuffer(count * 2, device_);
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  double flops() const { return 2.0 * static_cast<double>(S_) * static_cast<double>(m_) * static_cast<double>(n_); }

  void in_order(bool adds) const {
    GroupedGemmWgradArgs w;  // [L, N, C]: dy is a, rows of the layer are b
    w.a = view(b_, DType::kBF16, {S_, n_}), w.dy = view(a_, DType::kBF16, {S_, m_}), w.offsets = view(offsets_, DType::kI32, {L_ + 1});
    w.d_weights = result(adds), w.accumulate = adds;
    grouped_gemm_wgrad(w, {device(), stream_.get(), nullptr});
  }
  void as_they_come(bool adds, int blocks) const {
    WB_CHECK(blocks == 0 || blocks >= 8, "slices have 8 blocks of 64 rows at least, or there are none (0), got {}", blocks);
    if (!adds) sums_.fill(0, stream_);
    launch_unordered_wgrad({a_.data(), b_.data(), offsets_.as<std::int32_t>(), L_, S_, m_, n_, sums_.as<float>(), blocks}, device_, stream_);
    if (!adds) launch_round_wgrad(sums_.as<float>(), rounded_.data(), values(), stream_);
  }
  // The relative norm between both.
  double difference(bool adds, int blocks) const {
    ordered_.fill(adds ? 0 : 0xff, stream_), sums_.fill(0, stream_), rounded_.fill(0xff, stream_);
    in_order(adds), as_they_come(adds, blocks);
    stream_.synchronize();
    return relative_difference(adds ? view(sums_, DType::kF32, {L_ * m_, n_}) : view(rounded_, DType::kBF16, {L_ * m_, n_}),
                               view(ordered_, adds ? DType::kF32 : DType::kBF16, {L_ * m_, n_}), nullptr, 0);
  }
  const CudaStream& stream() const { return stream_; }

 private:
  std::int64_t values() const { return L_ * m_ * n_; }
  Device device() const { return {DeviceType::kCuda, device_}; }
  TensorView view(const DeviceBuffer& b, DType dtype, std::initializer_list<std::int64_t> shape) const { return {b.data(), dtype, shape, device()}; }
  TensorView result(bool adds) const { return view(ordered_, adds ? DType::kF32 : DType::kBF16, {L_, m_, n_}); }
  DeviceBuffer normal(std::int64_t width, std::uint64_t seed) const {
    DeviceBuffer buffer(static_cast<std::size_t>(S_ * width) * 2, device_);
    fill_normal(buffer.data(), DType::kBF16, static_cast<std::size_t>(S_ * width), seed, 1.0f, nullptr);
    return buffer;
  }

  int device_;
  std::int64_t L_, m_, n_, S_ = 0;
  CudaStream stream_;
  DeviceBuffer a_, b_, offsets_, ordered_, sums_, rounded_;
};

struct Variant {
  std::string name;
  int blocks;  // -1: the library's
  std::vector<double> us{};
};

}  // namespace

void run_wgrad_control(const Problem& problem, Report& report) {
  const Shape& s = problem.shape();
  const DeviceGuard guard(problem.devices()[0]);
  for (const bool is_first : {true, false}) {
    const Control control(problem, is_first ? 2 * s.F : s.row_width(), is_first ? s.row_width() : s.F);
    for (const bool adds : {false, true}) {
      std::vector<Variant> variants{
          {"in order (default)", -1}, {"as they come, groups whole", 0}, {"as they come, slices of 16 blocks", 16}, {"as they come, slices of 8 blocks", 8}};
      for (const Variant& v : variants) {
        if (v.blocks < 0) continue;
        const double error = control.difference(adds, v.blocks), bound = adds ? 1e-4 : 1e-2;
        WB_CHECK(error < bound, "wgrad control: '{}' differs from the default by {:.1e} (bound {:.0e}); not timed", v.name, error, bound);
      }
      // Taking turns: clocks move with what ran before.
      for (int round = 0; round < kRounds; ++round) {
        for (Variant& v : variants) {
          const Spread t = time_burst(control.stream(), 1, kCalls, 0.5, [&] { v.blocks < 0 ? control.in_order(adds) : control.as_they_come(adds, v.blocks); });
          v.us.push_back(t.us);
        }
      }
      const std::string what = fmt::format("{} {}", is_first ? "dW1" : "dW2", adds ? "f32 +=" : "bf16");
      for (Variant& v : variants) {
        std::sort(v.us.begin(), v.us.end());
        report.add_control("control: order of wgrad", problem, what + ", " + v.name, v.us[kRounds / 2], v.us.back() - v.us.front(), kRounds * kCalls,
                           control.flops());
      }
      double best = variants[1].us[kRounds / 2];
      for (std::size_t i = 2; i < variants.size(); ++i) best = std::min(best, variants[i].us[kRounds / 2]);
      fmt::print("    {}: the default takes {:.3f} of the fastest unordered form's time\n", what, variants[0].us[kRounds / 2] / best);
    }
  }
}

}  // namespace waybill::cuda::moe_bench
