// SPDX-License-Identifier: Apache-2.0
#include "bench_router_problem.h"

#include <cmath>
#include <utility>

#include "bench_router_load.h"
#include "bench_verbs.h"
#include "ops/router/router_impl.h"

namespace waybill::cli {

RouterProblem::RouterProblem(const BenchOptions& options, BenchShape resolved) : RouterProblem(options, std::move(resolved), Route()) {}

RouterProblem::RouterProblem(const BenchOptions& options, BenchShape resolved, Route given)
    : shape(std::move(resolved)), config(shape.router), wanted(std::move(given)), load(wanted.E() > 0 ? options.load : "random logits") {
  if (wanted.E() > 0) shape.T = wanted.T();
  const std::int64_t T = shape.T, E = shape.E;
  logits_f32 = random_floats(T * E, options.seed);
  if (wanted.E() > 0) {
    const DType dtype = options.dtype == "bf16" ? DType::kBF16 : options.dtype == "fp16" ? DType::kF16 : DType::kF32;
    give_routes(config, wanted, dtype, logits_f32, load, shape.name);
  }
  d_weights = random_floats(T * shape.K, options.seed + 1);
  if (options.dtype == "fp32") {
    inputs.logits = TensorView::of(logits_f32.data(), {T, E});
  } else {
    const bool is_bf16 = options.dtype == "bf16";
    for (const float value : logits_f32) logits_16.push_back(is_bf16 ? bf16::from_float(value) : f16::from_float(value));
    inputs.logits = TensorView(logits_16.data(), is_bf16 ? DType::kBF16 : DType::kF16, {T, E});
  }
  losses.z_coefficient = 1e-3f;
  route = Route(T, shape.K, E);
  d_logits = Tensor(DType::kF32, {T, E});
}

RouterProblem make_router_problem(const BenchOptions& options) {
  const BenchShape shape = options.resolve();
  return RouterProblem(options, shape, router_load(options, shape));
}

RouterOutputs RouterProblem::outputs() const {
  RouterOutputs result;
  result.route = route.view();
  return result;
}

double RouterProblem::logit_bytes() const { return static_cast<double>(shape.T * shape.E) * static_cast<double>(size_bytes(inputs.logits.dtype)); }
double RouterProblem::route_bytes() const { return static_cast<double>(shape.T * shape.K) * static_cast<double>(size_bytes(route.view().id_dtype) + 4); }

void check_router_bench(RouterProblem& problem, const RouterRuns& runs) {
  const std::int64_t T = problem.shape.T, K = problem.shape.K, E = problem.shape.E;
  Route expected(T, K, E);
  RouterOutputs reference_outputs;
  reference_outputs.route = expected.view();
  router_impl::forward_ref({problem.config, problem.inputs, reference_outputs, {}});
  runs.forward();
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int32_t seen = problem.route.view().id(i / K, i % K), wanted = expected.view().id(i / K, i % K);
    WB_CHECK(seen == wanted, "token {}, slot {}: expert {} where the reference chose {}", i / K, i % K, seen, wanted);
    const float weight = problem.route.view().weights[i], reference = expected.view().weights[i];
    WB_CHECK(std::abs(weight - reference) <= 2e-6f * std::abs(reference) + 1e-30f, "token {}, slot {}: weight {} where the reference has {}", i / K, i % K,
             weight, reference);
  }
  Tensor d_expected(DType::kF32, {T, E});
  router_impl::backward_ref({problem.config, problem.losses, problem.inputs, expected.view(), problem.d_weights.data(), {}, 1.0f, d_expected.view(), {}});
  runs.backward();
  for (std::int64_t i = 0; i < T * E; ++i) {
    const float seen = problem.d_logits.as<float>()[i], wanted = d_expected.as<float>()[i];
    WB_CHECK(std::abs(seen - wanted) <= 1e-6f + 1e-5f * std::abs(wanted), "gradient of token {}, expert {}: {} where the reference has {}", i / E, i % E, seen,
             wanted);
  }
  const double wanted = router_impl::losses_ref({problem.config, problem.losses, problem.inputs, expected.view(), {}, {}}).z, seen = runs.z_loss();
  WB_CHECK(std::abs(seen - wanted) <= 1e-5 * std::abs(wanted), "z-loss {} where the reference has {}", seen, wanted);
}

void check_router_load(RouterProblem& problem, const RouterRuns& runs) {
  if (problem.wanted.E() == 0) return;
  runs.forward();
  expect_routes(problem.route, problem.wanted, problem.load);
}

}  // namespace waybill::cli
