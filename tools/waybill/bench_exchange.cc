// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine over P ranks (threads of this process): plan, dispatch, permute, reduce, combine.
#include <fmt/format.h>

#include <memory>

#include "bench_record.h"
#include "bench_verbs.h"
#include "waybill/exchange.h"
#include "waybill/fabric.h"

namespace waybill::cli {
namespace {

// What one rank needs for a round trip with identity experts.
class RoundTrip {
 public:
  RoundTrip(const BenchShape& shape, const Route& route, DType dtype, Fabric& fabric, ThreadPool* pool)
      : route_(route),
        pool_(pool),
        exchange_(config_of(shape), block_placement(shape.E, shape.P), fabric, pool),
        x_(dtype, {route.T(), shape.H}),
        out_(DType::kF32, {route.T(), shape.H}) {
    // Integers up to 15: exact in bf16, and in sums over up to 17 experts.
    for (std::int64_t i = 0; i < x_.size(); ++i) store(i, static_cast<float>(i % 31) - 15.0f);
    plan();
    allocate();
  }
  void plan() { handle_ = exchange_.plan(route_); }
  void dispatch() { exchange_.dispatch(handle_, x_, rows_); }
  void permute_rows() { permute(handle_.layout, rows_, y_, Stream::cpu(pool_)); }
  void reduce() { unpermute_reduce(handle_.layout, y_, true, z_, Stream::cpu(pool_)); }
  void combine() { exchange_.combine(handle_, z_, out_); }
  void all() {
    plan();
    dispatch();
    permute_rows();
    reduce();
    combine();
  }
  // combine(dispatch(x)) must be (number of routes) * x, to the bit.
  void check() {
    all();
    const std::int64_t H = x_.dim(1);
    for (std::int64_t t = 0; t < route_.T(); ++t) {
      int routes = 0;
      for (std::int64_t k = 0; k < route_.K(); ++k) routes += route_.view().id(t, k) >= 0 ? 1 : 0;
      for (std::int64_t h = 0; h < H; ++h) {
        const float wanted = static_cast<float>(routes) * (static_cast<float>((t * H + h) % 31) - 15.0f), seen = out_.as<float>()[t * H + h];
        WB_CHECK(seen == wanted, "token {}, column {}: {} where {} was expected", t, h, seen, wanted);
      }
    }
  }
  ExchangeBytes bytes_of_one() {
    exchange_.reset_bytes();
    all();
    return exchange_.bytes();
  }

 private:
  static ExchangeConfig config_of(const BenchShape& shape) {
    ExchangeConfig config;
    config.H = shape.H;
    config.E = shape.E;
    config.K = shape.K;
    return config;
  }
  void store(std::int64_t i, float value) {
    if (x_.view().dtype == DType::kF32) {
      x_.as<float>()[i] = value;
    } else {
      x_.as<bf16>()[i] = bf16(value);
    }
  }
  void allocate() {
    const std::int64_t H = x_.dim(1);
    y_ = Tensor(x_.view().dtype, {handle_.layout.S_padded(), H});
    z_ = Tensor(DType::kF32, {handle_.layout.R(), H});
  }

  const Route& route_;
  ThreadPool* pool_;
  Exchange exchange_;
  DispatchHandle handle_;
  Tensor x_, out_, rows_, y_, z_;
};

void measure_rank(const BenchOptions& options, const BenchShape& shape, const Route& route, Fabric& fabric, BenchRecord record, BenchReport* report,
                  double rate) {
  ThreadPool pool(threads_per_rank(options, shape.P));
  RoundTrip trip(shape, route, options.dtype == "bf16" ? DType::kBF16 : DType::kF32, fabric, &pool);
  if (!options.no_check) trip.check();
  ExchangeBytes bytes = trip.bytes_of_one();
  std::int64_t sums[] = {bytes.payload, bytes.combined, bytes.total()};
  fabric.all_reduce(std::span<std::int64_t>(sums), ReduceOp::kSum, "bench bytes");
  const auto add = [&](const char* variant, double moved, bool plan_included, const std::function<void()>& body) {
    const Timing timing = measure_ranks(options, fabric, body);
    if (report == nullptr) return;
    record.variant = variant;
    record.timing = timing;
    record.bytes = moved;
    record.floor_us = memory_floor_us(2 * moved, rate);  // read at the sender, written at the receiver
    record.floor_kind = record.floor_us > 0 ? "memory read" : "";
    record.plan_included = plan_included;
    report->add(record);
  };
  add("plan", 0, true, [&] { trip.plan(); });
  add("dispatch", static_cast<double>(sums[0]), false, [&] { trip.dispatch(); });
  add("permute (local)", 0, false, [&] { trip.permute_rows(); });
  add("reduce (local)", 0, false, [&] { trip.reduce(); });
  add("combine", static_cast<double>(sums[1]), false, [&] { trip.combine(); });
  add("round trip", static_cast<double>(sums[2]), true, [&] { trip.all(); });
}

void run(const BenchOptions& options) {
  const BenchShape shape = options.resolve();
  std::vector<Route> routes = make_load(options, shape);
  for (Route& route : routes) {
    for (std::int64_t i = 0; i < route.T() * route.K(); ++i) route.view().weights[i] = route.view().id(i / route.K(), i % route.K()) >= 0 ? 1.0f : 0.0f;
  }
  BenchReport report(options, shape, threads_per_rank(options, shape.P));
  report.set_checked(!options.no_check);
  BenchRecord record;
  record.op = "exchange";
  record.implementation = "threads";
  record.load = summarise_load(options.load, views_of(routes));
  const double rate = memory_read_rate(num_usable_cores()) * 1e-6;
  run_ranks(shape.P, [&](Fabric& fabric) {
    measure_rank(options, shape, routes[static_cast<std::size_t>(fabric.rank())], fabric, record, fabric.rank() == 0 ? &report : nullptr, rate);
  });
  report.finish();
}

}  // namespace

void register_bench_exchange(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("exchange", "Dispatch and combine over ranks");
  auto options = std::make_shared<BenchOptions>();
  add_common_options(*command, *options);
  command->add_option("--dtype", options->dtype, "of the rows")->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  command->callback([options] { run(*options); });
}

}  // namespace waybill::cli
