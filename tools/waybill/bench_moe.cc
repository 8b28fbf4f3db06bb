// SPDX-License-Identifier: Apache-2.0
// The MoE layer over P ranks, forward and backward, with the load's routes replayed through it.
#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "bench_record.h"
#include "bench_verbs.h"
#include "waybill/moe.h"
#include "waybill/trainer.h"

namespace waybill::cli {
namespace {

MoeConfig config_of(const BenchShape& shape) {
  MoeConfig config;
  config.H = shape.H;
  config.F = shape.F;
  config.E = shape.E;
  config.K = shape.K;
  config.router = shape.router;
  return config;
}

// Parameters of one rank: a function of the global expert, so that they do not depend on P.
struct RankMemory {
  std::vector<float> gate, w1, w2, d_gate, d_w1, d_w2, x, out, d_out, dx;
  MoeTensors parameters, gradients;

  RankMemory(const BenchShape& s, std::uint64_t seed, int rank, std::int64_t T) {
    const std::int64_t L = s.E / s.P, inner = 2 * s.F;
    const auto width = static_cast<float>(s.H);
    gate = random_floats(s.E * s.H, seed + 10, 1 / std::sqrt(width));
    w1 = random_floats(L * inner * s.H, seed + 100 + static_cast<std::uint64_t>(rank), 1 / std::sqrt(width));
    w2 = random_floats(L * s.H * s.F, seed + 2000 + static_cast<std::uint64_t>(rank), 1 / std::sqrt(static_cast<float>(s.F)));
    x = random_floats(T * s.H, seed + 30000 + static_cast<std::uint64_t>(rank));
    d_out = random_floats(T * s.H, seed + 400000 + static_cast<std::uint64_t>(rank));
    d_gate.resize(gate.size());
    d_w1.resize(w1.size());
    d_w2.resize(w2.size());
    out.resize(x.size());
    dx.resize(x.size());
    parameters = {TensorView::of(gate.data(), {s.E, s.H}),
                  {},
                  TensorView::of(w1.data(), {L, inner, s.H}),
                  TensorView::of(w2.data(), {L, s.H, s.F}),
                  {},
                  {},
                  {},
                  {},
                  {},
                  {}};
    gradients = {TensorView::of(d_gate.data(), {s.E, s.H}),
                 {},
                 TensorView::of(d_w1.data(), {L, inner, s.H}),
                 TensorView::of(d_w2.data(), {L, s.H, s.F}),
                 {},
                 {},
                 {},
                 {},
                 {},
                 {}};
  }
};

// One token's output through its experts, in double. Expert parameters come from the owners' seeds.
std::vector<double> expected_row(const BenchShape& s, std::uint64_t seed, const Route& route, std::int64_t t, const float* x) {
  const std::int64_t L = s.E / s.P, inner = 2 * s.F;
  std::vector<double> out(static_cast<std::size_t>(s.H));
  const double w1_scale = 1 / std::sqrt(static_cast<float>(s.H)), w2_scale = 1 / std::sqrt(static_cast<float>(s.F));
  for (std::int64_t k = 0; k < s.K; ++k) {
    const std::int32_t e = route.view().id(t, k);
    if (e < 0) continue;
    const auto owner = static_cast<std::uint64_t>(e / L);
    const std::int64_t local = e % L;
    const auto w1 = [&](std::int64_t n, std::int64_t h) {
      return static_cast<double>(static_cast<float>(w1_scale) * random_normal(seed + 100 + owner, static_cast<std::uint64_t>((local * inner + n) * s.H + h)));
    };
    std::vector<double> a(static_cast<std::size_t>(s.F));
    for (std::int64_t f = 0; f < s.F; ++f) {
      double gate = 0, up = 0;
      for (std::int64_t h = 0; h < s.H; ++h) {
        gate += w1(f, h) * x[h];
        up += w1(s.F + f, h) * x[h];
      }
      a[static_cast<std::size_t>(f)] = route.view().weights[t * s.K + k] * gate / (1 + std::exp(-gate)) * up;
    }
    for (std::int64_t h = 0; h < s.H; ++h) {
      for (std::int64_t f = 0; f < s.F; ++f) {
        out[static_cast<std::size_t>(h)] +=
            a[static_cast<std::size_t>(f)] *
            static_cast<double>(static_cast<float>(w2_scale) * random_normal(seed + 2000 + owner, static_cast<std::uint64_t>((local * s.H + h) * s.F + f)));
      }
    }
  }
  return out;
}

void check(const BenchShape& s, std::uint64_t seed, const MoeStep& step, const RankMemory& memory) {
  const std::int64_t T = static_cast<std::int64_t>(memory.x.size()) / s.H;
  for (const std::int64_t t : {std::int64_t{0}, T - 1}) {
    if (t < 0 || t >= T) continue;
    const std::vector<double> expected = expected_row(s, seed, step.route, t, memory.x.data() + t * s.H);
    double norm = 0;
    for (const double value : expected) norm = std::max(norm, std::abs(value));
    for (std::int64_t h = 0; h < s.H; ++h) {
      const double seen = memory.out[static_cast<std::size_t>(t * s.H + h)], wanted = expected[static_cast<std::size_t>(h)];
      WB_CHECK(std::abs(seen - wanted) <= 1e-4 * norm + 1e-6, "token {}, column {}: {} where the dense loop gives {}", t, h, seen, wanted);
    }
  }
}

void measure_rank(const BenchOptions& options, const BenchShape& shape, const Route& route, Fabric& fabric, BenchRecord record, BenchReport* report,
                  double ceiling) {
  ThreadPool pool(threads_per_rank(options, shape.P));
  RankMemory memory(shape, options.seed, fabric.rank(), route.T());
  MoeLayer layer(config_of(shape), fabric, fabric, &pool);
  MoeStep step;
  MoeForwardOptions forward_options;
  forward_options.replay = &route;
  const TensorView x = TensorView::of(memory.x.data(), {route.T(), shape.H}), out = TensorView::of(memory.out.data(), {route.T(), shape.H});
  const TensorView d_out = TensorView::of(memory.d_out.data(), {route.T(), shape.H}), dx = TensorView::of(memory.dx.data(), {route.T(), shape.H});
  const auto forward = [&] { layer.forward(memory.parameters, x, out, step, forward_options); };
  const auto both = [&] {
    forward();
    layer.backward(memory.parameters, memory.gradients, x, d_out, dx, step);
  };
  forward();
  if (!options.no_check) check(shape, options.seed, step, memory);
  std::int64_t slots = step.slots;
  fabric.all_reduce(std::span<std::int64_t>(&slots, 1), ReduceOp::kSum, "bench slots");
  const double flops = 6.0 * static_cast<double>(slots) * static_cast<double>(shape.H) * static_cast<double>(shape.F);
  const auto add = [&](const char* variant, double work, const std::function<void()>& body) {
    const Timing timing = measure_ranks(options, fabric, body);
    if (report == nullptr) return;
    record.variant = variant;
    record.timing = timing;
    record.flops = work;
    record.floor_us = work / ceiling;
    record.floor_kind = "matmul rate";
    record.plan_included = true;
    report->add(record);
  };
  add("forward", flops, forward);
  add("forward + backward", 3 * flops, both);
}

void run(const BenchOptions& options) {
  const BenchShape shape = options.resolve();
  const std::vector<Route> routes = make_load(options, shape);
  BenchReport report(options, shape, threads_per_rank(options, shape.P));
  report.set_checked(!options.no_check);
  BenchRecord record;
  record.op = "moe layer";
  record.implementation = "compact";
  record.load = summarise_load(options.load, views_of(routes));
  const double ceiling = measure_matmul_ceiling() * 1e6;  // flops a microsecond, all usable cores
  run_ranks(shape.P, [&](Fabric& fabric) {
    measure_rank(options, shape, routes[static_cast<std::size_t>(fabric.rank())], fabric, record, fabric.rank() == 0 ? &report : nullptr, ceiling);
  });
  report.finish();
}

}  // namespace

void register_bench_moe(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("moe", "The MoE layer over ranks, forward and backward");
  auto options = std::make_shared<BenchOptions>();
  add_common_options(*command, *options);
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
