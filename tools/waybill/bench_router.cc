// SPDX-License-Identifier: Apache-2.0
// Router forward, backward and losses of one rank, on random logits or on logits whose routes are a load's.
#include <fmt/format.h>

#include <cstdlib>
#include <memory>

#include "bench_record.h"
#include "bench_router_load.h"
#include "bench_router_problem.h"
#include "bench_verbs.h"
#include "waybill/log.h"
#include "waybill/route_io.h"

namespace waybill::cli {
namespace {

void run(const BenchOptions& options) {
  if (options.device == "cuda") return bench_router_on_gpu(options);
  // chosen_implementation() reads the lines of WB_LOG=select; they are not for the terminal.
  setenv("WB_LOG", "select", 1);
  set_log_callback({});
  RouterProblem problem = make_router_problem(options);
  const BenchShape& shape = problem.shape;
  const int threads = options.threads > 0 ? options.threads : num_usable_cores();
  ThreadPool pool(threads);
  const Stream stream = Stream::cpu(&pool);
  BenchReport report(options, shape, threads);
  const auto forward = [&] { router_forward(problem.config, problem.inputs, problem.outputs(), stream); };
  const auto backward = [&] {
    router_backward(problem.config, problem.losses, problem.inputs, problem.route, problem.d_weights.data(), {}, 1.0f, problem.d_logits, stream);
  };
  const auto z_loss = [&] { return router_losses(problem.config, problem.losses, problem.inputs, problem.route, {}, stream).z; };
  const RouterRuns runs{forward, backward, z_loss};
  if (!options.no_check) check_router_bench(problem, runs);
  check_router_load(problem, runs);
  report.set_checked(!options.no_check);
  BenchRecord record;
  record.op = "router";
  record.implementation = chosen_implementation("router", forward);
  if (!options.save_route.empty()) save_route(options.save_route, problem.route);
  record.load = summarise_load(problem.load, {problem.route.view()});
  const double rate = memory_read_rate(threads) * 1e-6;  // bytes a microsecond
  const double logit_bytes = problem.logit_bytes(), route_bytes = problem.route_bytes();
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
    add("backward with z-loss", logit_bytes + route_bytes + static_cast<double>(shape.T * shape.E) * 4, backward);
    add("losses (z)", logit_bytes, [&] { (void)z_loss(); });
  }
  report.finish();
}

}  // namespace

void register_bench_router(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("router", "Router forward, backward and losses");
  auto options = std::make_shared<BenchOptions>();
  add_common_options(*command, *options);
  command->get_option("--load")->description(std::string(kRandomLoad) + " (whatever random logits give), or logits whose routes are those of " + load_names() +
                                             ", or of recorded:RUN/routes/STEP/LAYER");
  options->load = kRandomLoad;
  command->get_option("--load")->default_str(kRandomLoad);
  command->add_option("--dtype", options->dtype, "of the logits")->check(CLI::IsMember({"fp32", "bf16", "fp16"}))->capture_default_str();
  command->add_option("--device", options->device, "cuda: the first GPU, one CUDA graph of launches (needs a CUDA build)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--pass", options->pass, "what to time")->check(CLI::IsMember({"all", "forward", "backward"}))->capture_default_str();
  command->add_option("--save-route", options->save_route, "write the route to this file (waybill inspect route reads it)");
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
