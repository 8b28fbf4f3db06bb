// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM beside oneDNN and OpenBLAS, one thread each, in one process and interleaved: every round times each side once, a row shows the
// median of the rounds' ratios, so that a change of the clock hits both. The peers are loaded at run time (Debian: libdnnl2, libopenblas0) after
// their thread and instruction-set variables are set, because both read them when they are loaded.
//   gemm_peers [--isa avx512|avx2|portable] [--rounds N] [--ms N] [--only TEXT] [--json FILE] [--loads]
//     --loads   also the loads W0 to W9 of bench/shapes/loads.toml: 16 experts with 128 rows on average
// Columns: ours with fp32 and with bf16 inputs (both accumulate in fp32), "loop" = one sgemm call a group, "dense" = one sgemm over all rows
// with a single weight (forward and dgrad), the yardstick that knows no groups. Results are compared before anything is timed.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/loads.h"
#include "ops/gemm/kernel.h"
#include "waybill/grouped_gemm.h"
#include "waybill/random.h"

namespace waybill {
namespace {

enum class Op { kForward, kDgrad, kWgrad };
constexpr Op kOps[] = {Op::kForward, Op::kDgrad, Op::kWgrad};
const char* name_of(Op op) { return op == Op::kForward ? "forward" : op == Op::kDgrad ? "dgrad" : "wgrad"; }

// Row-major c[m, n] = beta c + op(a) op(b), packed rows.
using Sgemm = std::function<void(bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float beta, float* c)>;

Sgemm load_onednn() {
  void* library = dlopen("libdnnl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  using Fn =
      int (*)(char, char, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t, const float*, std::int64_t, float, float*, std::int64_t);
  const auto fn = reinterpret_cast<Fn>(dlsym(library, "dnnl_sgemm"));
  if (fn == nullptr) return {};
  return [fn](bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float beta, float* c) {
    fn(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1.0f, a, ta ? m : k, b, tb ? k : n, beta, c, n);
  };
}

Sgemm load_openblas(std::string& core) {
  void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  using Fn = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  const auto fn = reinterpret_cast<Fn>(dlsym(library, "cblas_sgemm"));
  if (fn == nullptr) return {};
  if (const auto threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"))) threads(1);
  if (const auto corename = reinterpret_cast<char* (*)()>(dlsym(library, "openblas_get_corename"))) core = corename();
  return [fn](bool ta, bool tb, std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float beta, float* c) {
    constexpr int kRowMajor = 101, kNo = 111, kYes = 112;
    fn(kRowMajor, ta ? kYes : kNo, tb ? kYes : kNo, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k), 1.0f, a, static_cast<int>(ta ? m : k), b,
       static_cast<int>(tb ? k : n), beta, c, static_cast<int>(n));
  };
}

struct Shape {
  const char* name;
  std::int64_t groups, rows, N, C;  // rows: mean of a group
  const char* load = "even";
};
// The yardstick of the target, groups of 64 to 1,024 rows of known models' experts (demo, OLMoE-like, fine-grained, wide), then groups
// too small for the target, which show where the calls' own cost begins.
constexpr Shape kShapes[] = {
    {"one matrix", 1, 512, 1024, 1024},
    {"64 rows", 8, 64, 1024, 1024},
    {"64 rows, narrow", 16, 64, 512, 256},
    {"96 rows, deep", 8, 96, 512, 2048},
    {"demo experts", 4, 256, 256, 128},
    {"200 rows, odd", 5, 200, 759, 381},
    {"512 rows", 8, 512, 768, 512},
    {"1024 rows, wide", 3, 1024, 1536, 2048},
    {"32 rows", 32, 32, 512, 256},
    {"8 rows", 32, 8, 512, 256},
    {"1 row", 32, 1, 512, 256},
};

Tensor filled(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t key) {
  Tensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.size(); ++i) {
    const bf16 x(random_uniform(key, static_cast<std::uint64_t>(i)) - 0.5f);  // a bf16 value in both storages, so that results agree
    if (dtype == DType::kF32) {
      tensor.as<float>()[i] = static_cast<float>(x);
    } else {
      tensor.as<bf16>()[i] = x;
    }
  }
  return tensor;
}

struct Inputs {
  Tensor a, dy, weights;
  Inputs(const Shape& s, std::int64_t S, DType dtype)
      : a(filled(dtype, {S, s.C}, 1)), dy(filled(dtype, {S, s.N}, 2)), weights(filled(dtype, {s.groups, s.N, s.C}, 3)) {}
};

class Problem {
 public:
  explicit Problem(const Shape& shape)
      : s(shape),
        firsts(bench::load_offsets(s.load, s.groups, s.rows)),
        S(firsts.back()),
        f32(s, S, DType::kF32),
        narrow(s, S, DType::kBF16),
        y(Tensor::zeros(DType::kF32, {S, s.N})),
        da(Tensor::zeros(DType::kF32, {S, s.C})),
        d_weights(Tensor::zeros(DType::kF32, {s.groups, s.N, s.C})),
        offsets(DType::kI32, {s.groups + 1}) {
    std::copy(firsts.begin(), firsts.end(), offsets.as<std::int32_t>());
  }
  double gflop() const { return 2e-9 * static_cast<double>(S) * static_cast<double>(s.N) * static_cast<double>(s.C); }
  Tensor& output(Op op) { return op == Op::kForward ? y : op == Op::kDgrad ? da : d_weights; }

  void ours(Op op, DType dtype) {
    const Inputs& in = dtype == DType::kF32 ? f32 : narrow;
    if (op == Op::kForward) grouped_gemm({in.a, in.weights, offsets, y, WeightLayout::kLNC, {}, {}, false});
    if (op == Op::kDgrad) grouped_gemm_dgrad({in.dy, in.weights, offsets, da, WeightLayout::kLNC, false});
    if (op == Op::kWgrad) grouped_gemm_wgrad({in.a, in.dy, offsets, d_weights, WeightLayout::kLNC, {}, {}, accumulates});
  }
  void loop(Op op, const Sgemm& sgemm) {
    for (std::size_t g = 0; g < static_cast<std::size_t>(s.groups); ++g) product(op, sgemm, static_cast<std::int64_t>(g), firsts[g], firsts[g + 1] - firsts[g]);
  }
  void dense(Op op, const Sgemm& sgemm) { product(op, sgemm, 0, 0, S); }
  std::int64_t largest() const {
    std::int64_t rows = 0;
    for (std::size_t g = 0; g < static_cast<std::size_t>(s.groups); ++g) rows = std::max<std::int64_t>(rows, firsts[g + 1] - firsts[g]);
    return rows;
  }

  const Shape s;
  const std::vector<std::int32_t> firsts;  // [groups + 1]
  const std::int64_t S;
  bool accumulates = true;

 private:
  void product(Op op, const Sgemm& sgemm, std::int64_t g, std::int64_t first, std::int64_t rows) {
    float *a = f32.a.as<float>() + first * s.C, *dy = f32.dy.as<float>() + first * s.N, *w = f32.weights.as<float>() + g * s.N * s.C;
    if (op == Op::kForward) sgemm(false, true, rows, s.N, s.C, a, w, 0, y.as<float>() + first * s.N);
    if (op == Op::kDgrad) sgemm(false, false, rows, s.C, s.N, dy, w, 0, da.as<float>() + first * s.C);
    if (op == Op::kWgrad) sgemm(true, false, s.N, s.C, rows, dy, a, accumulates ? 1.0f : 0.0f, d_weights.as<float>() + g * s.N * s.C);
  }
  const Inputs f32, narrow;
  Tensor y, da, d_weights, offsets;
};

struct Options {
  std::string isa, only, json;
  bool with_loads = false;
  int rounds = 9;
  double ms = 12;
};

struct Side {
  const char* name;
  std::function<void()> run;
  std::int64_t repeats = 1;
  std::vector<double> rate = {};  // GFLOP/s by round
};

double seconds_of(const std::function<void()>& run, std::int64_t repeats) {
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t i = 0; i < repeats; ++i) run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double median_ratio(const Side& ours, const Side& peer) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.rate.size(); ++i) ratios.push_back(ours.rate[i] / peer.rate[i]);
  return median(ratios);
}

// Ours against the per-group loop; bf16 inputs hold the same values, so one tolerance serves both.
void expect_equal(Problem& p, Op op, const Sgemm& sgemm, const char* peer) {
  p.accumulates = false;
  const std::int64_t terms = op == Op::kForward ? p.s.C : op == Op::kDgrad ? p.s.N : p.largest();
  p.loop(op, sgemm);
  const Tensor& out = p.output(op);
  const std::vector<float> wanted(out.as<float>(), out.as<float>() + out.size());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::fill_n(out.as<float>(), out.size(), NAN);
    p.ours(op, dtype);
    for (std::int64_t i = 0; i < out.size(); ++i) {
      const float seen = out.as<float>()[i], want = wanted[static_cast<std::size_t>(i)];
      WB_CHECK(std::abs(seen - want) <= 1e-6f * static_cast<float>(terms) + 1e-5f, "{} {} {}: element {} is {}, {} says {}", p.s.name, name_of(op),
               to_string(dtype), i, seen, peer, want);
    }
  }
  p.accumulates = true;
}

nlohmann::json compare(Problem& p, Op op, const Sgemm& onednn, const Sgemm& openblas, const Options& options) {
  std::vector<Side> sides = {{"ours_f32", [&] { p.ours(op, DType::kF32); }}, {"ours_bf16", [&] { p.ours(op, DType::kBF16); }}};
  if (onednn) {
    expect_equal(p, op, onednn, "oneDNN");
    sides.push_back({"onednn_loop", [&] { p.loop(op, onednn); }});
    if (op != Op::kWgrad) sides.push_back({"onednn_dense", [&] { p.dense(op, onednn); }});
  }
  if (openblas) {
    expect_equal(p, op, openblas, "OpenBLAS");
    sides.push_back({"openblas_loop", [&] { p.loop(op, openblas); }});
  }
  for (Side& side : sides) {
    side.run();
    side.repeats = std::max<std::int64_t>(1, static_cast<std::int64_t>(options.ms * 1e-3 / seconds_of(side.run, 1)));
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (Side& side : sides) side.rate.push_back(p.gflop() * static_cast<double>(side.repeats) / seconds_of(side.run, side.repeats));
  }
  nlohmann::json row = {{"shape", p.s.name}, {"groups", p.s.groups}, {"rows", p.s.rows}, {"N", p.s.N}, {"C", p.s.C}, {"op", name_of(op)}};
  for (const Side& side : sides) row["gflops"][side.name] = median(side.rate);
  for (std::size_t ours = 0; ours < 2; ++ours) {
    for (std::size_t peer = 2; peer < sides.size(); ++peer) row["ratio"][sides[ours].name][sides[peer].name] = median_ratio(sides[ours], sides[peer]);
  }
  return row;
}

std::string cell(const nlohmann::json& row, const char* group, const char* ours, const char* peer, const char* format) {
  const nlohmann::json* at = &row[group];
  for (const char* key : {ours, peer}) {
    if (key == nullptr) break;
    if (!at->contains(key)) return "-";
    at = &(*at)[key];
  }
  return fmt::format(fmt::runtime(format), at->get<double>());
}

void print(const nlohmann::json& row) {
  const auto rate = [&](const char* side) { return cell(row, "gflops", side, nullptr, "{:.1f}"); };
  const auto ratio = [&](const char* ours, const char* peer) { return cell(row, "ratio", ours, peer, "{:.2f}"); };
  fmt::print("| {:<15} | {:>2} x {:>4}, {:>4}, {:>4} | {:<7} | {:>6} | {:>6} | {:>6} | {:>6} | {:>6} | {} / {} | {} / {} | {} / {} |\n",
             row["shape"].get<std::string>(), row["groups"].get<int>(), row["rows"].get<int>(), row["N"].get<int>(), row["C"].get<int>(),
             row["op"].get<std::string>(), rate("ours_f32"), rate("ours_bf16"), rate("onednn_loop"), rate("onednn_dense"), rate("openblas_loop"),
             ratio("ours_f32", "onednn_loop"), ratio("ours_bf16", "onednn_loop"), ratio("ours_f32", "onednn_dense"), ratio("ours_bf16", "onednn_dense"),
             ratio("ours_f32", "openblas_loop"), ratio("ours_bf16", "openblas_loop"));
  std::fflush(stdout);
}

double number_of(const std::string& key, const char* text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  WB_CHECK(end != text && *end == '\0' && value >= least && value <= most, "{} takes a number from {} to {}, got '{}'", key, least, most, text);
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--loads") {
      options.with_loads = true, --i;
      continue;
    }
    WB_CHECK(i + 1 < argc, "{} needs a value", key);
    if (key == "--isa")
      options.isa = argv[i + 1];
    else if (key == "--only")
      options.only = argv[i + 1];
    else if (key == "--json")
      options.json = argv[i + 1];
    else if (key == "--rounds")
      options.rounds = static_cast<int>(number_of(key, argv[i + 1], 1, 1e6));
    else if (key == "--ms")
      options.ms = number_of(key, argv[i + 1], 0, 1e6);
    else
      WB_FAIL(ErrorCode::kInvalidArgument, "unknown option {}", key);
  }
  return options;
}

// As installed, OpenBLAS may run a generic core on machines newer than itself: its best core of the instruction set is named unless the caller did.
void set_peer_environment(const std::string& isa) {
  setenv("OMP_NUM_THREADS", "1", 1);
  setenv("OPENBLAS_NUM_THREADS", "1", 1);
  setenv("OPENBLAS_CORETYPE", isa == "avx512" ? "SkylakeX" : "Haswell", 0);
  if (isa != "avx512") setenv("DNNL_MAX_CPU_ISA", "AVX2", 0);
}

std::string row_name(const Shape& shape, Op op) { return std::string(shape.name) + " " + name_of(op); }

std::vector<Shape> shapes_of(const Options& options) {
  std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
  for (const char* load : bench::kWorkloads) {
    if (options.with_loads) shapes.push_back({load, 16, 128, 512, 256, load});
  }
  const auto is_chosen = [&](const Shape& shape) {
    return std::any_of(std::begin(kOps), std::end(kOps), [&](Op op) { return row_name(shape, op).find(options.only) != std::string::npos; });
  };
  WB_CHECK(std::any_of(shapes.begin(), shapes.end(), is_chosen), "--only '{}' matches no shape and operation{}", options.only,
           options.with_loads ? "" : " (W0 to W9 need --loads)");
  return shapes;
}

void run(const Options& options) {
  const std::vector<Shape> shapes = shapes_of(options);
  detail::force_gemm(options.isa.c_str());
  const std::string isa = detail::selected_kernels() == nullptr ? "ref" : detail::selected_kernels()->name;
  set_peer_environment(isa);
  std::string core;
  const Sgemm onednn = load_onednn(), openblas = load_openblas(core);
  fmt::print("kernel set {}, one thread; oneDNN {}, OpenBLAS {}; GFLOP/s and ratios fp32 / bf16 inputs, medians of {} rounds\n\n", isa,
             onednn ? "loaded" : "not installed", openblas ? "core " + core : "not installed", options.rounds);
  fmt::print("| shape | groups x rows, N, C | op | fp32 | bf16 | oneDNN loop | oneDNN dense | OpenBLAS loop | / oneDNN loop | / oneDNN dense | / OpenBLAS |\n");
  fmt::print("|---|---|---|---|---|---|---|---|---|---|---|\n");
  nlohmann::json result = {{"kernels", isa}, {"openblas_core", core}, {"rounds", options.rounds}, {"ms", options.ms}, {"rows", nlohmann::json::array()}};
  for (const Shape& shape : shapes) {
    for (const Op op : kOps) {
      if (row_name(shape, op).find(options.only) == std::string::npos) continue;
      Problem problem(shape);
      result["rows"].push_back(compare(problem, op, onednn, openblas, options));
      print(result["rows"].back());
    }
  }
  if (!options.json.empty()) std::ofstream(options.json) << result.dump(1) << "\n";
}

}  // namespace
}  // namespace waybill

int main(int argc, char** argv) {
  try {
    waybill::run(waybill::parse(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "gemm_peers: {}\n", error.what());
    return 2;
  }
  return 0;
}
