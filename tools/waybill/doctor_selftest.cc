// SPDX-License-Identifier: Apache-2.0
#include "doctor_selftest.h"

#include <chrono>
#include <cmath>
#include <mutex>
#include <vector>

#include "bench_router_problem.h"
#include "waybill/build_info.h"
#include "waybill/exchange.h"
#include "waybill/fabric.h"
#include "waybill/grouped_gemm.h"
#include "waybill/moe.h"
#include "waybill/random.h"
#include "waybill/router.h"
#include "waybill/version.h"

namespace waybill::cli {
namespace {

constexpr std::uint64_t kSeed = 0x5e1f7e57;

std::vector<float> random_values(std::int64_t count, std::uint64_t key, float scale = 1.0f) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = scale * random_normal(kSeed + key, i);
  return values;
}

void check_close(double seen, double expected, double tolerance, const std::string& what) {
  WB_CHECK(std::abs(seen - expected) <= tolerance, "{}: {} where {} was expected (tolerance {})", what, seen, expected, tolerance);
}

// Top 2 of 4 by softmax: worked by hand, ids 2 then 0, weights e^2 : e^1 renormalised.
void check_router() {
  std::vector<float> logits = {1.0f, -1.0f, 2.0f, 0.5f};
  Route route(1, 2, 4);
  RouterConfig config;
  config.E = 4;
  config.K = 2;
  RouterInputs inputs;
  inputs.logits = TensorView::of(logits.data(), {1, 4});
  RouterOutputs outputs;
  outputs.route = route.view();
  router_forward(config, inputs, outputs);
  validate(route.view());
  WB_CHECK(route.view().id(0, 0) == 2 && route.view().id(0, 1) == 0, "ids {} {} where 2 0 was expected", route.view().id(0, 0), route.view().id(0, 1));
  check_close(route.view().weights[0], 1 / (1 + std::exp(-1.0)), 1e-6, "weight of expert 2");
  check_close(route.view().weights[1], 1 / (1 + std::exp(1.0)), 1e-6, "weight of expert 0");
}

void check_grouped_gemm() {
  constexpr std::int64_t L = 3, N = 17, C = 29;
  const std::vector<std::int32_t> offsets = {0, 5, 5, 16};
  const std::int64_t S = offsets.back();
  auto a = random_values(S * C, 1), w = random_values(L * N * C, 2);
  std::vector<float> y(static_cast<std::size_t>(S * N));
  GroupedGemmArgs args;
  args.a = TensorView::of(a.data(), {S, C});
  args.weights = TensorView::of(w.data(), {L, N, C});
  args.offsets = TensorView::of(offsets.data(), {L + 1});
  args.y = TensorView::of(y.data(), {S, N});
  grouped_gemm(args);
  for (std::int64_t g = 0; g < L; ++g) {
    for (std::int64_t s = offsets[static_cast<std::size_t>(g)]; s < offsets[static_cast<std::size_t>(g) + 1]; ++s) {
      for (std::int64_t n = 0; n < N; ++n) {
        double sum = 0;
        for (std::int64_t c = 0; c < C; ++c)
          sum += static_cast<double>(a[static_cast<std::size_t>(s * C + c)]) * w[static_cast<std::size_t>((g * N + n) * C + c)];
        check_close(y[static_cast<std::size_t>(s * N + n)], sum, 1e-4, fmt::format("product of group {}, row {}, column {}", g, s, n));
      }
    }
  }
}

// Identity experts with unit weights: combine(dispatch(x)) is K * x, exactly, for integers.
void check_exchange() {
  constexpr int P = 4;
  constexpr std::int64_t H = 8, E = 8, K = 3;
  run_ranks(P, [&](Fabric& fabric) {
    const std::int64_t T = 5 + fabric.rank();
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t k = 0; k < K; ++k) ids.push_back(static_cast<std::int32_t>((t * 5 + k * 3 + fabric.rank()) % E));
    }
    const Route route = Route::from_ids(T, K, E, ids);
    std::vector<float> x(static_cast<std::size_t>(T * H)), out(x.size(), -1.0f);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 31) - 15.0f;
    ExchangeConfig config;
    config.H = H;
    config.E = E;
    config.K = K;
    Exchange exchange(config, block_placement(E, P), fabric);
    const DispatchHandle handle = exchange.plan(route);
    Tensor rows;
    exchange.dispatch(handle, TensorView::of(x.data(), {T, H}), rows);
    const ReceiveLayout& layout = handle.layout;
    Tensor y(DType::kF32, {layout.S_padded(), H}), z(DType::kF32, {layout.R(), H});
    permute(layout, rows, y);
    unpermute_reduce(layout, y, true, z);
    exchange.combine(handle, z, TensorView::of(out.data(), {T, H}));
    for (std::size_t i = 0; i < x.size(); ++i) {
      WB_CHECK(out[i] == static_cast<float>(K) * x[i], "rank {}, element {}: {} where {} was expected", fabric.rank(), i, out[i], static_cast<float>(K) * x[i]);
    }
  });
}

// The output of the layer on T tokens spread over P ranks.
std::vector<float> moe_output(int P) {
  constexpr std::int64_t T = 24, H = 16, E = 8, F = 12;
  MoeConfig config;
  config.H = H;
  config.E = config.router.E = E;
  config.K = config.router.K = 2;
  config.F = F;
  const std::int64_t L = E / P, rows = T / P, inner = config.inner_width();
  auto x = random_values(T * H, 10), gate = random_values(E * H, 11), w1 = random_values(E * inner * H, 12, 0.2f), w2 = random_values(E * H * F, 13, 0.2f);
  std::vector<float> out(static_cast<std::size_t>(T * H));
  run_ranks(P, [&](Fabric& fabric) {
    const std::int64_t rank = fabric.rank();
    MoeTensors parameters;
    parameters.gate = TensorView::of(gate.data(), {E, H});
    parameters.w1 = TensorView::of(w1.data() + rank * L * inner * H, {L, inner, H});
    parameters.w2 = TensorView::of(w2.data() + rank * L * H * F, {L, H, F});
    MoeLayer layer(config, fabric, fabric);
    MoeStep step;
    layer.forward(parameters, TensorView::of(x.data() + rank * rows * H, {rows, H}), TensorView::of(out.data() + rank * rows * H, {rows, H}), step);
  });
  return out;
}

void check_moe_layer() {
  const std::vector<float> one = moe_output(1), four = moe_output(4);
  double largest = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    WB_CHECK(std::isfinite(one[i]), "output {} is {}", i, one[i]);
    check_close(four[i], one[i], 1e-5, fmt::format("output {} on 4 ranks against 1", i));
    largest = std::max(largest, std::abs(static_cast<double>(one[i])));
  }
  WB_CHECK(largest > 1e-3, "the layer's outputs are all near 0 (largest {})", largest);
}

// A rank that never arrives must end in a timeout that names it, not in a hang.
void check_timeout() {
  FabricOptions options;
  options.timeout = std::chrono::milliseconds(50);
  try {
    run_ranks(
        2,
        [](Fabric& fabric) {
          if (fabric.rank() == 0) fabric.barrier("selftest");
        },
        options);
  } catch (const Error& error) {
    WB_CHECK(error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kPeerFailed, "a missing rank gave: {}", error.what());
    return;
  }
  WB_FAIL(ErrorCode::kInternal, "a barrier passed although a rank never came");
}

}  // namespace

std::vector<SelfCheck> engine_self_checks() {
  std::vector<SelfCheck> checks = {
      {"headers and library have one version", [] { check_component_version("the command's headers", version()); }},
      {"router: top 2 of 4, worked by hand", check_router},
      {"grouped matmul against a plain loop", check_grouped_gemm},
      {"exchange: combine(dispatch(x)) = K x on 4 ranks", check_exchange},
      {"MoE layer: 4 ranks equal 1 rank", check_moe_layer},
      {"a missing rank is an error, not a hang", check_timeout},
  };
  if (has_usable_gpu()) checks.push_back({"router on cuda:0 against the reference", check_router_on_gpu});
  return checks;
}

std::vector<SelfCheckResult> run_self_checks(const std::vector<SelfCheck>& checks) {
  std::vector<SelfCheckResult> results;
  for (const SelfCheck& check : checks) {
    SelfCheckResult result{check.name, "", 0};
    const auto start = std::chrono::steady_clock::now();
    try {
      check.body();
    } catch (const std::exception& error) {
      result.failure = error.what();
      if (result.failure.empty()) result.failure = "failed without a text";
    }
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    results.push_back(std::move(result));
  }
  return results;
}

int self_check_exit_code(const std::vector<SelfCheckResult>& results) {
  for (const SelfCheckResult& result : results) {
    if (!result.failure.empty()) return 1;
  }
  return results.empty() ? 1 : 0;
}

}  // namespace waybill::cli
