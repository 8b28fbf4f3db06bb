// SPDX-License-Identifier: Apache-2.0
#include "bench_record.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <fstream>

#include "doctor_machine.h"
#include "table.h"
#include "waybill/build_info.h"
#include "waybill/error.h"
#include "waybill/log.h"
#include "waybill/thread_pool.h"

namespace waybill::cli {
namespace {

nlohmann::json extent_json(const Extent& extent) { return {{"min", extent.min}, {"mean", extent.mean}, {"max", extent.max}}; }

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

nlohmann::json header_json(int threads) {
  const BuildInfo& info = build_info();
  const std::string commit = first_line_of("git rev-parse --short HEAD 2>/dev/null");
  return {
      {"version", info.version}, {"compiler", info.compiler},          {"commit", commit},           {"date", utc_now()}, {"gpu", nullptr}, {"cpu", cpu_name()},
      {"simd", simd_level()},    {"usable_cores", num_usable_cores()}, {"threads_per_rank", threads}};
}

}  // namespace

BenchReport::BenchReport(const BenchOptions& options, const BenchShape& shape, int threads) : options_(options), shape_(shape), threads_(threads) {}

nlohmann::json BenchReport::record_json(const BenchRecord& record) const {
  const BenchShape& s = shape_;
  const Timing& t = record.timing;
  nlohmann::json out = {{"op", record.op},
                        {"case", fmt::format("{} T{} H{} E{} K{} F{} P{}", s.name, s.T, s.H, s.E, s.K, s.F, s.P)},
                        {"variant", record.variant},
                        {"metric", record.metric},
                        {"unit", record.unit},
                        {"value", record.metric == "time" ? t.p50_us : record.value},
                        {"spread", t.spread()},
                        {"min", t.min_us},
                        {"p50", t.p50_us},
                        {"p90", t.p90_us},
                        {"p99", t.p99_us},
                        {"iterations", t.iterations},
                        {"floor", record.floor_us > 0 ? nlohmann::json(record.floor_us) : nlohmann::json(nullptr)},
                        {"floor_kind", record.floor_kind},
                        {"target", nullptr},
                        {"peers", nlohmann::json::object()},
                        {"evidence", !record.evidence.empty() ? record.evidence
                                     : shape_.P > 1           ? "distributed op"
                                                              : "kernel"},
                        {"checked", checked_},
                        {"load", record.load.name},
                        {"seed", options_.seed},
                        {"dtype", options_.dtype},
                        {"implementation", record.implementation},
                        {"plan_included", record.plan_included},
                        {"slowest_rank", t.slowest_rank},
                        {"rows_per_rank", extent_json(record.load.rank_rows)},
                        {"slots_per_rank", extent_json(record.load.rank_slots)},
                        {"rows_per_expert", extent_json(record.load.expert_rows)},
                        {"real_rows", record.load.real_rows},
                        {"padded_rows", record.load.padded_rows},
                        {"bytes", record.bytes},
                        {"flops", record.flops},
                        {"sms", nullptr}};
  return out;
}

nlohmann::json BenchReport::to_json() const {
  nlohmann::json records = nlohmann::json::array();
  for (const BenchRecord& record : records_) records.push_back(record_json(record));
  return {{"header", header_json(threads_)}, {"records", records}};
}

void BenchReport::finish() const {
  if (options_.json == "-") {
    fmt::print("{}\n", to_json().dump(2));
    return;
  }
  const BenchShape& s = shape_;
  fmt::print("shape {}: T={} a rank, H={} E={} K={} F={} P={}; {} threads a rank on {} usable cores; {}\n", s.name, s.T, s.H, s.E, s.K, s.F, s.P, threads_,
             num_usable_cores(), checked_ ? "checked against the reference" : "NOT CHECKED");
  Table table({"op", "variant", "implementation", "median us", "p90", "p99", "floor us", "ratio", "GB/s", "GFLOP/s"});
  const auto number = [](double value, const char* form) { return value > 0 ? fmt::format(fmt::runtime(form), value) : std::string(); };
  for (const BenchRecord& r : records_) {
    if (r.metric != "time") continue;
    const double us = r.timing.p50_us;
    table.add({r.op, r.variant, r.implementation, number(us, "{:.1f}"), number(r.timing.p90_us, "{:.1f}"), number(r.timing.p99_us, "{:.1f}"),
               number(r.floor_us, "{:.1f}"), r.floor_us > 0 ? fmt::format("{:.2f}", us / r.floor_us) : "",
               r.bytes > 0 ? fmt::format("{:.2f}", r.bytes / us * 1e-3) : "", r.flops > 0 ? fmt::format("{:.1f}", r.flops / us * 1e-3) : ""});
  }
  table.print(stdout);
  if (!records_.empty()) {
    const LoadSummary& load = records_.front().load;
    const auto extent = [](const Extent& e) { return fmt::format("{:.0f}/{:.1f}/{:.0f}", e.min, e.mean, e.max); };
    fmt::print("load {} (seed {}): min/mean/max rows a rank {}, slots a rank {}, rows an expert {}; {} real rows, {} with padding; slowest rank {}\n",
               load.name, options_.seed, extent(load.rank_rows), extent(load.rank_slots), extent(load.expert_rows), load.real_rows, load.padded_rows,
               records_.front().timing.slowest_rank);
  }
  if (options_.json.empty()) return;
  std::ofstream file(options_.json);
  file << to_json().dump(2) << "\n";
  file.close();
  if (!file) WB_FAIL(ErrorCode::kIo, "cannot write {}", options_.json);
}

std::string chosen_implementation(const std::string& op, const std::function<void()>& probe) {
  std::string chosen;
  const std::string start = "select " + op + ": ";
  set_log_callback([&](LogLevel, const std::string& text) {
    if (text.rfind(start, 0) == 0) chosen = text.substr(start.size(), text.find(';') - start.size());
  });
  probe();
  set_log_callback({});
  return chosen;
}

}  // namespace waybill::cli
