// SPDX-License-Identifier: Apache-2.0
// Tables and records of the MoE benchmark.
#include <fmt/format.h>

#include "bench_moe.h"
#include "table.h"

namespace waybill::cli {
namespace {

double phase_ms(const StackCost& cost, Phase phase) { return cost.phases.seconds[static_cast<std::size_t>(phase)] * 1e3; }

// The metric an ablation step is about, from the counters.
double metric_of(const std::string& name, const MoeStackCounters& c) {
  if (name == "ids bytes") return static_cast<double>(c.bytes.ids);
  if (name == "weights bytes") return static_cast<double>(c.bytes.weights);
  if (name == "slots visited") return static_cast<double>(c.slots_visited);
  if (name == "scores visited") return static_cast<double>(c.scores_visited);
  return static_cast<double>(c.bytes.total());
}

std::string metric_text(const std::string& name, double value) {
  return name.find("bytes") != std::string::npos ? format_bytes(value) : fmt::format("{:.0f}", value);
}

}  // namespace

void print_stacks(const std::vector<NamedStack>& stacks, const std::vector<StackCost>& costs, bool replayed) {
  Table table({"stack", "fwd ms", "fwd+bwd ms", "x sparse", "sent", "slots visited", "rows computed", "real", "dropped"});
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    if (stacks[i].is_ablation) continue;
    const MoeStackCounters& c = costs[i].counters;
    table.add({stacks[i].name, fmt::format("{:.2f}", costs[i].forward.p50_us * 1e-3), fmt::format("{:.2f}", costs[i].both.p50_us * 1e-3),
               fmt::format("{:.2f}", costs[i].both.p50_us / costs[0].both.p50_us), format_bytes(static_cast<double>(c.bytes.total())),
               fmt::format("{}", c.slots_visited), fmt::format("{}", c.computed_rows), fmt::format("{}", c.real_rows), fmt::format("{}", c.dropped_routes)});
  }
  fmt::print("\nall stacks, one forward and backward, bytes and counts over all ranks:\n");
  table.print(stdout);
  Table ladder({"one change at a time", "its metric", "before", "after", "fwd+bwd ms", "router", "plan", "dispatch", "experts", "combine"});
  bool any = false;
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    if (!stacks[i].is_ablation) continue;
    any = true;
    const std::string& metric = stacks[i].metric;
    const auto ms = [&](Phase phase) { return fmt::format("{:.2f}", phase_ms(costs[i], phase)); };
    ladder.add({stacks[i].name, metric, metric.empty() ? "" : metric_text(metric, metric_of(metric, costs[i - 1].counters)),
                metric.empty() ? "" : metric_text(metric, metric_of(metric, costs[i].counters)), fmt::format("{:.2f}", costs[i].both.p50_us * 1e-3),
                ms(Phase::kRouter), ms(Phase::kPlan), ms(Phase::kDispatch), ms(Phase::kExpertGemm), ms(Phase::kCombine)});
  }
  if (!any) return;
  fmt::print("\nfrom the dense map to the sparse layer (ms of a phase: mean over ranks):\n");
  ladder.print(stdout);
  if (replayed) fmt::print("routes are replayed: no top-k runs, so its step shows nothing; --load router lets the router choose\n");
}

void add_records(BenchReport& report, const BenchRecord& base, const NamedStack& stack, const StackCost& cost) {
  // base holds the forward's work; a backward computes twice as much.
  const auto time = [&](const char* pass, const Timing& timing, double passes) {
    BenchRecord record = base;
    record.flops *= passes;
    record.floor_us *= passes;
    record.implementation = stack.name;
    record.variant = fmt::format("{}{}: {}", stack.is_ablation ? "ablation " : "", stack.name, pass);
    record.timing = timing;
    report.add(record);
  };
  time("forward", cost.forward, 1);
  time("forward + backward", cost.both, 3);
  const auto value = [&](const std::string& metric, const char* unit, double number) {
    BenchRecord record = base;
    record.implementation = stack.name;
    record.variant = fmt::format("{}{}: forward + backward", stack.is_ablation ? "ablation " : "", stack.name);
    record.metric = metric;
    record.unit = unit;
    record.value = number;
    record.floor_us = record.flops = 0;
    report.add(record);
  };
  const MoeStackCounters& c = cost.counters;
  const auto bytes = [&](const char* kind, std::int64_t count) { value(fmt::format("bytes {}", kind), "B", static_cast<double>(count)); };
  bytes("payload", c.bytes.payload);
  bytes("combined", c.bytes.combined);
  bytes("ids", c.bytes.ids);
  bytes("weights", c.bytes.weights);
  bytes("counts", c.bytes.counts);
  bytes("total", c.bytes.total());
  value("slots visited", "slots", static_cast<double>(c.slots_visited));
  value("scores visited", "scores", static_cast<double>(c.scores_visited));
  value("rows computed", "rows", static_cast<double>(c.computed_rows));
  value("rows real", "rows", static_cast<double>(c.real_rows));
  value("dropped routes", "routes", static_cast<double>(c.dropped_routes));
  for (const Phase phase : {Phase::kGate, Phase::kRouter, Phase::kPlan, Phase::kDispatch, Phase::kExpertGemm, Phase::kActivation, Phase::kCombine}) {
    value(fmt::format("phase {}", to_string(phase)), "ms", phase_ms(cost, phase));
  }
}

}  // namespace waybill::cli
