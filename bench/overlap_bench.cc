// SPDX-License-Identifier: Apache-2.0
// What exchange.overlap_shared saves: one MoE layer with a shared expert, forward and backward, once with the shared expert's matmuls between the
// halves of dispatch and once behind them. Both variants take turns, results are compared to the bit first.
//   mpirun -n 2 --bind-to none overlap_bench --shared 1024        ranks are processes; without a launcher: 2 threads (--ranks)
//     --load W1   the routes of a load of bench/shapes/loads.toml (or recorded:FOLDER) in place of the router's own choice
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <memory>

#include "waybill/bench_loads.h"
#include "waybill/bench_measure.h"
#include "waybill/bench_verbs.h"
#include "waybill/moe.h"
#include "waybill/mpi_fabric.h"

namespace waybill {
namespace {

struct Options {
  std::int64_t T = 1024, H = 512, E = 16, K = 4, F = 256, shared_F = 1024, iterations = 20;
  double seconds = 5;
  int ranks = 2, threads = 1;
  std::string load;  // empty: the router chooses
};

// This rank's routes of the load; an empty one where there is none.
Route route_of(const Options& o, const Fabric& fabric) {
  if (o.load.empty()) return {};
  cli::BenchOptions options;
  options.load = o.load;
  cli::BenchShape shape;
  shape.E = o.E, shape.K = o.K, shape.T = o.T, shape.P = fabric.size();
  return std::move(cli::make_load(options, shape)[static_cast<std::size_t>(fabric.rank())]);
}

// One variant on one rank. Both variants have the same numbers.
class Variant {
 public:
  // T: this rank's tokens
  Variant(const Options& o, bool overlap, const Route& route, std::int64_t T, Fabric& fabric, ThreadPool* pool)
      : layer_(config_of(o, overlap), fabric, fabric, pool),
        route_(route),
        x_(random({T, o.H}, 10 + static_cast<std::uint64_t>(fabric.rank()), 1)),
        d_out_(random({T, o.H}, 20 + static_cast<std::uint64_t>(fabric.rank()), 1)),
        out_(DType::kF32, {T, o.H}),
        dx_(DType::kF32, {T, o.H}) {
    const std::int64_t L = layer_.L();
    const float scale = 1.0f / std::sqrt(static_cast<float>(o.H));
    add(&MoeTensors::gate, {o.E, o.H}, 1, scale);
    add(&MoeTensors::w1, {L, 2 * o.F, o.H}, 2 + 100 * static_cast<std::uint64_t>(fabric.rank()), scale);
    add(&MoeTensors::w2, {L, o.H, o.F}, 3 + 100 * static_cast<std::uint64_t>(fabric.rank()), 1.0f / std::sqrt(static_cast<float>(o.F)));
    add(&MoeTensors::shared_w1, {2 * o.shared_F, o.H}, 4, scale);
    add(&MoeTensors::shared_w2, {o.H, o.shared_F}, 5, 1.0f / std::sqrt(static_cast<float>(o.shared_F)));
  }
  void run() {
    MoeForwardOptions options;
    if (route_.E() > 0) options.replay = &route_;
    layer_.forward(parameters_, x_, out_, step_, options, &times_);
    layer_.backward(parameters_, gradients_, x_, d_out_, dx_, step_, 1.0f, &times_);
    ++steps_;
  }
  // After one step from zero gradients.
  bool operator==(const Variant& other) const {
    const auto same = [](const TensorView& a, const TensorView& b) {
      return std::memcmp(a.data, b.data, static_cast<std::size_t>(a.size()) * sizeof(float)) == 0;
    };
    return same(out_, other.out_) && same(dx_, other.dx_) && same(gradients_.w1, other.gradients_.w1) && same(gradients_.w2, other.gradients_.w2) &&
           same(gradients_.shared_w1, other.gradients_.shared_w1) && same(gradients_.shared_w2, other.gradients_.shared_w2) &&
           same(gradients_.gate, other.gradients_.gate);
  }
  void forget_times() { times_ = {}, steps_ = 0; }
  // Milliseconds a step of a phase on this rank, and the waiting part of it.
  double ms(Phase phase) const { return times_.seconds[static_cast<std::size_t>(phase)] * 1e3 / steps_; }
  double wait_ms(Phase phase) const { return times_.wait_seconds[static_cast<std::size_t>(phase)] * 1e3 / steps_; }
  std::int64_t payload_bytes() const { return layer_.bytes().payload / std::max<std::int64_t>(1, steps_); }

 private:
  static MoeConfig config_of(const Options& o, bool overlap) {
    MoeConfig config;
    config.H = o.H, config.F = o.F, config.shared_F = o.shared_F;
    config.E = config.router.E = o.E, config.K = config.router.K = o.K;
    config.overlap_shared = overlap;
    return config;
  }
  static Tensor random(std::initializer_list<std::int64_t> shape, std::uint64_t key, float scale) {
    Tensor tensor(DType::kF32, shape);
    const std::vector<float> values = cli::random_floats(tensor.size(), key, scale);
    std::memcpy(tensor.view().data, values.data(), values.size() * sizeof(float));
    return tensor;
  }
  void add(TensorView MoeTensors::*member, std::initializer_list<std::int64_t> shape, std::uint64_t key, float scale) {
    memory_.push_back(random(shape, key, scale));
    parameters_.*member = memory_.back().view();
    memory_.push_back(Tensor::zeros(DType::kF32, shape));
    gradients_.*member = memory_.back().view();
  }

  MoeLayer layer_;
  const Route& route_;
  std::vector<Tensor> memory_;
  MoeTensors parameters_, gradients_;
  Tensor x_, d_out_, out_, dx_;
  MoeStep step_;
  PhaseTimes times_;
  std::int64_t steps_ = 0;
};

void measure_rank(const Options& o, Fabric& fabric) {
  ThreadPool pool(o.threads);
  const Route route = route_of(o, fabric);
  const std::int64_t T = o.load.empty() ? o.T : route.T();
  Variant behind(o, false, route, T, fabric, &pool), between(o, true, route, T, fabric, &pool);
  behind.run();
  between.run();
  std::int64_t different = behind == between ? 0 : 1;
  fabric.all_reduce(std::span<std::int64_t>(&different, 1), ReduceOp::kSum, "bench check");
  WB_CHECK(different == 0, "results with and without the overlap differ on {} rank(s): nothing is timed", different);
  std::int64_t tokens = T;
  fabric.all_reduce(std::span<std::int64_t>(&tokens, 1), ReduceOp::kSum, "bench tokens");
  behind.forget_times();
  between.forget_times();
  cli::BenchOptions options;
  options.iterations = o.iterations;
  options.seconds = o.seconds;
  const std::vector<cli::Timing> t = cli::measure_ranks(options, fabric, {[&] { behind.run(); }, [&] { between.run(); }});
  if (fabric.rank() != 0) return;
  const double saved = 1 - t[1].p50_us / t[0].p50_us;
  fmt::print("{} ranks, {} thread(s) a rank, load {}, {} tokens in all, H={} E={} K={} F={} shared_F={}; equal to the bit, {} rounds\n", fabric.size(),
             o.threads, o.load.empty() ? "of the router" : o.load, tokens, o.H, o.E, o.K, o.F, o.shared_F, t[0].iterations);
  fmt::print("overlap_shared  step ms p10/median/p90      rank 0: dispatch ms (waiting)  shared ms\n");
  for (int i = 0; i < 2; ++i) {
    const Variant& v = i == 0 ? behind : between;
    const auto at = static_cast<std::size_t>(i);
    fmt::print("{:<14}  {:.2f} / {:.2f} / {:.2f}   {:.2f} ({:.2f})   {:.2f}\n", i == 0 ? "false" : "true", t[at].p10_us / 1e3, t[at].p50_us / 1e3,
               t[at].p90_us / 1e3, v.ms(Phase::kDispatch), v.wait_ms(Phase::kDispatch), v.ms(Phase::kShared));
  }
  fmt::print("saved: {:.2f} ms = {:.1f} % of a step (dispatch of rank 0 sends {:.2f} MB a step)\n", (t[0].p50_us - t[1].p50_us) / 1e3, saved * 100,
             static_cast<double>(behind.payload_bytes()) * 1e-6);
}

void run(int argc, char** argv) {
  Options o;
  CLI::App app{"What the overlap of dispatch and the shared expert saves"};
  app.add_option("-T,--tokens", o.T, "a rank")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("-H,--width", o.H)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("-E,--experts", o.E)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("-K,--top-k", o.K)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("-F,--inner", o.F)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--shared", o.shared_F, "inner width of the shared expert")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--iterations", o.iterations, "least number of rounds")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seconds", o.seconds, "least time a variant")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ranks", o.ranks, "threads as ranks, without a launcher")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--load", o.load, cli::load_names() + ", or recorded:FOLDER; default: the router's choice");
  app.add_option("--threads", o.threads, "of a rank")->check(CLI::PositiveNumber)->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) std::exit(app.exit(error));  // --help
    WB_FAIL(ErrorCode::kInvalidArgument, "{} (--help lists the options)", error.what());
  }
  if (mpi_launched()) {
    measure_rank(o, *make_mpi_fabric());
  } else {
    run_ranks(o.ranks, [&](Fabric& fabric) { measure_rank(o, fabric); });
  }
}

}  // namespace
}  // namespace waybill

int main(int argc, char** argv) {
  try {
    waybill::run(argc, argv);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "overlap_bench: {}\n", error.what());
    return 2;
  }
}
