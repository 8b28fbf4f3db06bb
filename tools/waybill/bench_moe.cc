// SPDX-License-Identifier: Apache-2.0
// waybill bench moe: the MoE layer and the older designs on one shape, one load and one machine in one run. Results are compared first;
// unequal ones are refused, and nothing is timed.
#include "bench_moe.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <memory>

#include "bench_moe_gpu.h"
#include "bench_verbs.h"
#include "waybill/trainer.h"

namespace waybill::cli {
namespace {

struct MoeBenchOptions {
  BenchOptions common;
  GpuMoeBench gpu;
  std::vector<std::string> stacks, recipes;
  bool no_ablation = false;
};

// One token's output through its experts, in double.
std::vector<double> expected_row(const BenchShape& s, std::uint64_t seed, const RouteView& route, std::int64_t t, const float* x) {
  std::vector<double> out(static_cast<std::size_t>(s.H));
  for (std::int64_t k = 0; k < s.K; ++k) {
    const std::int32_t e = route.id(t, k);
    if (e < 0) continue;
    const auto key = seed + 100 + 2 * static_cast<std::uint64_t>(e);
    const std::vector<float> w1 = random_floats(2 * s.F * s.H, key, 1 / std::sqrt(static_cast<float>(s.H)));
    const std::vector<float> w2 = random_floats(s.H * s.F, key + 1, 1 / std::sqrt(static_cast<float>(s.F)));
    for (std::int64_t f = 0; f < s.F; ++f) {
      double gate = 0, up = 0;
      for (std::int64_t h = 0; h < s.H; ++h) {
        gate += static_cast<double>(w1[static_cast<std::size_t>(f * s.H + h)]) * static_cast<double>(x[h]);
        up += static_cast<double>(w1[static_cast<std::size_t>((s.F + f) * s.H + h)]) * static_cast<double>(x[h]);
      }
      const double a = static_cast<double>(route.weights[t * s.K + k]) * gate / (1 + std::exp(-gate)) * up;
      for (std::int64_t h = 0; h < s.H; ++h) out[static_cast<std::size_t>(h)] += a * static_cast<double>(w2[static_cast<std::size_t>(h * s.F + f)]);
    }
  }
  return out;
}

// The sparse layer, which all others are compared with, against a dense loop in double: first and last token.
std::string oracle_difference(const BenchShape& s, std::uint64_t seed, const RouteView& route, const StackMemory& memory) {
  const std::int64_t T = route.T;
  for (const std::int64_t t : {std::int64_t{0}, T - 1}) {
    if (t < 0 || t >= T) continue;
    const std::vector<double> expected = expected_row(s, seed, route, t, memory.x.data() + t * s.H);
    double norm = 0;
    for (const double value : expected) norm = std::max(norm, std::abs(value));
    for (std::int64_t h = 0; h < s.H; ++h) {
      const double seen = static_cast<double>(memory.out[static_cast<std::size_t>(t * s.H + h)]), wanted = expected[static_cast<std::size_t>(h)];
      if (!(std::abs(seen - wanted) <= 1e-4 * norm + 1e-6)) return fmt::format("token {}, column {}: {} where the dense loop gives {}", t, h, seen, wanted);
    }
  }
  return "";
}

MoeStackCounters sum_over_ranks(Fabric& fabric, const MoeStackCounters& c) {
  std::vector<std::int64_t> v{c.bytes.payload, c.bytes.combined, c.bytes.ids, c.bytes.weights, c.bytes.counts,
                              c.slots_visited, c.scores_visited, c.real_rows, c.computed_rows, c.dropped_routes};
  fabric.all_reduce(std::span<std::int64_t>(v), ReduceOp::kSum, "bench counters");
  MoeStackCounters sum;
  sum.bytes.payload = v[0], sum.bytes.combined = v[1], sum.bytes.ids = v[2], sum.bytes.weights = v[3], sum.bytes.counts = v[4];
  sum.slots_visited = v[5], sum.scores_visited = v[6], sum.real_rows = v[7], sum.computed_rows = v[8], sum.dropped_routes = v[9];
  return sum;
}

class RankBench {
 public:
  RankBench(const BenchOptions& options, const BenchShape& shape, const Route* replay, Fabric& fabric)
      : options_(options),
        shape_(shape),
        replay_(replay),
        fabric_(fabric),
        T_(replay != nullptr ? replay->T() : shape.T),
        pool_(threads_per_rank(options, shape.P)),
        memory_(shape, options.seed, fabric.rank(), T_) {}

  // The routes of the last checked sparse stack: what a load that is not replayed looks like.
  const Route& route() const { return route_; }

  std::vector<StackCost> run(const std::vector<NamedStack>& stacks) {
    std::vector<StackCost> costs;
    costs.reserve(stacks.size());
    for (const NamedStack& stack : stacks) costs.push_back(check(stack));
    time(stacks, costs);
    return costs;
  }

 private:
  void forward(MoeStack& stack, PhaseTimes* times) {
    stack.forward(memory_.parameters, TensorView::of(memory_.x.data(), {T_, shape_.H}), TensorView::of(memory_.out.data(), {T_, shape_.H}), replay_, times);
  }
  void backward(MoeStack& stack, PhaseTimes* times) {
    stack.backward(memory_.parameters, memory_.gradients, TensorView::of(memory_.x.data(), {T_, shape_.H}),
                   TensorView::of(memory_.d_out.data(), {T_, shape_.H}), TensorView::of(memory_.dx.data(), {T_, shape_.H}), times);
  }

  StackCost check(const NamedStack& named) {
    const std::unique_ptr<MoeStack> stack = make_moe_stack(named.config, fabric_, &pool_);
    memory_.clear_gradients();
    forward(*stack, nullptr);
    backward(*stack, nullptr);
    StackCost cost;
    cost.counters = sum_over_ranks(fabric_, stack->counters());
    if (named.config.kind == MoeStackKind::kSparse) route_ = Route::copy_of(stack->route().view());
    if (options_.no_check) return cost;
    const StackOutputs outputs = outputs_of(memory_, *stack);
    if (!has_wanted_) {
      refuse_unequal(fabric_, named.name + " (against a dense loop)", oracle_difference(shape_, options_.seed, stack->route().view(), memory_));
      wanted_ = outputs;
      has_wanted_ = true;
    } else {
      refuse_unequal(fabric_, named.name, difference(outputs, wanted_, named.config.kind == MoeStackKind::kCapacity));
    }
    return cost;
  }

  // All stacks live side by side and take turns, forward and forward + backward.
  void time(const std::vector<NamedStack>& stacks, std::vector<StackCost>& costs) {
    struct Running {
      std::unique_ptr<MoeStack> stack;
      PhaseTimes times;
      std::int64_t calls = 0;
    };
    std::vector<Running> running;
    running.reserve(stacks.size());
    for (const NamedStack& named : stacks) running.push_back({make_moe_stack(named.config, fabric_, &pool_), {}, 0});
    std::vector<std::function<void()>> bodies;
    for (Running& r : running) {
      bodies.emplace_back([this, &r] { forward(*r.stack, nullptr); });
      bodies.emplace_back([this, &r] {
        forward(*r.stack, &r.times);
        backward(*r.stack, &r.times);
        ++r.calls;
      });
    }
    const std::vector<Timing> timings = measure_ranks(options_, fabric_, bodies);
    for (std::size_t i = 0; i < running.size(); ++i) {
      costs[i].forward = timings[2 * i];
      costs[i].both = timings[2 * i + 1];
      PhaseTimes& times = running[i].times;
      fabric_.all_reduce(std::span<double>(times.seconds), ReduceOp::kSum, "bench phases");
      for (double& seconds : times.seconds) seconds /= static_cast<double>(running[i].calls * fabric_.size());
      costs[i].phases = times;
    }
  }

  const BenchOptions& options_;
  const BenchShape& shape_;
  const Route* replay_;
  Fabric& fabric_;
  std::int64_t T_;
  ThreadPool pool_;
  StackMemory memory_;
  Route route_;
  StackOutputs wanted_;  // the sparse stack's
  bool has_wanted_ = false;
};

// Options of the command as the benchmark on GPUs takes them.
void run_on_gpu(const CLI::App& command, MoeBenchOptions options) {
  for (const char* name : {"--tokens", "--width", "--experts", "--top-k", "--inner", "--threads", "--loads", "--seed", "--seconds", "--no-check"}) {
    WB_CHECK(command.get_option(name)->count() == 0, "{} is for --device cpu: on GPUs shapes come from the shapes file, and every stack is checked", name);
  }
  GpuMoeBench gpu = options.gpu;
  WB_CHECK(std::isfinite(gpu.receive_factor), "--receive-factor {} must be a finite number", gpu.receive_factor);
  const auto split = [](const std::string& list) {
    std::vector<std::string> parts;
    for (std::size_t begin = 0; begin <= list.size();) {
      const std::size_t end = std::min(list.find(',', begin), list.size());
      if (end > begin) parts.push_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
    return parts;
  };
  if (command.get_option("--shape")->count() > 0) gpu.shapes = split(options.common.shape);
  if (command.get_option("--load")->count() > 0) gpu.loads = split(options.common.load);
  for (std::string& load : gpu.loads) load = load == "router" ? "natural" : load;
  if (command.get_option("--iterations")->count() == 0) options.common.iterations = 160;
  for (const std::string& stack : options.stacks) {
    for (const std::string& name : split(stack)) gpu.stacks.push_back(name);
  }
  for (const std::string& recipe : options.recipes) {
    for (const std::string& name : split(recipe)) gpu.recipes.push_back(name);
  }
  gpu.no_ablation = options.no_ablation;
  const int code = bench_moe_on_gpu(options.common, gpu);
  if (code != 0) throw CLI::RuntimeError(code);
}

void run(const MoeBenchOptions& options) {
  const BenchOptions& common = options.common;
  const BenchShape shape = common.resolve();
  const bool replayed = common.load != "router";
  std::vector<Route> routes = replayed ? make_load(common, shape) : std::vector<Route>(static_cast<std::size_t>(shape.P));
  const std::vector<NamedStack> stacks = bench_stacks(shape, options.stacks, !options.no_ablation);
  std::vector<StackCost> costs;
  run_ranks(shape.P, [&](Fabric& fabric) {
    RankBench bench(common, shape, replayed ? &routes[static_cast<std::size_t>(fabric.rank())] : nullptr, fabric);
    std::vector<StackCost> mine = bench.run(stacks);
    if (!replayed) routes[static_cast<std::size_t>(fabric.rank())] = Route::copy_of(bench.route().view());
    if (fabric.rank() == 0) costs = std::move(mine);
  });
  BenchReport report(common, shape, threads_per_rank(common, shape.P));
  report.set_checked(!common.no_check);
  BenchRecord base;
  base.op = "moe layer";
  base.plan_included = true;
  base.floor_kind = "matmul rate";
  base.evidence = "MoE module";
  base.load = summarise_load(common.load, views_of(routes));
  const double flops = 6.0 * static_cast<double>(costs[0].counters.real_rows) * static_cast<double>(shape.H) * static_cast<double>(shape.F);
  const double ceiling = measure_matmul_ceiling() * 1e6;  // flops a microsecond, all usable cores
  base.flops = flops;
  base.floor_us = flops / ceiling;
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    add_records(report, base, stacks[i], costs[i]);
  }
  report.finish();
  if (common.json == "-") return;
  fmt::print("expert matmuls of a forward + backward: {:.2f} GFLOP, at the measured matmul rate {:.2f} ms\n", 3 * flops * 1e-9, 3 * flops / ceiling * 1e-3);
  print_stacks(stacks, costs, replayed);
  if (!common.json.empty()) fmt::print("plot: PYTHONPATH=tools/report python3 -m waybill_report.moe_bench {}\n", common.json);
}

}  // namespace

void register_bench_moe(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("moe", "The MoE layer and the older designs over ranks, forward and backward");
  auto options = std::make_shared<MoeBenchOptions>();
  add_common_options(*command, options->common);
  command->add_option("--stacks", options->stacks,
                      "designs to compare with sparse (default: all): loop padded capacity block-sparse dense-map; cuda: sparse beside exact exact-resend "
                      "exact-blocks dense-map padded capacity loop");
  command->add_flag("--no-ablation", options->no_ablation, "leave out the ladder from the dense map to the sparse layer");
  command->get_option("--load")->description("router (its own choice on random tokens), " + load_names() + ", or recorded:RUN/routes/STEP/LAYER");
  options->common.load = "router";
  command->get_option("--load")->default_str("router");
  command
      ->add_option("--device", options->common.device,
                   "cuda: two GPUs, one rank each (-P ranks; virtual ones where there are fewer GPUs), and the PyTorch layer where torch is installed")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--receive-factor", options->gpu.receive_factor, "cuda: budget of sparse and dense-map")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--recipe", options->recipes, "cuda: also the sparse layer under fp8, mxfp8 or nvfp4");
  command->add_flag("--f32-gradients", options->gpu.f32_gradients, "cuda: also with weight gradients added to in fp32");
  command->add_option("--column-blocks", options->gpu.column_blocks, "cuda: blocks of exact-blocks, a list (default: 2)");
  command->add_option("--eager", options->gpu.eager, "cuda: designs that are timed eager beside captured, a list, or none (default: all)");
  command->add_option("--most-seconds", options->gpu.seconds, "cuda: of a row's measured steps, for designs other than sparse and dense-map")
      ->check(CLI::PositiveNumber);
  command->add_flag("--wgrad-control", options->gpu.wgrad_control, "cuda: also the weight gradients beside ones whose sums have no order");
  command->add_flag("--no-peer", options->gpu.no_peer, "cuda: without the PyTorch layer");
  command->add_option("--trace", options->gpu.trace, "cuda: write the phases of a step for Perfetto");
  command->add_option("--plot", options->gpu.plot, "cuda: write an HTML page of plots (needs plotly)");
  command->add_option("--python", options->gpu.python, "cuda: interpreter of the PyTorch layer and of --plot")->capture_default_str();
  command->callback([options, command] {
    if (options->common.device == "cuda") return run_on_gpu(*command, *options);
    for (const char* name : {"--receive-factor", "--recipe", "--f32-gradients", "--wgrad-control", "--column-blocks", "--eager", "--most-seconds", "--no-peer",
                             "--trace", "--plot", "--python"}) {
      WB_CHECK(command->get_option(name)->count() == 0, "{} needs --device cuda", name);
    }
    run(*options);
  });
}

}  // namespace waybill::cli
