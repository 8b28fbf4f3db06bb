// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine over P ranks (threads of this process): plan, dispatch, permute, reduce, combine. --tune searches the numbers of
// exchange/tuning_table.h instead.
#include "bench_exchange.h"

#include <fmt/format.h>

#include <memory>

#include "bench_verbs.h"

namespace waybill::cli {
namespace {

void measure_rank(const BenchOptions& options, const BenchShape& shape, const Route& route, Fabric& fabric, BenchRecord record, BenchReport* report,
                  double rate) {
  ThreadPool pool(threads_per_rank(options, shape.P));
  RoundTrip trip(shape, route, row_dtype(options), fabric, &pool);
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
  const std::vector<Route> routes = unit_routes(options, shape);
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
  auto table = std::make_shared<std::string>();
  add_common_options(*command, *options);
  command->add_option("--dtype", options->dtype, "of the rows")->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  command->add_option("--tune", *table, "search the exchange's numbers as one budget and write them to this table (WAYBILL_EXCHANGE_TUNING reads it)");
  command->add_option("--device", options->device, "with --tune: cuda searches the numbers of the GPUs, bf16 rows between two ranks (needs a CUDA build)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->callback([options, table, command] {
    WB_CHECK(command->get_option("--tune")->count() == 0 || !table->empty(), "--tune needs the name of a file, got \"\"");
    WB_CHECK(options->device == "cpu" || !table->empty(), "--device cuda needs --tune FILE; bench_cuda_exchange times the steps on GPUs");
    table->empty() ? run(*options) : tune_exchange(*options, *table);
  });
}

}  // namespace waybill::cli
