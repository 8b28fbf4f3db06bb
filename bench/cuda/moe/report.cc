// SPDX-License-Identifier: Apache-2.0
#include "bench/cuda/moe/report.h"

namespace waybill::cuda::moe_bench {
namespace {

double gib(std::size_t bytes) { return static_cast<double>(bytes) / (1u << 30); }

}  // namespace

Report::Report(const std::string& path) : file_(std::fopen(path.c_str(), "w")) {
  WB_CHECK(file_ != nullptr, "cannot write {}", path);
  fmt::print(
      "TFLOP/s per GPU: 18 x routes / GPUs x H x F / time (expert matmuls of valid rows: gate, up, down; once forward, twice backward)\n"
      "Evidence class: MoE module (one layer by itself, not a model); each record names how its ranks lie on GPUs\n");
}
Report::~Report() { std::fclose(file_); }

void Report::add(const Problem& problem, const Row& row, double dense_tflops) {
  const Shape& c = problem.shape();
  const double tflops = problem.flops() / row.times.p50 * 1e-6, all = row.phases.step;
  std::string shares, shown;
  for (std::size_t i = 0; i < kNumPhases && all > 0; ++i) {
    const double us = row.phases.main[i];
    if (us == 0) continue;
    shares += fmt::format("{}\"{}\":{:.4f}", shares.empty() ? "" : ",", to_string(static_cast<Phase>(i)), us / all);
    shown += fmt::format(" {} {:.1f}", to_string(static_cast<Phase>(i)), 100 * us / all);
  }
  const double share = all > 0 ? row.phases.exposed_exchange / all : 0, whole = all > 0 ? row.phases.all_exchange / all : 0;
  fmt::print(
      "  {:<38} {:9.3f} ms [{:.3f} {:.3f}] {:6.1f} TFLOP/s/GPU  {:.2f} of dense  {:6.2f} GiB{}  waits {}  {}{}{}\n", row.variant, row.times.p50 * 1e-3,
      row.times.p10 * 1e-3, row.times.p90 * 1e-3, tflops, tflops / dense_tflops, gib(row.bytes),
      row.predicted_bytes > 0 ? fmt::format(" (predicted {:.2f}, at exact sizes {:.2f})", gib(row.predicted_bytes), gib(row.exact_bytes)) : "", row.host_waits,
      row.captured ? "graph" : "eager", row.dropped > 0 ? fmt::format("  dropped {}", row.dropped) : "",
      all > 0 ? fmt::format("\n      %:{}; exchange {:.1f}, not hidden {:.1f}, ceiling {:.2f} x", shown, 100 * whole, 100 * share, 1 / (1 - share)) : "");
  const StepCounts& n = row.counts;
  if (n.slots_visited > 0 && !row.captured) {
    fmt::print("      routes {:.2f} MB, weights {:.2f} MB, slots visited {:.2f} M, scores visited {:.2f} M a rank\n", n.route_bytes * 1e-6,
               n.weight_bytes * 1e-6, n.slots_visited * 1e-6, n.scores_visited * 1e-6);
  }
  const std::string counts = n.slots_visited > 0
                                 ? fmt::format(",\"route_bytes\":{:.0f},\"weight_bytes\":{:.0f},\"slots_visited\":{:.0f},\"scores_visited\":{:.0f}",
                                               n.route_bytes, n.weight_bytes, n.slots_visited, n.scores_visited)
                                 : std::string();
  fmt::print(
      file_,
      "{{\"op\":\"moe fwd+bwd\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.1f},\"spread\":{:.1f},"
      "\"floor\":null,\"target\":null,\"peers\":{{}},\"evidence\":\"{}\",\"ranks\":{},\"gpus\":{},\"checked\":true,\"p50\":{:.1f},\"p99\":{:.1f},"
      "\"iterations\":{},"
      "\"tflops\":{:.1f},\"of_dense\":{:.3f},\"peak_bytes\":{},\"predicted_bytes\":{},\"exact_bytes\":{},\"shares\":{{{}}},\"exchange_share\":{},\"exchange_"
      "with_hidden\":{},\"host_waits\":{},"
      "\"graph\":{},\"load\":\"{}\",\"computed_rows\":{},\"dropped\":{},\"error\":{:.2e},\"hottest_over_mean\":{:.3f}{}}}\n",
      c.label(), row.variant, row.times.p50, row.times.p90 - row.times.p10, problem.evidence(), problem.P(), problem.devices().size(), row.times.p50,
      row.times.p99, row.times.iterations, tflops, tflops / dense_tflops, row.bytes, row.predicted_bytes, row.exact_bytes, shares,
      all > 0 ? fmt::format("{:.4f}", share) : "null", all > 0 ? fmt::format("{:.4f}", whole) : "null", row.host_waits, row.captured ? "true" : "false",
      problem.load(), row.computed_rows, row.dropped, row.error,
      static_cast<double>(problem.hottest_rank_rows()) * problem.P() / static_cast<double>(problem.routes()), counts);
  std::fflush(file_), std::fflush(stdout);
}

void Report::add_control(const std::string& op, const Problem& problem, const std::string& variant, double us, double spread, int calls, double flops) {
  const Shape& c = problem.shape();
  fmt::print("    {:<56} {:9.1f} us [{:.1f}]  {:6.1f} TFLOP/s\n", variant, us, spread, flops / us * 1e-6);
  fmt::print(file_,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.1f},\"spread\":{:.1f},"
             "\"floor\":null,\"target\":null,\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":true,\"p50\":{:.1f},\"p99\":null,\"iterations\":{},"
             "\"kernel_tflops\":{:.1f},\"load\":\"{}\"}}\n",
             op, c.label(), variant, us, spread, us, calls, flops / us * 1e-6, problem.load());
  std::fflush(file_), std::fflush(stdout);
}

void Report::add_rate(const std::string& op, const std::string& name, double value, const std::string& unit, int calls) {
  fmt::print("{}: {:.2f} {}\n", name, value, unit);
  fmt::print(file_,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"\",\"metric\":\"rate\",\"unit\":\"{}\",\"value\":{:.2f},\"spread\":null,\"floor\":null,"
             "\"target\":null,\"peers\":{{}},\"evidence\":\"{}\",\"checked\":true,\"p50\":{:.2f},\"p99\":null,\"iterations\":{}}}\n",
             op, name, unit, value, op == "dense" ? "kernel" : "MoE module", value, calls);
  std::fflush(file_);
}

}  // namespace waybill::cuda::moe_bench
