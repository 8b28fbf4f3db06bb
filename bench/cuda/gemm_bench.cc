// SPDX-License-Identifier: Apache-2.0
// Grouped matmul benchmark: checks a sample of what it times against sums in double, then times it beside cuBLASLt's dense 8192^3 of the
// same run; prints a table and writes records as JSON lines. Exit code 1 when a check fails: its record says "checked": false.
//   bench_cuda_gemm OUT.jsonl [--filter TEXT] [--op TEXT] [--loads] [--sweep] [--tile COLUMNS,STAGES,CLUSTER,BUFFERS] [--band B] [--slices S]
//     --loads   also the loads W0 to W9 of bench/shapes/loads.toml and softmax, hot90 and zipf (bench/loads.h)
//     --sweep   every tile and band instead of the policy's choice, briefly; no records
//     --tile, --band, --slices   in place of the policy's choice
// Method "burst": before each of 5 repetitions the device spins 15 ms, so that the host queues ahead; then 10 calls between two events; the
// median. Random normal data, clocks left alone, one set of buffers. TFLOP/s count valid rows.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bench/cuda/gemm_anchor.h"
#include "bench/loads.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "cuda/device_random.h"
#include "cuda/gemm_reference.h"
#include "ops/gemm/cuda/grouped_run.h"

namespace waybill::cuda {
namespace {

constexpr double kTargetDense = 803;  // targets belong to a run whose dense product reaches this; they are scaled to this run's

struct Shape {
  std::int64_t L, rows, N, C;  // rows: mean of a group
  const char* load;
  double fwd, dgrad, store, accumulate;  // TFLOP/s wanted; 0: none
};

enum Op : int { kForward = 0, kGather, kDgrad, kStore, kStoreGatherA, kStoreGatherB, kStoreF32, kAccumulate, kNumOps };
constexpr const char* kOpNames[] = {"gemm_fwd",        "gemm_fwd gather",          "gemm_dgrad",
                                    "gemm_wgrad bf16", "gemm_wgrad bf16 gather a", "gemm_wgrad bf16 gather b",
                                    "gemm_wgrad f32",  "gemm_wgrad f32 +="};

class Bench {
 public:
  explicit Bench(const Shape& s) : s_(s) {
    const std::vector<std::int64_t> counts = bench::load_counts(s.load, s.L, s.rows);
    const std::vector<std::int32_t> offsets = bench::load_offsets(s.load, s.L, s.rows);
    S_ = offsets.back();
    largest_ = *std::max_element(counts.begin(), counts.end());
    for (const std::int64_t c : counts) used_ += c > 0 ? 1 : 0;
    offsets_ = DeviceBuffer(offsets.size() * 4);
    offsets_.upload(offsets.data(), offsets_.bytes());
    std::vector<std::int32_t> list(static_cast<std::size_t>(S_));
    std::iota(list.begin(), list.end(), 0);
    std::shuffle(list.begin(), list.end(), std::mt19937(3));
    list_ = DeviceBuffer(list.size() * 4);
    list_.upload(list.data(), list_.bytes());
    a_ = random(S_ * s.C, 1), w_ = random(s.L * s.N * s.C, 2), dy_ = random(S_ * s.N, 3);
    const std::int64_t out = std::max({S_ * s.N * 2, S_ * s.C * 2, s.L * s.N * s.C * 4});
    d_ = DeviceBuffer(static_cast<std::size_t>(out));
    WB_TRY_CUDA(cudaDeviceSynchronize());
  }
  GroupedProblem problem(Op op) const {
    GroupedProblem p{};
    p.form = op <= kGather ? GemmForm::kNT : (op == kDgrad ? GemmForm::kNN : GemmForm::kTN);
    p.output = op == kStoreF32 ? GemmOutput::kF32 : (op == kAccumulate ? GemmOutput::kAddF32 : GemmOutput::kBf16);
    p.groups = s_.L, p.rows = S_, p.offsets = offsets_.as<std::int32_t>(), p.d = d_.data();
    if (op == kGather || op == kStoreGatherA) p.a_list = list_.as<std::int32_t>(), p.a_rows = S_;
    if (op == kStoreGatherB) p.b_list = list_.as<std::int32_t>(), p.b_rows = S_;
    p.a = op <= kGather ? a_.data() : dy_.data();
    p.b = op <= kDgrad ? w_.data() : a_.data();
    p.m = op >= kStore ? s_.N : 0, p.n = op <= kGather ? s_.N : s_.C, p.k = op <= kGather ? s_.C : (op == kDgrad ? s_.N : 0);
    return p;
  }
  bool check(Op op, const GemmTuning& tuning) const {
    if (op == kAccumulate) {
      WB_TRY_CUDA(cudaMemsetAsync(d_.data(), 0, d_.bytes(), stream_));
    } else {
      d_.fill(0xcd, stream_);
    }
    const GroupedProblem p = problem(op);
    run_grouped(p, tuning, 0, stream_);
    const std::int64_t samples = op >= kStore ? std::min<std::int64_t>(20000, std::int64_t{1500000000} / std::max<std::int64_t>(largest_, 1)) : 20000;
    const GemmCheck got = check_grouped(p, nullptr, 0xcd, S_, samples, stream_);
    if (got.wrong != 0) fmt::print("{} {}: {}\n", kOpNames[op], describe(tuning), got.describe());
    return got.wrong == 0 && got.checked > 0;
  }
  Spread time(Op op, const GemmTuning& tuning, int repetitions, int calls, double spin_ms) const {
    const GroupedProblem p = problem(op);
    return time_burst(stream_, repetitions, calls, spin_ms, [&] { run_grouped(p, tuning, 0, stream_); });
  }
  double flops() const { return 2.0 * static_cast<double>(S_) * static_cast<double>(s_.N) * static_cast<double>(s_.C); }
  // Operands read once, weights and their gradients of groups that have rows (a gradient of an empty group is zeros that must be written).
  double bytes(Op op) const {
    const double weights = static_cast<double>(s_.N) * static_cast<double>(s_.C), rows = static_cast<double>(S_);
    const double wide = rows * static_cast<double>(s_.N + s_.C) * 2;
    if (op < kStore) return wide + static_cast<double>(used_) * weights * 2;
    const double size = op <= kStoreGatherB ? 2 : (op == kStoreF32 ? 4 : 8);
    return wide + static_cast<double>(op == kAccumulate ? used_ : s_.L) * weights * size;
  }
  double target(Op op) const {
    return op == kForward ? s_.fwd : (op == kDgrad ? s_.dgrad : (op == kStore ? s_.store : (op == kAccumulate ? s_.accumulate : 0)));
  }
  std::string name() const { return fmt::format("{}x{} N{} C{} {}", s_.L, s_.rows, s_.N, s_.C, s_.load); }

 private:
  static DeviceBuffer random(std::int64_t count, std::uint64_t seed) {
    DeviceBuffer buffer(static_cast<std::size_t>(std::max<std::int64_t>(count, 8)) * 2);
    fill_normal(buffer.data(), DType::kBF16, static_cast<std::size_t>(count), seed, 1.0f, nullptr);
    return buffer;
  }
  Shape s_;
  std::int64_t S_ = 0, largest_ = 0, used_ = 0;
  CudaStream stream_;
  DeviceBuffer a_, w_, dy_, d_, offsets_, list_;
};

std::FILE* g_out = nullptr;
bool g_all_match = true;

void record(const Bench& bench, Op op, const GemmTuning& tuning, const Spread& t, double dense, bool checked) {
  const double rate = bench.flops() / t.us * 1e-6, floor = std::max(bench.flops() / dense * 1e-6, bench.bytes(op) / kBytesPerUs);
  const double wanted = bench.target(op) * dense / kTargetDense, target = wanted > 0 ? bench.flops() / wanted * 1e-6 : 0;
  g_all_match &= checked;
  fmt::print("{:<24} {:<34} {:<38} {:9.1f} us  {:6.1f} TFLOP/s  floor x{:5.2f}  wanted {:>5}{}{}\n", kOpNames[op], bench.name(), describe(tuning), t.us, rate,
             t.us / floor, wanted > 0 ? fmt::format("{:.0f}", wanted) : "-", wanted > 0 ? (rate >= wanted ? " met" : " MISSED") : "", checked ? "" : "  WRONG");
  fmt::print(g_out,
             "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{:.3f},"
             "\"target\":{},\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":null,\"iterations\":50,\"tflops\":{:.1f}}}\n",
             kOpNames[op], bench.name(), describe(tuning), t.us, t.spread, floor, target > 0 ? fmt::format("{:.2f}", target) : "null",
             checked ? "true" : "false", t.us, rate);
  std::fflush(g_out), std::fflush(stdout);
}

int num_sms() {
  int count = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

// What the command line says in place of the policy.
struct Override {
  GemmTile tile{0, 0, 0, 0};
  int band = 0, slices = -1;
  std::string op;  // only operations whose name contains it
  GemmTuning apply(GemmTuning tuning) const {
    if (tile.block_n > 0) tuning.tile = tile;
    if (band > 0) tuning.band = band;
    if (slices >= 0) tuning.slices_per_cluster = slices;
    return tuning;
  }
};
Override g_override;

void measure(const Shape& shape, double dense) {
  const Bench bench(shape);
  for (int op = 0; op < kNumOps; ++op) {
    const auto o = static_cast<Op>(op);
    if (std::string(kOpNames[op]).find(g_override.op) == std::string::npos) continue;
    const GemmTuning tuning = g_override.apply(choose_tuning(bench.problem(o), num_sms()));
    const bool checked = bench.check(o, tuning);
    record(bench, o, tuning, bench.time(o, tuning, 5, 10, 15), dense, checked);
  }
}

void sweep(const Shape& shape, double dense) {
  const Bench bench(shape);
  for (int op = 0; op < kNumOps; ++op) {
    const auto o = static_cast<Op>(op);
    if (o == kStoreF32 || o == kGather || o == kStoreGatherA || o == kStoreGatherB) continue;
    std::string line = fmt::format("{:<18} {:<30} wanted {:4.0f} |", kOpNames[op], bench.name(), bench.target(o) * dense / kTargetDense);
    for (const GemmKernel& kernel : grouped_kernels(bench.problem(o).form, bench.problem(o).output)) {
      const GemmTile& tile = kernel.tile;
      for (const int band : {4, 8, 16}) {
        GemmTuning tuning{tile};
        tuning.band = band / tile.cluster;
        if (band == 8 && !bench.check(o, tuning)) line += " WRONG", g_all_match = false;
        const double us = bench.time(o, tuning, 1, 1, 0.2).us;
        const int calls = std::clamp(static_cast<int>(8000 / us), 1, 10);
        line += fmt::format(" {}{:.0f}", band == 4 ? fmt::format("[{}c{}s{}] ", tile.block_n, tile.cluster, tile.stages) : "",
                            bench.flops() / bench.time(o, tuning, 3, calls, 2).us * 1e-6);
        if (o > kDgrad && band == 4 && tile.block_n != 256) break;
      }
    }
    GemmTuning alone;
    alone.overlap = false;
    line += fmt::format(" [no overlap] {:.0f}", bench.flops() / bench.time(o, alone, 3, 10, 2).us * 1e-6);
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }
}

std::vector<Shape> shapes(bool with_loads) {
  std::vector<Shape> all = {
      {8, 4096, 4096, 7168, "even", 805, 810, 795, 740},  {8, 4096, 7168, 2048, "even", 810, 812, 780, 730},
      {32, 1024, 4096, 7168, "even", 785, 800, 745, 600}, {128, 2048, 1536, 2048, "even", 780, 788, 745, 680},
      {128, 2048, 2048, 768, "even", 745, 772, 735, 680}, {32, 288, 512, 1024, "even", 380, 380, 280, 200},
      {32, 9216, 1024, 512, "even", 670, 700, 750, 650},  {256, 320, 1024, 2048, "even", 560, 560, 560, 480},
      {256, 320, 2048, 512, "even", 480, 540, 530, 440},  {1152, 256, 1024, 512, "even", 0, 0, 0, 0},
  };
  if (!with_loads) return all;
  for (const char* load : bench::kShares) {
    all.push_back({32, 9216, 1024, 512, load, 650, 680, 715, 620});
    all.push_back({32, 1024, 4096, 7168, load, 740, 750, 700, 560});
  }
  for (const char* load : bench::kWorkloads) all.push_back({64, 1024, 2048, 1024, load, 0, 0, 0, 0});
  return all;
}

int main_checked(int argc, char** argv) {
  std::string path = "gemm.jsonl", filter;
  bool with_loads = false, is_sweep = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--loads") {
      with_loads = true;
    } else if (argument == "--sweep") {
      is_sweep = true;
    } else if (argument == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else if (argument == "--op" && i + 1 < argc) {
      g_override.op = argv[++i];
    } else if (argument == "--tile" && i + 1 < argc) {
      WB_CHECK(
          std::sscanf(argv[++i], "%d,%d,%d,%d", &g_override.tile.block_n, &g_override.tile.stages, &g_override.tile.cluster, &g_override.tile.buffers) == 4,
          "--tile takes COLUMNS,STAGES,CLUSTER,BUFFERS, got {}", argv[i]);
    } else if (argument == "--band" && i + 1 < argc) {
      g_override.band = std::atoi(argv[++i]);
    } else if (argument == "--slices" && i + 1 < argc) {
      g_override.slices = std::atoi(argv[++i]);
    } else {
      path = argument;
    }
  }
  g_out = std::fopen(path.c_str(), "w");
  WB_CHECK(g_out != nullptr, "cannot write {}", path);
  Anchor anchor;
  const double dense = anchor.tflops();
  fmt::print("dense 8192^3, cuBLASLt: {:.1f} TFLOP/s\n", dense);
  for (const Shape& shape : shapes(with_loads)) {
    if (!filter.empty() && fmt::format("{}x{} N{} C{} {}", shape.L, shape.rows, shape.N, shape.C, shape.load).find(filter) == std::string::npos) continue;
    is_sweep ? sweep(shape, dense) : measure(shape, dense);
  }
  const double after = anchor.tflops();
  fmt::print("dense 8192^3, cuBLASLt, afterwards: {:.1f} TFLOP/s\n", after);
  fmt::print(g_out,
             "{{\"op\":\"dense\",\"case\":\"cuBLASLt bf16 8192^3, before and after: {:.1f}\",\"variant\":\"burst\",\"metric\":\"rate\",\"unit\":\"TFLOP/s\","
             "\"value\":{:.1f},\"spread\":{:.1f},\"floor\":null,\"target\":null,\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":true,\"p50\":{:.1f},"
             "\"p99\":null,\"iterations\":100}}\n",
             after, dense, std::fabs(after - dense), dense);
  std::fclose(g_out);
  return g_all_match ? 0 : 1;
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) {
  try {
    return waybill::cuda::main_checked(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda_gemm: %s\n", error.what());
    return 1;
  }
}
