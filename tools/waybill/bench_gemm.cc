// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of one rank: rows of its local experts as the load gives them, the first expert matmul's shape.
#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "bench_record.h"
#include "bench_verbs.h"
#include "ops/gemm/kernel.h"
#include "waybill/grouped_gemm.h"
#include "waybill/trainer.h"

namespace waybill::cli {
namespace {

struct GemmProblem {
  std::int64_t S = 0, N = 0, C = 0, L = 0;
  std::vector<std::int32_t> offsets;
  Tensor a, w, y, da, dw;

  GemmProblem(const BenchOptions& options, const BenchShape& shape, const std::vector<Route>& routes) : N(2 * shape.F), C(shape.H), L(shape.E / shape.P) {
    // Slots of rank 0's experts over all source ranks.
    offsets.assign(static_cast<std::size_t>(L) + 1, 0);
    for (const Route& route : routes) {
      for (std::int64_t e = 0; e < L; ++e) offsets[static_cast<std::size_t>(e) + 1] += route.view().counts[e];
    }
    for (std::size_t e = 1; e < offsets.size(); ++e) offsets[e] += offsets[e - 1];
    S = offsets.back();
    const DType dtype = options.dtype == "bf16" ? DType::kBF16 : DType::kF32;
    a = filled(dtype, {S, C}, options.seed);
    w = filled(dtype, {L, N, C}, options.seed + 1);
    y = Tensor::zeros(DType::kF32, {S, N});
    da = Tensor::zeros(DType::kF32, {S, C});
    dw = Tensor::zeros(DType::kF32, {L, N, C});
  }
  static Tensor filled(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed) {
    Tensor tensor(dtype, shape);
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
      const float value = random_uniform(seed, static_cast<std::uint64_t>(i)) - 0.5f;
      if (dtype == DType::kF32) {
        tensor.as<float>()[i] = value;
      } else {
        tensor.as<bf16>()[i] = bf16(value);
      }
    }
    return tensor;
  }
  double flops() const { return 2.0 * static_cast<double>(S) * static_cast<double>(N) * static_cast<double>(C); }
  TensorView offsets_view() const { return TensorView::of(offsets.data(), {L + 1}); }
  void forward(Stream stream) const { grouped_gemm({a, w, offsets_view(), y, WeightLayout::kLNC, {}, {}, false}, stream); }
  void dgrad(Stream stream) const { grouped_gemm_dgrad({y, w, offsets_view(), da, WeightLayout::kLNC, false}, stream); }
  void wgrad(Stream stream) const { grouped_gemm_wgrad({a, y, offsets_view(), dw, WeightLayout::kLNC, {}, {}, false}, stream); }
};

double at(const Tensor& tensor, std::int64_t index) {
  return tensor.view().dtype == DType::kF32 ? static_cast<double>(tensor.as<float>()[index])
                                            : static_cast<double>(static_cast<float>(tensor.as<bf16>()[index]));
}

void expect_close(double seen, double wanted, double magnitude, const std::string& what) {
  const double tolerance = 1e-5 * magnitude + 1e-6;
  WB_CHECK(std::abs(seen - wanted) <= tolerance, "{}: {} where {} was expected (tolerance {})", what, seen, wanted, tolerance);
}

// Random elements of the three products against sums in double, every group that has rows among them.
void check(const GemmProblem& p, std::uint64_t seed, Stream stream) {
  p.forward(stream);
  p.dgrad(stream);
  p.wgrad(stream);
  constexpr std::int64_t kPerGroup = 8;
  for (std::int64_t g = 0; g < p.L; ++g) {
    const std::int64_t begin = p.offsets[static_cast<std::size_t>(g)], end = p.offsets[static_cast<std::size_t>(g) + 1];
    for (std::int64_t i = 0; i < kPerGroup; ++i) {
      const auto draw = [&](std::uint64_t key, std::int64_t count) {
        return static_cast<std::int64_t>(random_u64(seed + key, static_cast<std::uint64_t>(g * kPerGroup + i)) % static_cast<std::uint64_t>(count));
      };
      const std::int64_t n = draw(1, p.N), c = draw(2, p.C);
      double sum = 0, size = 0;
      for (std::int64_t s = begin; s < end; ++s) {
        const double term = at(p.y, s * p.N + n) * at(p.a, s * p.C + c);
        sum += term;
        size += std::abs(term);
      }
      expect_close(at(p.dw, (g * p.N + n) * p.C + c), sum, size, fmt::format("wgrad of group {} at [{}, {}]", g, n, c));
      if (begin == end) continue;
      const std::int64_t s = begin + draw(3, end - begin);
      sum = size = 0;
      for (std::int64_t j = 0; j < p.C; ++j) {
        const double term = at(p.a, s * p.C + j) * at(p.w, (g * p.N + n) * p.C + j);
        sum += term;
        size += std::abs(term);
      }
      expect_close(at(p.y, s * p.N + n), sum, size, fmt::format("forward at [{}, {}]", s, n));
      sum = size = 0;
      for (std::int64_t j = 0; j < p.N; ++j) {
        const double term = at(p.y, s * p.N + j) * at(p.w, (g * p.N + j) * p.C + c);
        sum += term;
        size += std::abs(term);
      }
      expect_close(at(p.da, s * p.C + c), sum, size, fmt::format("dgrad at [{}, {}]", s, c));
    }
  }
}

void run(const BenchOptions& options) {
  const BenchShape shape = options.resolve();
  const std::vector<Route> routes = make_load(options, shape);
  const int threads = options.threads > 0 ? options.threads : num_usable_cores();
  ThreadPool pool(threads);
  const Stream stream = Stream::cpu(&pool);
  GemmProblem problem(options, shape, routes);
  BenchReport report(options, shape, threads);
  if (!options.no_check) check(problem, options.seed, stream);
  report.set_checked(!options.no_check);
  const double ceiling = measure_matmul_ceiling() * 1e6;  // flops a microsecond
  BenchRecord record;
  record.op = "grouped_gemm";
  const detail::KernelSet* kernels = detail::selected_kernels();
  record.implementation = kernels == nullptr ? "ref" : kernels->name;
  record.load = summarise_load(options.load, views_of(routes));
  record.flops = problem.flops();
  record.floor_us = record.flops / ceiling;
  record.floor_kind = "matmul rate";
  const auto add = [&](const char* variant, const std::function<void()>& body) {
    record.variant = variant;
    record.timing = measure(options, body);
    report.add(record);
  };
  add("forward", [&] { problem.forward(stream); });
  add("dgrad", [&] { problem.dgrad(stream); });
  add("wgrad", [&] { problem.wgrad(stream); });
  report.finish();
}

}  // namespace

void register_bench_gemm(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("gemm", "Grouped GEMM of rank 0's experts: forward, dgrad, wgrad");
  auto options = std::make_shared<BenchOptions>();
  add_common_options(*command, *options);
  command->add_option("--dtype", options->dtype, "of rows and weights")->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
