// SPDX-License-Identifier: Apache-2.0
// Exchange benchmark: checks every shape end to end (identity experts on integer stamps come back exactly), then times captured steps;
// prints a table and writes records as JSON lines. Exit code 1 when a check fails: its records say "checked": false.
//   bench_cuda_exchange OUT.jsonl [--filter TEXT] [--loads] [--tune [--parts dispatch,combine,overlap,reduce]] [--processes]
//     --loads       also the loads W0 to W9 of bench/shapes/loads.toml, in one process
//     --tune        searches the numbers of exchange/tuning_table.h and writes a table to OUT.jsonl.tuning (WAYBILL_EXCHANGE_TUNING reads it);
//                   with --parts instead prints sweeps of the parts named
//     --processes   two ranks as processes over NCCL windows (needs 2 GPUs and NCCL) instead of one process
// With two GPUs: one rank on each, over their link. With one: the steps without a link, and two virtual ranks.
// Method "captured": a graph of 8 steps over 4 sets of routes and rows on each GPU, replayed 50 times; microseconds a step, the slower GPU's.
// Floors: bytes over 363 GB/s pushed or 333 GB/s pulled on the link, over 4.29 TB/s in memory (docs/perf/exchange.md).
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/exchange_group.h"
#include "bench/cuda/exchange_processes.h"
#include "bench/cuda/exchange_record.h"
#include "bench/cuda/exchange_sweeps.h"
#include "bench/cuda/exchange_tune.h"
#include "bench/cuda/run_main.h"

namespace waybill::cuda {
namespace {

constexpr double kPushBytesPerUs = 363e3, kPullBytesPerUs = 333e3, kMemoryBytesPerUs = 4.29e6;
constexpr int kSteps = 8, kReplays = 50;

std::FILE* g_out = nullptr;
bool g_all_match = true;
CaseFilter g_filter;
std::string g_parts;           // of --tune: the sweeps to print
NcclWorld* g_world = nullptr;  // --processes: this rank's

// The slower rank's; every rank calls it.
StepTime slowest(StepTime t) {
  if (g_world == nullptr) return t;
  double values[] = {t.p50, t.p10, t.p90};
  g_world->host_fabric().all_reduce(std::span<double>(values), ReduceOp::kMax, "times");
  return {values[0], values[1], values[2]};
}

double record(const char* op, const std::string& name, const std::string& variant, const StepTime& t, double floor, double target, bool checked) {
  g_all_match &= checked;
  if (g_out != nullptr) write_record(g_out, op, name, variant, t, floor, target, checked, kSteps * kReplays);  // rank 0 writes
  return t.p50;
}

using Part = ExchangeGroup::Part;

struct Targets {
  double dispatch_plan, dispatch_fresh, gather, copy, combine, back;  // 0: none
};

ExchangeGroup make_group(const ExchangeShapeCase& c, const std::vector<int>& devices) {
  if (g_world == nullptr) return ExchangeGroup(c, 2, devices);
  return ExchangeGroup(c, 2, devices, [](std::size_t bytes) { return std::make_unique<NcclArena>(*g_world, bytes); });
}

// What crosses the link for a plan and its rows.
struct LinkBytes {
  double rows, plan, weights;  // plan: counts, 8 a row, ids
};

// What the weights cost: plan, and x to rows, without them. fresh, gather: the times with them.
void measure_without_weights(ExchangeGroup& g, const std::string& name, const LinkBytes& bytes, double fresh, double gather, bool linked, bool ok) {
  const double without_bytes = bytes.rows + bytes.plan, floor = linked ? without_bytes / kPushBytesPerUs : 0, extra = bytes.weights / without_bytes;
  const ExchangeTuning saved = g.tuning();
  ExchangeTuning without = saved;
  without.send_weights = false, g.set_tuning(without);
  const auto time = [&](const ExchangeGroup::Step& step) { return slowest(g.time(step, kSteps, kReplays)); };
  record("plan", name, "no weights (control)", time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s); }), 0, 0, ok);
  const double fresh_without = record("dispatch", name, "fresh route, no weights (control)",
                                      time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch(p, i, true, s); }), floor, 0, ok);
  const double gather_without = record("x to rows for the GEMM", name, "gather list, no weights (control)",
                                       time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_layout(p, i, s); }), floor, 0, ok);
  g.set_tuning(saved);
  if (g_out == nullptr || !linked) return;
  write_weight_cost(g_out, "dispatch", name, "fresh route", fresh, fresh_without, without_bytes, extra, ok);
  write_weight_cost(g_out, "x to rows for the GEMM", name, "gather list", gather, gather_without, without_bytes, extra, ok);
}

// What the combine's time consists of: its signals (the same launch where no rank brought tokens), its bytes at the link's rate, and the rest, in which
// reads wait for their round trip. Without a link: the signals.
void split_combine(ExchangeGroup& g, const std::string& name, double combine_us, double link_us, bool ok) {
  g.run([&](Part& p, int, cudaStream_t s) { g.plan_without_tokens(p, s), g.layout(p, s); });
  const double signals =
      record("combine, of it", name, "signals", slowest(g.time([&](Part& p, int, cudaStream_t s) { g.combine(p, s); }, kSteps, kReplays)), 0, 0, ok);
  g.run([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.layout(p, s); });
  if (link_us <= 0) return;
  const double rest = std::max(0.0, combine_us - link_us - signals);
  record("combine, of it", name, "bytes at the link's rate", {link_us, link_us, link_us}, 0, 0, ok);
  record("combine, of it", name, "round trips and the rest", {rest, rest, rest}, 0, 0, ok);
}

// The steps of one shape between two ranks.
void measure(const ExchangeShapeCase& c, const std::vector<int>& devices, const std::string& where, const Targets& want) {
  const std::string name = fmt::format("T{} H{} K{} E{}{}{} {}", c.T, c.H, c.K, c.E, c.scale_bytes > 0 ? " f8" : "", c.load.empty() ? "" : " " + c.load, where);
  if (!g_filter.takes(name)) return;
  ExchangeGroup g = make_group(c, devices);
  const bool ok = g.check();
  const ReceiveLayout received = g.received();
  const double row = static_cast<double>(c.H) * (c.scale_bytes > 0 ? 1 : 2) + static_cast<double>(c.scale_bytes);
  const ExchangeGroup::Remote remote = g.remote();
  const double rows = static_cast<double>(remote.rows), slots = static_cast<double>(remote.slots);
  constexpr double kCounts = 4 * 4;  // 2 P integers to each peer, P = 2
  const LinkBytes bytes{rows * row, kCounts + rows * 8 + slots * static_cast<double>(size_bytes(route_id_dtype(c.E / 2))), slots * 4};
  const double meta = bytes.plan + bytes.weights;
  const bool linked = devices.size() > 1 || g_world != nullptr;
  const double push = linked ? rows * row / kPushBytesPerUs : 0, pull = linked ? rows * row / kPullBytesPerUs : 0;
  const double fresh = linked ? push + meta / kPushBytesPerUs : 0;
  const double copy = static_cast<double>(received.R() + received.S()) * row / kMemoryBytesPerUs;
  const auto time = [&](const ExchangeGroup::Step& step) { return slowest(g.time(step, kSteps, kReplays)); };
  record("plan", name, "", time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s); }), 0, c.E == 2304 ? 20 : 0, ok);
  record("layout", name, "", time([&](Part& p, int, cudaStream_t s) { g.layout(p, s); }), 0, 0, ok);
  record("dispatch", name, "plan given", time([&](Part& p, int i, cudaStream_t s) { g.dispatch(p, i, false, s); }), push, want.dispatch_plan, ok);
  const double fresh_time = record("dispatch", name, "fresh route", time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch(p, i, true, s); }),
                                   fresh, want.dispatch_fresh, ok);
  record("x to rows for the GEMM", name, "gather list, serial",
         time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.layout(p, s), g.dispatch(p, i, true, s); }), fresh, 0, ok);
  const double gather_time = record("x to rows for the GEMM", name, "gather list",
                                    time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_layout(p, i, s); }), fresh, want.gather, ok);
  if (c.scale_bytes > 0) return;
  measure_without_weights(g, name, bytes, fresh_time, gather_time, linked, ok);
  // Chunks pay where rows are large (docs/perf/exchange.md): the target is the better way's.
  const bool is_small = c.H * 2 < 4096;
  record("x to rows for the GEMM", name, "permuted copy, serial",
         time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_layout(p, i, s), g.permute(p, s); }), fresh + copy,
         is_small ? want.copy : 0, ok);
  record("x to rows for the GEMM", name, "permuted copy", time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute(p, i, s); }),
         fresh + copy, 0, ok);
  record("x to rows for the GEMM", name, "permuted copy, in chunks",
         time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute_chunks(p, i, s); }), std::max(fresh, copy),
         is_small ? 0 : want.copy, ok);
  record("permute", name, "", time([&](Part& p, int, cudaStream_t s) { g.permute(p, s); }), copy, 0, ok);
  record("unpermute_reduce", name, "", time([&](Part& p, int, cudaStream_t s) { g.unpermute(p, s); }), copy, 0, ok);
  const double combined = record("combine", name, "pull", time([&](Part& p, int, cudaStream_t s) { g.combine(p, s); }), pull, want.combine, ok);
  record("combine", name, "pull, with d_weights", time([&](Part& p, int, cudaStream_t s) { g.combine(p, s), g.return_values(p, s); }), pull, 0, ok);
  record("combine", name, "push into slots", time([&](Part& p, int, cudaStream_t s) { g.combine_push(p, s); }), push, 0, ok);
  record("expert rows to out", name, "serial", time([&](Part& p, int, cudaStream_t s) { g.unpermute(p, s), g.combine(p, s); }), pull + copy, 0, ok);
  record("expert rows to out", name, "one launch", time([&](Part& p, int, cudaStream_t s) { g.reduce_and_combine(p, s); }), std::max(pull, copy), want.back,
         ok);
  split_combine(g, name, combined, pull, ok);
}

// Permute and its counterpart on one GPU, at the shapes of the table: one rank stands for the receiver.
void measure_local(const ExchangeShapeCase& c, double permute_target, double unpermute_target) {
  const std::string name = fmt::format("R{} H{} L{}", c.T, c.H, c.E);
  if (!g_filter.takes(name)) return;
  ExchangeGroup g(c, 1, {0});
  const bool ok = g.check();
  const ReceiveLayout received = g.received();
  const std::string full = fmt::format("{} S{} 1 GPU", name, received.S());
  const double slots = static_cast<double>(received.S()), rows = static_cast<double>(received.R()), row = static_cast<double>(c.H) * 2;
  record("layout", full, "", g.time([&](Part& p, int, cudaStream_t s) { g.layout(p, s); }, kSteps, kReplays), 0, 0, ok);
  record("permute", full, "", g.time([&](Part& p, int, cudaStream_t s) { g.permute(p, s); }, kSteps, kReplays), (rows + slots) * row / kMemoryBytesPerUs,
         permute_target, ok);
  // Wire bf16, as between ranks: z is written as bf16 rows.
  const auto reduce = [&](Part& p, int, cudaStream_t s) { p.exchange.unpermute_reduce(p.handle, DType::kBF16, p.y, false, DType::kBF16, p.z, true, s); };
  record("unpermute_reduce", full, "bf16", g.time(reduce, kSteps, kReplays), (rows + slots) * row / kMemoryBytesPerUs, unpermute_target, ok);
}

// Rates that the floors stand beside, of this run: memory copy, and both ways over the link by the copy engine.
void anchors(const std::vector<int>& devices) {
  constexpr std::size_t kBytes = std::size_t{512} << 20;
  const CudaLocalGroup peers(static_cast<int>(devices.size()), devices, 4096);  // switches peer access on
  std::vector<DeviceBuffer> from, to;
  for (const int device : devices) from.emplace_back(kBytes, device), to.emplace_back(kBytes, device);
  std::vector<std::unique_ptr<CudaStream>> streams;
  for (const int device : devices) streams.push_back(std::make_unique<CudaStream>(device));
  const auto rate = [&](bool across) {
    double best = 0;
    for (int round = 0; round < 3; ++round) {
      std::vector<std::unique_ptr<CudaEvent>> begin, end;
      for (std::size_t d = 0; d < devices.size(); ++d) {
        const DeviceGuard guard(devices[d]);
        begin.push_back(std::make_unique<CudaEvent>()), end.push_back(std::make_unique<CudaEvent>());
        begin[d]->record(*streams[d]);
        const std::size_t peer = across ? (d + 1) % devices.size() : d;
        for (int i = 0; i < 4; ++i) WB_TRY_CUDA(cudaMemcpyAsync(to[peer].data(), from[d].data(), kBytes, cudaMemcpyDefault, *streams[d]));
        end[d]->record(*streams[d]);
      }
      double slowest = 0;
      for (std::size_t d = 0; d < devices.size(); ++d)
        end[d]->synchronize(), slowest = std::max(slowest, static_cast<double>(end[d]->elapsed_us_since(*begin[d])));
      best = std::max(best, 4.0 * kBytes / slowest * 1e-3);
    }
    return best;
  };
  const double memory = 2 * rate(false), link = devices.size() > 1 ? rate(true) : 0;
  double fill = 0;
  for (int round = 0; round < 3; ++round) {
    const DeviceGuard guard(devices[0]);
    const CudaEvent begin, end;
    begin.record(*streams[0]);
    for (int i = 0; i < 4; ++i) WB_TRY_CUDA(cudaMemsetAsync(to[0].data(), i, kBytes, *streams[0]));
    end.record(*streams[0]), end.synchronize();
    fill = std::max(fill, 4.0 * kBytes / static_cast<double>(end.elapsed_us_since(begin)) * 1e-3);
  }
  fmt::print("device fill {:.0f} GB/s written; ", fill);
  fmt::print("device copy {:.0f} GB/s read + written; copy engine over the link, both ways at once: {:.0f} GB/s each\n", memory, link);
}

void tune_dispatch(ExchangeGroup& g, const std::string& name) {
  const ExchangeTuning saved = g.tuning();
  const auto time = [&] { return g.time([&](Part& p, int i, cudaStream_t s) { g.dispatch(p, i, false, s); }, 6, 7).p50; };
  for (const int ctas : {8, 10, 12, 14, 16, 18, 20, 22, 24, 32, 64}) {
    std::string line = fmt::format("tune dispatch {:<22} {:3} CTAs |", name, ctas);
    ExchangeTuning t = saved;
    t.dispatch_ctas = ctas, t.dispatch = DispatchPath::kPush;
    g.set_tuning(t);
    line += fmt::format(" plain {:.1f} | bulk warps x stages x chunk:", time());
    for (const auto& [warps, stages, chunk] : {std::array{4, 4, 8192}, std::array{6, 4, 8192}, std::array{12, 4, 4096}, std::array{16, 4, 2048},
                                               std::array{16, 8, 1024}, std::array{8, 2, 8192}, std::array{4, 6, 8192}}) {
      t.dispatch = DispatchPath::kBulk, t.bulk_warps = warps, t.bulk_stages = stages, t.bulk_chunk_bytes = chunk;
      g.set_tuning(t);
      line += fmt::format(" [{}x{}x{}] {:.1f}", warps, stages, chunk, time());
    }
    fmt::print("{}\n", line);
  }
  g.set_tuning(saved);
}

void tune_combine(ExchangeGroup& g, const std::string& name) {
  const ExchangeTuning saved = g.tuning();
  const auto time = [&] { return g.time([&](Part& p, int, cudaStream_t s) { g.combine(p, s); }, 6, 7).p50; };
  std::string line;
  for (const int ctas : {8, 16, 24, 32, 64, 132}) {
    ExchangeTuning t = saved;
    t.combine_ctas = ctas, t.combine = CombinePath::kPull;
    g.set_tuning(t);
    line = fmt::format("tune combine {:<22} {:3} CTAs | plain {:.1f} | push {:.1f} | bulk warps x stages:", name, ctas, time(),
                       g.time([&](Part& p, int, cudaStream_t s) { g.combine_push(p, s); }, 6, 7).p50);
    for (const auto& [warps, stages] : {std::array{8, 4}, std::array{16, 2}, std::array{16, 3}, std::array{16, 4}, std::array{16, 6}}) {
      t.combine = CombinePath::kBulk, t.combine_warps = warps, t.combine_stages = stages;
      g.set_tuning(t);
      line += fmt::format(" [{}x{}] {:.1f}", warps, stages, time());
    }
    fmt::print("{}\n", line);
  }
  line = fmt::format("tune local {:<22} |", name);
  for (const int ctas : {132, 264, 396, 528}) {
    ExchangeTuning t = saved;
    t.local_ctas = ctas;
    g.set_tuning(t);
    line += fmt::format(" {} CTAs: permute {:.1f} unpermute {:.1f} |", ctas, g.time([&](Part& p, int, cudaStream_t s) { g.permute(p, s); }, 6, 7).p50,
                        g.time([&](Part& p, int, cudaStream_t s) { g.unpermute(p, s); }, 6, 7).p50);
  }
  fmt::print("{}\n", line);
  g.set_tuning(saved);
}

// What runs beside the link: how many CTAs it may have.
void tune_overlap(ExchangeGroup& g, const std::string& name) {
  const ExchangeTuning saved = g.tuning();
  const auto time = [&](const ExchangeGroup::Step& step) { return g.time(step, 6, 9).p50; };
  ExchangeTuning t = saved;
  std::string line = fmt::format("tune permute beside dispatch {:<22} | halves, CTAs:", name);
  for (const int ctas : {32, 64, 96, 132, 264}) {
    t.local_ctas = ctas, g.set_tuning(t);
    line += fmt::format(" [{}] {:.1f}", ctas, time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute(p, i, s); }));
  }
  t = saved, line += " | chunks, CTAs dispatch x permute:";
  for (const int dispatch : {20, 24, 32, 48}) {
    for (const int ctas : {48, 64, 80, 0}) {
      t.chunk_ctas = dispatch, t.arriving_ctas = ctas, g.set_tuning(t);
      line += fmt::format(" [{}x{}] {:.1f}", dispatch, ctas,
                          time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.dispatch_and_permute_chunks(p, i, s); }));
    }
  }
  g.set_tuning(saved);
  line +=
      fmt::format(" | chunks, one after the other {:.1f} | halves alone: own {:.1f} others {:.1f}",
                  time([&](Part& p, int i, cudaStream_t s) { g.plan(p, i, s), g.layout(p, s), g.dispatch_chunks_alone(p, i, s); }),
                  time([&](Part& p, int i, cudaStream_t s) { p.exchange.permute_own(p.handle, DType::kBF16, p.x[static_cast<std::size_t>(i % 4)], p.y, s); }),
                  time([&](Part& p, int, cudaStream_t s) { p.exchange.permute_others(p.handle, DType::kBF16, p.rows, p.y, s); }));
  fmt::print("{}\n", line);
  line = fmt::format("tune reduce and combine {:<22} | CTAs x combine stages x reduce stages:", name);
  for (const int ctas : {-1, 16, 24, 32, 40, 48}) {
    for (const auto& [stages, reduce] : {std::array{2, 3}, std::array{2, 4}, std::array{4, 4}}) {
      t = saved, t.fused_combine_ctas = ctas, t.fused_stages = stages, t.reduce_stages = reduce, g.set_tuning(t);
      line += fmt::format(" [{}x{}x{}] {:.1f}", ctas, stages, reduce, time([&](Part& p, int, cudaStream_t s) { g.reduce_and_combine(p, s); }));
    }
  }
  fmt::print("{}\n", line);
  g.set_tuning(saved);
}

// The reduction alone: plain loads, and the copy engine by stages.
void tune_reduce(ExchangeGroup& g, const std::string& name) {
  const ExchangeTuning saved = g.tuning();
  const auto time = [&] { return g.time([&](Part& p, int, cudaStream_t s) { g.unpermute(p, s); }, 6, 9).p50; };
  ExchangeTuning t = saved;
  t.reduce = ReducePath::kPlain, g.set_tuning(t);
  std::string line = fmt::format("tune reduction {:<22} | plain {:.1f} | bulk stages:", name, time());
  t.reduce = ReducePath::kBulk;
  for (const int stages : {2, 3, 4, 5, 6}) t.reduce_stages = stages, g.set_tuning(t), line += fmt::format(" [{}] {:.1f}", stages, time());
  fmt::print("{}\n", line);
  g.set_tuning(saved);
}

void tune_local(const ExchangeShapeCase& c) {
  const std::string name = fmt::format("R{} H{} L{}", c.T, c.H, c.E);
  if (!g_filter.takes(name)) return;
  ExchangeGroup g(c, 1, {0});
  if (!g.check()) g_all_match = false, fmt::print("{}: WRONG\n", name);
  if (g_parts.find("reduce") != std::string::npos) tune_reduce(g, name);
  if (g_parts.find("permute") != std::string::npos) sweep_permute(g, name);
}

void tune(const ExchangeShapeCase& c, const std::vector<int>& devices) {
  const std::string name = fmt::format("T{} H{} K{} E{}{}", c.T, c.H, c.K, c.E, c.scale_bytes > 0 ? " f8" : "");
  if (!g_filter.takes(name)) return;
  ExchangeGroup g(c, 2, devices);
  if (!g.check()) g_all_match = false, fmt::print("{}: WRONG\n", name);
  const auto wanted = [](const char* part) { return g_parts.find(part) != std::string::npos; };
  if (wanted("dispatch")) tune_dispatch(g, name);
  if (wanted("combine")) tune_combine(g, name);
  if (wanted("overlap")) tune_overlap(g, name);
  if (wanted("reduce")) tune_reduce(g, name);
  if (wanted("early")) sweep_early_dispatch(g, name);
  if (wanted("expert_rows") && c.scale_bytes == 0) sweep_expert_rows(g, name);
  if (wanted("permute") && c.scale_bytes == 0) sweep_permute(g, name);
}

// A table from four sizes of row.
void write_table(const std::string& path, const std::vector<int>& devices) {
  const std::pair<ExchangeShapeCase, std::int64_t> rows[] = {
      {{8192, 512, 36, 2304}, 4095}, {{16384, 2048, 8, 128}, 4096}, {{4096, 3584, 8, 256}, 8191}, {{4096, 7168, 8, 256}, 16384}};
  TuningTable table;
  for (const auto& [shape, row_bytes] : rows) {
    ExchangeGroup g(shape, 2, devices);
    if (!g.check()) g_all_match = false, fmt::print("H{}: WRONG\n", shape.H);
    table.push_back(RowSearch(g, row_bytes).find());
  }
  const std::string text = format_tuning(table);
  fmt::print("{}", text);
  std::FILE* out = std::fopen(path.c_str(), "w");
  WB_CHECK(out != nullptr, "cannot write {}", path);
  fmt::print(out, "{}", text);
  std::fclose(out);
}

int two_processes(const std::string& path, const ExchangeShapeCase& deepseek, const ExchangeShapeCase& sparser) {
  return run_two_processes([&](NcclWorld& world) {
    g_world = &world;
    if (world.rank() == 0) g_out = std::fopen(path.c_str(), "w");
    const std::vector<int> devices{world.device()};
    measure(deepseek, devices, "2 processes", {0, 190, 205, 280, 195, 280});
    measure(sparser, devices, "2 processes", {45, 60, 0, 0, 50, 0});
    if (g_out != nullptr) std::fclose(g_out);
    g_filter.check_used();
    return g_all_match ? 0 : 1;
  });
}

int main_checked(int argc, char** argv) {
  std::string path = "exchange.jsonl";
  bool is_tune = false, in_processes = false, with_loads = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tune") {
      is_tune = true;
    } else if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--processes") {
      in_processes = true;
    } else if (argument == "--parts" && i + 1 < argc) {
      g_parts = argv[++i];
    } else if (argument == "--filter" && i + 1 < argc) {
      g_filter = CaseFilter(argv[++i]);
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}, or its value is missing", argument);
      path = argument;
    }
  }
  const ExchangeShapeCase deepseek{4096, 7168, 8, 256}, sparse{4096, 512, 36, 64}, sparser{8192, 512, 36, 2304}, quantized{4096, 7168, 8, 256, 224};
  if (in_processes) return two_processes(path, deepseek, sparser);  // before CUDA starts here
  int count = 0;
  WB_TRY_CUDA(cudaGetDeviceCount(&count));
  std::vector<int> devices{0};
  if (count > 1) devices.push_back(1);
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  anchors(devices);
  if (is_tune) {
    if (g_parts.empty()) {
      write_table(path + ".tuning", devices);
      return g_all_match ? 0 : 1;
    }
    tune(deepseek, devices), tune(sparser, devices), tune(sparse, devices), tune(quantized, devices), tune({16384, 2048, 8, 128}, devices);
    tune_local({65536, 512, 5, 32, 0, 0.9}), tune_local({8192, 7168, 4, 128});
    g_filter.check_used();
    return g_all_match ? 0 : 1;
  }
  const bool linked = count > 1;
  const std::string where = linked ? "2 GPUs" : "2 ranks on 1 GPU";
  measure(deepseek, devices, where, linked ? Targets{0, 190, 205, 280, 195, 280} : Targets{});
  measure(quantized, devices, where, linked ? Targets{105, 0, 0, 0, 0, 0} : Targets{});
  measure(sparse, devices, where, linked ? Targets{0, 0, 0, 75, 0, 80} : Targets{});
  measure(sparser, devices, where, linked ? Targets{45, 60, 0, 0, 50, 0} : Targets{});
  for (const char* load : bench::kWorkloads) {
    if (with_loads) measure({4096, 2048, 8, 128, 0, 1, load}, devices, where, Targets{});
  }
  measure_local({65536, 512, 5, 32, 0, 0.9}, 105, 110);
  measure_local({8192, 7168, 4, 128}, 587.2 / 4.29 / 0.85, 587.2 / 4.29 / 0.85);
  std::fclose(g_out);
  g_filter.check_used();
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);  // loading a kernel at its first launch would wait for a peer that waits for it
  return waybill::cuda::run_main("bench_cuda_exchange", waybill::cuda::main_checked, argc, argv);
}
