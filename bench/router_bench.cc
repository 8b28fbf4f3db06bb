// SPDX-License-Identifier: Apache-2.0
// CPU router: forward, losses and backward over one thread. Items are logits, so items/s is logits per second.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "waybill/random.h"
#include "waybill/router.h"

namespace waybill {
namespace {

struct Problem {
  RouterConfig config;
  Tensor logits, d_logits;
  Route route;
  std::vector<float> d_weights;
  RouterInputs inputs;

  Problem(std::int64_t T, std::int64_t E, std::int64_t K, ScoreFunction score, DType dtype)
      : logits(dtype, {T, E}), d_logits(DType::kF32, {T, E}), route(T, K, E) {
    config.E = E;
    config.K = K;
    config.score = score;
    config.renormalise = score != ScoreFunction::kSoftmax;
    for (std::int64_t i = 0; i < T * E; ++i) {
      const float x = random_normal(1, static_cast<std::uint64_t>(i));
      if (dtype == DType::kBF16)
        logits.as<bf16>()[i] = bf16(x);
      else
        logits.as<float>()[i] = x;
    }
    d_weights.assign(static_cast<std::size_t>(T * K), 0.5f);
    inputs.logits = logits.view();
    router_forward(config, inputs, {route.view()});
  }
};

ScoreFunction score_of(const benchmark::State& state) { return static_cast<ScoreFunction>(state.range(3)); }
DType dtype_of(const benchmark::State& state) { return static_cast<DType>(state.range(4)); }

void finish(benchmark::State& state) { state.SetItemsProcessed(state.iterations() * state.range(0) * state.range(1)); }

void forward(benchmark::State& state) {
  const Problem p(state.range(0), state.range(1), state.range(2), score_of(state), dtype_of(state));
  for (auto _ : state) router_forward(p.config, p.inputs, {p.route.view()});
  finish(state);
}

void losses(benchmark::State& state) {
  const Problem p(state.range(0), state.range(1), state.range(2), score_of(state), dtype_of(state));
  RouterLossConfig config;
  config.aux_coefficient = config.z_coefficient = 0.01f;
  for (auto _ : state) benchmark::DoNotOptimize(router_losses(p.config, config, p.inputs, p.route, {}));
  finish(state);
}

void backward(benchmark::State& state) {
  const Problem p(state.range(0), state.range(1), state.range(2), score_of(state), dtype_of(state));
  RouterLossConfig config;
  if (state.range(5) != 0) config.aux_coefficient = config.z_coefficient = 0.01f;
  for (auto _ : state) router_backward(p.config, config, p.inputs, p.route, p.d_weights.data(), {}, 1.0f, p.d_logits);
  finish(state);
}

constexpr std::int64_t kF32 = static_cast<std::int64_t>(DType::kF32), kBF16 = static_cast<std::int64_t>(DType::kBF16);
constexpr std::int64_t kSoftmax = static_cast<std::int64_t>(ScoreFunction::kSoftmax), kSelected = static_cast<std::int64_t>(ScoreFunction::kSoftmaxSelected);
constexpr std::int64_t kSigmoid = static_cast<std::int64_t>(ScoreFunction::kSigmoid), kSqrtSoftplus = static_cast<std::int64_t>(ScoreFunction::kSqrtSoftplus);

BENCHMARK(forward)
    ->ArgNames({"T", "E", "K", "score", "dtype"})
    ->Args({8192, 256, 8, kSigmoid, kF32})
    ->Args({8192, 256, 8, kSigmoid, kBF16})
    ->Args({8192, 256, 8, kSqrtSoftplus, kF32})
    ->Args({8192, 256, 8, kSelected, kF32})
    ->Args({8192, 256, 8, kSoftmax, kF32})
    ->Args({8192, 128, 8, kSelected, kF32})
    ->Args({8192, 2304, 36, kSelected, kF32})
    ->Args({8192, 8, 2, kSelected, kF32})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(losses)
    ->ArgNames({"T", "E", "K", "score", "dtype"})
    ->Args({8192, 256, 8, kSigmoid, kF32})
    ->Args({8192, 256, 8, kSoftmax, kF32})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(backward)
    ->ArgNames({"T", "E", "K", "score", "dtype", "losses"})
    ->Args({8192, 256, 8, kSigmoid, kF32, 0})
    ->Args({8192, 256, 8, kSigmoid, kF32, 1})
    ->Args({8192, 256, 8, kSoftmax, kF32, 0})
    ->Args({8192, 256, 8, kSoftmax, kF32, 1})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace waybill

BENCHMARK_MAIN();
