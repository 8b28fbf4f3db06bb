// SPDX-License-Identifier: Apache-2.0
// Router forward, backward and losses on random logits of one rank. --load does not apply: the logits decide.
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "bench_record.h"
#include "bench_verbs.h"
#include "ops/router/router_impl.h"
#include "waybill/log.h"
#include "waybill/route_io.h"

namespace waybill::cli {
namespace {

struct RouterProblem {
  BenchShape shape;
  RouterConfig config;
  RouterLossConfig losses;
  std::vector<float> logits_f32, d_weights;
  std::vector<std::uint16_t> logits_16;
  RouterInputs inputs;
  Route route;
  Tensor d_logits;

  RouterProblem(const BenchOptions& options, BenchShape resolved) : shape(std::move(resolved)), config(shape.router) {
    const std::int64_t T = shape.T, E = shape.E;
    logits_f32 = random_floats(T * E, options.seed);
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
  RouterOutputs outputs() const {
    RouterOutputs result;
    result.route = route.view();
    return result;
  }
};

// The z-loss within 1e-5 of the reference.
void check_losses(RouterProblem& problem, const RouteView& route, Stream stream) {
  const double wanted = router_impl::losses_ref({problem.config, problem.losses, problem.inputs, route, {}, {}}).z;
  const double seen = router_losses(problem.config, problem.losses, problem.inputs, problem.route, {}, stream).z;
  WB_CHECK(std::abs(seen - wanted) <= 1e-5 * std::abs(wanted), "z-loss {} where the reference has {}", seen, wanted);
}

// Ids equal to the bit, weights, gradients and losses within fp32 rounding of the reference.
void check(RouterProblem& problem, Stream stream) {
  const std::int64_t T = problem.shape.T, K = problem.shape.K, E = problem.shape.E;
  Route expected(T, K, E);
  RouterOutputs reference_outputs;
  reference_outputs.route = expected.view();
  router_impl::forward_ref({problem.config, problem.inputs, reference_outputs, {}});
  router_forward(problem.config, problem.inputs, problem.outputs(), stream);
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int32_t seen = problem.route.view().id(i / K, i % K), wanted = expected.view().id(i / K, i % K);
    WB_CHECK(seen == wanted, "token {}, slot {}: expert {} where the reference chose {}", i / K, i % K, seen, wanted);
    const float weight = problem.route.view().weights[i], reference = expected.view().weights[i];
    WB_CHECK(std::abs(weight - reference) <= 2e-6f * std::abs(reference) + 1e-30f, "token {}, slot {}: weight {} where the reference has {}", i / K, i % K,
             weight, reference);
  }
  Tensor d_expected(DType::kF32, {T, E});
  router_impl::backward_ref({problem.config, problem.losses, problem.inputs, expected.view(), problem.d_weights.data(), {}, 1.0f, d_expected.view(), {}});
  router_backward(problem.config, problem.losses, problem.inputs, problem.route, problem.d_weights.data(), {}, 1.0f, problem.d_logits, stream);
  for (std::int64_t i = 0; i < T * E; ++i) {
    const float seen = problem.d_logits.as<float>()[i], wanted = d_expected.as<float>()[i];
    WB_CHECK(std::abs(seen - wanted) <= 1e-6f + 1e-5f * std::abs(wanted), "gradient of token {}, expert {}: {} where the reference has {}", i / E, i % E, seen,
             wanted);
  }
  check_losses(problem, expected.view(), stream);
}

void run(const BenchOptions& options) {
  WB_CHECK(options.load == BenchOptions{}.load, "--load {} does not apply to bench router: its random logits decide the load", options.load);
  // chosen_implementation() reads the lines of WB_LOG=select; they are not for the terminal.
  setenv("WB_LOG", "select", 1);
  set_log_callback({});
  RouterProblem problem(options, options.resolve());
  const BenchShape& shape = problem.shape;
  const int threads = options.threads > 0 ? options.threads : num_usable_cores();
  ThreadPool pool(threads);
  const Stream stream = Stream::cpu(&pool);
  BenchReport report(options, shape, threads);
  if (!options.no_check) check(problem, stream);
  report.set_checked(!options.no_check);
  const auto forward = [&] { router_forward(problem.config, problem.inputs, problem.outputs(), stream); };
  BenchRecord record;
  record.op = "router";
  record.implementation = chosen_implementation("router", forward);
  if (!options.save_route.empty()) save_route(options.save_route, problem.route);
  record.load = summarise_load("random logits", {problem.route.view()});
  const double rate = memory_read_rate(threads) * 1e-6;  // bytes a microsecond
  const double logit_bytes = static_cast<double>(shape.T * shape.E) * static_cast<double>(size_bytes(problem.inputs.logits.dtype));
  const double route_bytes = static_cast<double>(shape.T * shape.K) * static_cast<double>(size_bytes(problem.route.view().id_dtype) + 4);
  const auto add = [&](const char* variant, double bytes, const std::function<void()>& body) {
    record.variant = variant;
    record.bytes = bytes;
    record.floor_us = memory_floor_us(bytes, rate);
    record.floor_kind = record.floor_us > 0 ? "memory read" : "";
    record.timing = measure(options, body);
    report.add(record);
  };
  if (options.pass != "backward") add("forward", logit_bytes + route_bytes, forward);
  if (options.pass != "forward") {
    add("backward with z-loss", logit_bytes + route_bytes + static_cast<double>(shape.T * shape.E) * 4,
        [&] { router_backward(problem.config, problem.losses, problem.inputs, problem.route, problem.d_weights.data(), {}, 1.0f, problem.d_logits, stream); });
    add("losses (z)", logit_bytes, [&] { router_losses(problem.config, problem.losses, problem.inputs, problem.route, {}, stream); });
  }
  report.finish();
}

}  // namespace

void register_bench_router(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("router", "Router forward, backward and losses");
  auto options = std::make_shared<BenchOptions>();
  add_common_options(*command, *options);
  command->add_option("--dtype", options->dtype, "of the logits")->check(CLI::IsMember({"fp32", "bf16", "fp16"}))->capture_default_str();
  command->add_option("--pass", options->pass, "what to time")->check(CLI::IsMember({"all", "forward", "backward"}))->capture_default_str();
  command->add_option("--save-route", options->save_route, "write the route to this file (waybill inspect route reads it)");
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
