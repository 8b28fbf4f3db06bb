// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of grouped matmuls share: shapes, options, the table's lines and the JSON records. A benchmark is a class `Bench` of one shape:
//   kNames        names of its operations, which are numbered from 0
//   is_swept(op)  whether --sweep takes it;  tiles(op): the compiled tiles of it
//   tuning(op)    the policy's choice, a type with tile and band that describe() prints
//   check(op, tuning), time(op, tuning, repetitions, calls, spin_ms), flops() of the valid rows, bytes(op)
//   target(op)    TFLOP/s wanted beside a dense rate of kTargetDense; 0: none
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/gemm_burst.h"
#include "bench/loads.h"
#include "core/cuda/cuda_error.h"
#include "ops/gemm/cuda/grouped_params.h"

namespace waybill::cuda {

struct MatmulShape {
  std::int64_t L, rows, N, C;  // rows: mean of a group
  std::string load;
  double fwd, dgrad, store, accumulate;  // TFLOP/s wanted; 0: none
  std::string name() const { return fmt::format("{}x{} N{} C{} {}", L, rows, N, C, load); }
};

// What the command line says.
struct MatmulOptions {
  std::string path, filter, op;  // only shapes and operations whose names contain these
  bool with_loads = false, is_sweep = false;
  GemmTile tile{0, 0, 0, 0};  // in place of the policy's
  int band = 0, slices = -1;
};

inline MatmulOptions matmul_options(int argc, char** argv, const char* path) {
  MatmulOptions o;
  o.path = path;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--loads") {
      o.with_loads = true;
    } else if (argument == "--sweep") {
      o.is_sweep = true;
    } else if (argument == "--filter" && has_value) {
      o.filter = argv[++i];
    } else if (argument == "--op" && has_value) {
      o.op = argv[++i];
    } else if (argument == "--tile" && has_value) {
      WB_CHECK(std::sscanf(argv[++i], "%d,%d,%d,%d", &o.tile.block_n, &o.tile.stages, &o.tile.cluster, &o.tile.buffers) == 4,
               "--tile takes COLUMNS,STAGES,CLUSTER,BUFFERS, got {}", argv[i]);
    } else if (argument == "--band" && has_value) {
      o.band = std::atoi(argv[++i]);
    } else if (argument == "--slices" && has_value) {
      o.slices = std::atoi(argv[++i]);
    } else {
      WB_CHECK(!argument.starts_with("-"), "unknown option {}, or its value is missing", argument);
      o.path = argument;
    }
  }
  return o;
}

// Lines and records of one run beside its dense rate.
class MatmulReport {
 public:
  MatmulReport(const std::string& path, double target_dense) : out_(std::fopen(path.c_str(), "w")), target_dense_(target_dense) {
    WB_CHECK(out_ != nullptr, "cannot write {}", path);
  }
  ~MatmulReport() { std::fclose(out_); }
  MatmulReport(const MatmulReport&) = delete;
  MatmulReport& operator=(const MatmulReport&) = delete;
  void set_dense(double tflops) { dense_ = tflops; }
  double wanted(double target) const { return target * dense_ / target_dense_; }
  void fail() { all_match_ = false; }
  bool all_match() const { return all_match_; }

  void add(const MatmulShape& s, const char* op, const std::string& variant, const Spread& t, double flops, double bytes, double target, bool checked) {
    const double rate = flops / t.us * 1e-6, floor = std::max(flops / dense_ * 1e-6, bytes / kBytesPerUs), want = wanted(target);
    all_match_ &= checked;
    fmt::print("{:<24} {:<34} {:<48} {:9.1f} us  {:6.1f} TFLOP/s  floor x{:5.2f}  wanted {:>5}{}{}\n", op, s.name(), variant, t.us, rate, t.us / floor,
               want > 0 ? fmt::format("{:.0f}", want) : "-", want > 0 ? (rate >= want ? " met" : " MISSED") : "", checked ? "" : "  WRONG");
    fmt::print(out_,
               "{{\"op\":\"{}\",\"case\":\"{}\",\"variant\":\"{}\",\"metric\":\"time\",\"unit\":\"us\",\"value\":{:.3f},\"spread\":{:.3f},\"floor\":{:.3f},"
               "\"target\":{},\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":{},\"p50\":{:.3f},\"p99\":null,\"iterations\":50,\"tflops\":{:.1f}}}\n",
               op, s.name(), variant, t.us, t.spread, floor, want > 0 ? fmt::format("{:.2f}", flops / want * 1e-6) : "null", checked ? "true" : "false", t.us,
               rate);
    std::fflush(out_), std::fflush(stdout);
  }
  void add_dense(const char* op, const char* what, double after) {
    fmt::print("dense {}, afterwards: {:.1f} TFLOP/s\n", what, after);
    fmt::print(out_,
               "{{\"op\":\"{}\",\"case\":\"{}, before and after: {:.1f}\",\"variant\":\"burst\",\"metric\":\"rate\",\"unit\":\"TFLOP/s\",\"value\":{:.1f},"
               "\"spread\":{:.1f},\"floor\":null,\"target\":null,\"peers\":{{}},\"evidence\":\"kernel\",\"checked\":true,\"p50\":{:.1f},\"p99\":null,"
               "\"iterations\":50}}\n",
               op, what, after, dense_, std::fabs(after - dense_), dense_);
  }

 private:
  std::FILE* out_;
  double target_dense_, dense_ = 0;
  bool all_match_ = true;
};

template <class Bench>
void measure_shape(const MatmulShape& shape, const MatmulOptions& options, MatmulReport& report) {
  const Bench bench(shape);
  for (int op = 0; op < static_cast<int>(std::size(Bench::kNames)); ++op) {
    if (std::string(Bench::kNames[op]).find(options.op) == std::string::npos) continue;
    auto tuning = bench.tuning(op);
    if (options.tile.block_n > 0) tuning.tile = options.tile;
    if (options.band > 0) tuning.band = options.band;
    if (options.slices >= 0) tuning.slices_per_cluster = options.slices;
    const bool checked = bench.check(op, tuning);
    report.add(shape, Bench::kNames[op], describe(tuning), bench.time(op, tuning, 5, 10, 15), bench.flops(), bench.bytes(op), bench.target(op), checked);
  }
}

// Every tile at bands of 4, 8 and 16 row tiles, briefly.
template <class Bench>
void sweep_shape(const MatmulShape& shape, const MatmulOptions& options, MatmulReport& report) {
  const Bench bench(shape);
  for (int op = 0; op < static_cast<int>(std::size(Bench::kNames)); ++op) {
    if (!Bench::is_swept(op) || std::string(Bench::kNames[op]).find(options.op) == std::string::npos) continue;
    std::string line = fmt::format("{:<18} {:<30} wanted {:4.0f} |", Bench::kNames[op], shape.name(), report.wanted(bench.target(op)));
    for (const GemmTile& tile : bench.tiles(op)) {
      line += fmt::format(" [{}c{}s{}b{}]", tile.block_n, tile.cluster, tile.stages, tile.buffers);
      auto tuning = bench.tuning(op);
      tuning.tile = tile;
      if (!bench.check(op, tuning)) line += " WRONG", report.fail();
      const int calls = std::clamp(static_cast<int>(8000 / bench.time(op, tuning, 1, 1, 0.2).us), 1, 10);
      for (const int band : {4, 8, 16}) {
        tuning.band = band / tile.cluster;
        line += fmt::format(" {:.0f}", bench.flops() / bench.time(op, tuning, 3, calls, 2).us * 1e-6);
      }
    }
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }
}

// The loads beside even ones: (shape of a row each) for bench_cuda_gemm and bench_cuda_fp8.
inline void add_loads(std::vector<MatmulShape>& shapes, const MatmulShape& narrow, const MatmulShape& wide) {
  for (const char* load : bench::kShares) {
    shapes.push_back(narrow), shapes.back().load = load;
    shapes.push_back(wide), shapes.back().load = load;
  }
  for (const char* load : bench::kWorkloads) shapes.push_back({64, 1024, 2048, 1024, load, 0, 0, 0, 0});
}

// anchor.tflops() is measured before and after; its record is `op`, `what`. 0, or 1 when a check failed.
template <class Bench, class Anchor>
int run_matmul_bench(const MatmulOptions& options, const std::vector<MatmulShape>& shapes, double target_dense, Anchor& anchor, const char* op,
                     const char* what) {
  MatmulReport report(options.path, target_dense);
  report.set_dense(anchor.tflops());
  fmt::print("dense {}: {:.1f} TFLOP/s\n", what, report.wanted(target_dense));
  CaseFilter filter(options.filter);
  for (const MatmulShape& shape : shapes) {
    if (!filter.takes(shape.name())) continue;
    options.is_sweep ? sweep_shape<Bench>(shape, options, report) : measure_shape<Bench>(shape, options, report);
  }
  filter.check_used();
  report.add_dense(op, what, anchor.tflops());
  return report.all_match() ? 0 : 1;
}

}  // namespace waybill::cuda
