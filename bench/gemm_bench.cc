// SPDX-License-Identifier: Apache-2.0
// CPU matmuls: GFLOP/s of valid rows (2 * S * N * C), per implementation, one thread unless the name says otherwise. The arguments in a name are
// groups, rows a group (load:W0 to load:W9: on average, bench/shapes/loads.toml), N, C. The rate divides by the thread's CPU time, so a busy machine disturbs
// it little. gemm_peers compares with other libraries.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bench/loads.h"
#include "ops/gemm/kernel.h"
#include "waybill/activation.h"
#include "waybill/grouped_gemm.h"
#include "waybill/random.h"

namespace waybill {
namespace {

enum class Op { kForward, kDgrad, kWgrad };

void fill(const Tensor& tensor, std::uint64_t key) {
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    const float x = random_uniform(key, static_cast<std::uint64_t>(i)) - 0.5f;
    if (tensor.view().dtype == DType::kF32) {
      tensor.as<float>()[i] = x;
    } else {
      tensor.as<bf16>()[i] = bf16(x);
    }
  }
}

struct Problem {
  std::int64_t L;
  std::vector<std::int32_t> firsts;
  std::int64_t S, N, C;
  Tensor a, dy, weights, y, da, d_weights, offsets;

  Problem(const benchmark::State& state, DType dtype, const std::string& load)
      : L(state.range(0)),
        firsts(bench::load_offsets(load, L, state.range(1))),
        S(firsts.back()),
        N(state.range(2)),
        C(state.range(3)),
        a(dtype, {S, C}),
        dy(dtype, {S, N}),
        weights(dtype, {L, N, C}),
        y(DType::kF32, {S, N}),
        da(DType::kF32, {S, C}),
        d_weights(Tensor::zeros(DType::kF32, {L, N, C})),
        offsets(DType::kI32, {L + 1}) {
    fill(a, 1);
    fill(dy, 2);
    fill(weights, 3);
    std::copy(firsts.begin(), firsts.end(), offsets.as<std::int32_t>());
  }
  void run(Op op, ThreadPool* pool) {
    const Stream stream = Stream::cpu(pool);
    if (op == Op::kForward) grouped_gemm({a, weights, offsets, y, WeightLayout::kLNC, {}, {}, false}, stream);
    if (op == Op::kDgrad) grouped_gemm_dgrad({dy, weights, offsets, da, WeightLayout::kLNC, false}, stream);
    if (op == Op::kWgrad) grouped_gemm_wgrad({a, dy, offsets, d_weights, WeightLayout::kLNC, {}, {}, true}, stream);
  }
  void report(benchmark::State& state) const {
    const double flops = 2.0 * static_cast<double>(S) * static_cast<double>(N) * static_cast<double>(C);
    state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  }
};

void grouped(benchmark::State& state, Op op, DType dtype, const std::string& implementation, int threads, const std::string& load = "even") {
  detail::force_gemm(implementation.c_str());
  Problem problem(state, dtype, load);
  ThreadPool pool(threads);
  for (auto _ : state) problem.run(op, threads > 1 ? &pool : nullptr);
  problem.report(state);
  detail::force_gemm("");
}

void activation(benchmark::State& state, Activation kind, bool backward) {
  const std::int64_t S = 512, F = 256;
  const ActivationConfig config{kind};
  const std::int64_t width = activation_input_width(config, F);
  Tensor h(DType::kF32, {S, width}), a(DType::kF32, {S, F}), dh(DType::kF32, {S, width});
  fill(h, 4);
  std::vector<float> weight(static_cast<std::size_t>(S), 0.5f), d_weight(static_cast<std::size_t>(S));
  activation_forward(config, h, weight.data(), a);
  for (auto _ : state) {
    if (backward) {
      activation_backward(config, h, weight.data(), a, dh, d_weight.data());
    } else {
      activation_forward(config, h, weight.data(), a);
    }
  }
  state.SetItemsProcessed(state.iterations() * S * F);
}

// The first shape is the yardstick; then the demo model's experts, fine-grained and tiny groups, and a large one.
void shapes(benchmark::internal::Benchmark* bench) {
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{
           {1, 512, 1024, 1024}, {8, 64, 1024, 1024}, {16, 64, 512, 256}, {4, 250, 256, 128}, {32, 1, 512, 256}, {32, 8, 512, 256}, {4, 1024, 1536, 2048}}) {
    bench->Args(shape);
  }
}

void register_all() {
  const std::pair<Op, const char*> ops[] = {{Op::kForward, "forward"}, {Op::kDgrad, "dgrad"}, {Op::kWgrad, "wgrad"}};
  for (const auto& [op, op_name] : ops) {
    const Op which = op;
    for (int i = 0; i < detail::usable_kernels().count; ++i) {
      const std::string name = detail::usable_kernels().sets[i]->name;
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const std::string label = std::string("grouped_gemm/") + op_name + "/" + to_string(dtype) + "/" + name;
        benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) { grouped(state, which, dtype, name, 1); })->Apply(shapes);
      }
    }
    for (const char* load : bench::kWorkloads) {
      const std::string label = std::string("grouped_gemm/") + op_name + "/f32/load:" + load;
      benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) { grouped(state, which, DType::kF32, "", 1, load); })->Args({16, 128, 512, 256});
    }
    if (num_usable_cores() > 1) {
      const std::string label = std::string("grouped_gemm/") + op_name + "/f32/threads:" + std::to_string(num_usable_cores());
      benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) { grouped(state, which, DType::kF32, "", num_usable_cores()); })
          ->Apply(shapes)
          ->UseRealTime();
    }
  }
  const std::pair<Activation, const char*> kinds[] = {
      {Activation::kSwiGLU, "swiglu"}, {Activation::kClampedSwiGLU, "clamped"}, {Activation::kReluSquared, "relu2"}};
  for (const auto& [kind, kind_name] : kinds) {
    for (const bool backward : {false, true}) {
      const Activation which = kind;
      const std::string label = std::string("activation/") + kind_name + (backward ? "/backward" : "/forward");
      benchmark::RegisterBenchmark(label.c_str(), [=](benchmark::State& state) { activation(state, which, backward); });
    }
  }
}

}  // namespace
}  // namespace waybill

int main(int argc, char** argv) {
  waybill::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const std::size_t matched = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return matched > 0 ? 0 : 2;
}
