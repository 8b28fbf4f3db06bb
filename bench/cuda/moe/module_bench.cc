// SPDX-License-Identifier: Apache-2.0
// The order of the module benchmark: shapes, loads, designs, checks, times. Options: bench/cuda/moe_bench.cc.
#include "bench/cuda/moe/module_bench.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <string_view>

#include "bench/cuda/gemm_anchor.h"
#include "bench/cuda/moe/check.h"
#include "bench/cuda/moe/report.h"
#include "bench/cuda/moe/wgrad_control.h"
#include "core/cuda/cuda_error.h"
#include "cuda/device_random.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"
#include "waybill/route_io.h"
#include "waybill/workload.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr double kOracleBound = 2e-2, kStackBound = 2e-2;

constexpr std::string_view kStacks[] = {"sparse", "beside", "exact", "exact-resend", "exact-blocks", "dense-map", "padded", "capacity", "loop"};

struct Options {
  std::string path = "moe.jsonl", shapes_file = "bench/shapes/moe.toml", trace;
  std::vector<std::string> shapes{"deepseek-v3-slice", "qwen3-30b-a3b", "sparser-ep72", "proxy-512", "sparser-2304"};
  std::vector<std::string> stacks{std::begin(kStacks), std::end(kStacks)};
  std::vector<std::string> loads{"natural"};
  std::vector<Recipe> recipes;
  bool ablation = false, f32 = false, wgrad_control = false;
  int iterations = 160, ranks = 2;
  std::vector<int> combine_sms{32}, column_blocks{2};
  double factor = 1.25;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<Recipe> parse_recipes(const std::string& text) {
  std::vector<Recipe> recipes;
  for (const std::string& name : split(text)) {
    const Recipe known[] = {Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4};
    const Recipe* found = std::find_if(std::begin(known), std::end(known), [&](Recipe r) { return name == to_string(r); });
    WB_CHECK(found != std::end(known), "--recipe takes fp8, mxfp8 and nvfp4, got {}", name);
    recipes.push_back(*found);
  }
  return recipes;
}

// Numbers from 2 on.
std::vector<int> parse_numbers(const std::string& option, const std::string& text) {
  std::vector<int> numbers;
  for (const std::string& part : split(text)) {
    int number = 0;
    const char* const end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, number);
    WB_CHECK(error == std::errc() && stop == end && number >= 2, "{} takes numbers from 2 on, got '{}'", option, part);
    numbers.push_back(number);
  }
  return numbers;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      WB_CHECK(i + 1 < argc, "{} needs a value", name);
      return std::string(argv[++i]);
    };
    if (name == "--ablation")
      o.ablation = true;
    else if (name == "--wgrad-control")
      o.wgrad_control = true;
    else if (name == "--f32")
      o.f32 = true;
    else if (name == "--shape")
      o.shapes = split(value());
    else if (name == "--stack")
      o.stacks = split(value());
    else if (name == "--load")
      o.loads = split(value());
    else if (name == "--recipe")
      o.recipes = parse_recipes(value());
    else if (name == "--combine-sms")
      o.combine_sms = parse_numbers(name, value());
    else if (name == "--column-blocks")
      o.column_blocks = parse_numbers(name, value());
    else if (name == "--iterations")
      o.iterations = std::stoi(value());
    else if (name == "--ranks")
      o.ranks = std::stoi(value());
    else if (name == "--factor")
      o.factor = std::stod(value());
    else if (name == "--shapes")
      o.shapes_file = value();
    else if (name == "--trace")
      o.trace = value();
    else if (name[0] == '-')
      WB_FAIL(ErrorCode::kInvalidArgument, "unknown option {}", name);
    else
      o.path = name;
  }
  for (const std::string& stack : o.stacks) {
    WB_CHECK(std::find(std::begin(kStacks), std::end(kStacks), stack) != std::end(kStacks), "no stack '{}', known are {}", stack, fmt::join(kStacks, ", "));
  }
  WB_CHECK(!o.shapes.empty() && !o.stacks.empty(), "--shape and --stack must each name one at least");
  WB_CHECK(o.iterations >= 1 && o.ranks >= 1, "--iterations = {} and --ranks = {} must be at least 1", o.iterations, o.ranks);
  WB_CHECK(o.factor > 0 && std::isfinite(o.factor), "--factor = {} must be a positive number", o.factor);
  WB_CHECK(!o.loads.empty(), "--load names no load");
  for (const std::string& load : o.loads) {
    if (load == "natural") continue;
    if (is_recorded(load))  // a wrong name ends here, not after minutes
      (void)load_routes(recorded_folder(load));
    else
      parse_workload(load);
  }
  return o;
}

// Normal values as E4M3 codes, [size, size].
void fill_e4m3(const DeviceBuffer& codes, std::size_t size, cudaStream_t stream) {
  const auto n = static_cast<std::int64_t>(size);
  const Device device{DeviceType::kCuda, 0};
  const DeviceBuffer wide(size * size * 2), scales(size * size / 32);
  fill_normal(wide.data(), DType::kBF16, size * size, 7, 1.0f, stream);
  quantize(fp8_rows(), TensorView(wide.data(), DType::kBF16, {n, n}, device), {},
           {TensorView(codes.data(), DType::kU8, {n, n}, device), TensorView(scales.data(), DType::kF32, {n, n / 128}, device), {}}, {device, stream, nullptr});
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

// cuBLASLt's dense product under continuous load: 0.5 s of calls, events around each, the median. Steps of the layer are long enough for the power limit,
// so that this is what they are held to.
double sustained_dense_tflops(bool is_fp8 = false) {
  constexpr std::int64_t kSize = 8192;
  constexpr int kWarm = 100, kCalls = 250;
  const DenseGemm gemm(kSize, kSize, kSize, is_fp8);
  const CudaStream stream;
  const std::size_t bytes = static_cast<std::size_t>(kSize * kSize) * 2;
  const DeviceBuffer a(bytes), b(bytes), c(bytes);
  for (const DeviceBuffer* buffer : {&a, &b}) {
    if (is_fp8) fill_e4m3(*buffer, static_cast<std::size_t>(kSize), stream);
    if (!is_fp8) fill_normal(buffer->data(), DType::kBF16, bytes / 2, 7, 1.0f, stream);
  }
  std::vector<std::unique_ptr<CudaEvent>> events;
  for (int i = 0; i <= kCalls; ++i) events.push_back(std::make_unique<CudaEvent>());
  for (int i = 0; i < kWarm; ++i) gemm.run(a.data(), b.data(), c.data(), stream);
  for (int i = 0; i < kCalls; ++i) events[static_cast<std::size_t>(i)]->record(stream), gemm.run(a.data(), b.data(), c.data(), stream);
  events.back()->record(stream);
  stream.synchronize();
  std::vector<double> us;
  for (int i = 0; i < kCalls; ++i)
    us.push_back(static_cast<double>(events[static_cast<std::size_t>(i) + 1]->elapsed_us_since(*events[static_cast<std::size_t>(i)])));
  std::sort(us.begin(), us.end());
  return 2.0 * static_cast<double>(kSize * kSize * kSize) / us[us.size() / 2] * 1e-6;
}

struct Design {
  std::string label;
  StackOptions options;
  double bound = kStackBound;  // of every result's relative norm to sparse in bf16
};

std::vector<Design> designs_of(const Options& o, bool natural) {
  std::vector<Design> list;
  const auto add = [&](const std::string& label, const std::string& kind, MapChange change, bool permute) {
    Design d;
    d.label = label;
    d.options.kind = kind, d.options.change = change, d.options.permute = permute;
    list.push_back(d);
  };
  for (const std::string& stack : o.stacks) {
    if (stack == "sparse") continue;  // comes first, by itself
    if (stack == "beside") {
      for (const int sms : o.combine_sms) {
        for (const bool whole : {false, true}) {
          add(fmt::format("sparse, combine beside dW1 on {} SMs{}", sms, whole ? ", x in a buffer of its own" : ""), "sparse", MapChange::kNone, false);
          list.back().options.combine_sms = sms, list.back().options.whole_x = whole;
        }
      }
      continue;
    }
    if (!stack.starts_with("exact")) {
      add(stack, stack, MapChange::kNone, false);
      continue;
    }
    for (const int blocks : stack == "exact-blocks" ? o.column_blocks : std::vector<int>{1}) {
      const std::string what = stack == "exact" ? "" : blocks == 1 ? ", rows sent again" : fmt::format(", rows sent again, {} blocks of columns", blocks);
      add(fmt::format("sparse, exact sizes{}", what), "sparse", MapChange::kNone, false);
      list.back().options.exact = true, list.back().options.resend = stack != "exact", list.back().options.column_blocks = blocks;
    }
  }
  for (const Recipe recipe : o.recipes) {
    for (const bool keep : {false, true}) {
      add(fmt::format("sparse {}{}", to_string(recipe), keep ? ", weights kept" : ""), "sparse", MapChange::kNone, false);
      list.back().options.recipe = recipe, list.back().options.keep_weights = keep;
      list.back().bound = recipe == Recipe::kNVFP4 ? 0.5 : 0.12;
    }
  }
  if (!o.ablation) return list;
  if (natural) add("dense-map + fast top-k", "dense-map", MapChange::kFastTopK, false);
  add("dense-map + compact routes", "dense-map", MapChange::kCompactRoutes, false);
  add("dense-map + local slice", "dense-map", MapChange::kLocalSlice, false);
  add("sparse, rows copied", "sparse", MapChange::kRowLists, true);
  return list;
}

class Comparison {
 public:
  Comparison(const Options& options, Report& report, double dense) : options_(options), report_(report), dense_(dense) {}

  // The sparse stack alone with weight gradients that are added to in f32.
  void run_f32(const Shape& shape, const std::vector<int>& devices) {
    Problem problem(shape, options_.ranks, devices, "natural", true);
    for (int r = 0; r < problem.P(); ++r) {
      const DeviceGuard guard(problem.rank(r).device);
      for (const TensorView& g : {problem.rank(r).gradients.w1, problem.rank(r).gradients.w2, problem.rank(r).gradients.gate})
        WB_TRY_CUDA(cudaMemset(g.data, 0, static_cast<std::size_t>(g.size()) * 4));
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    StackOptions options;
    options.receive_factor = options_.factor, options.accumulate = true;
    Runner runner(options, problem);
    runner.step();
    const double error = check_sparse(problem, runner);
    measure(problem, {"sparse, gradients f32 +=", options, kOracleBound}, runner, error);
  }

  void run(const Shape& shape, const std::vector<int>& devices, const std::string& load) {
    Problem problem(shape, options_.ranks, devices, load);
    double factor = options_.factor;
    if (load != "natural") {  // ids are known
      const double mean = static_cast<double>(problem.T_max() * shape.K);
      factor = std::max(factor, 1.05 * static_cast<double>(problem.hottest_rank_rows()) / mean);
    }
    fmt::print("{} T{} H{} F{} E{} K{}, {} ranks on {} GPUs ({}), load {}, receive_factor {:.2f}\n", shape.name, shape.T, shape.H, shape.F, shape.E, shape.K,
               problem.P(), devices.size(), problem.evidence(), load, factor);
    Results reference(problem);
    StackOptions sparse;
    sparse.receive_factor = factor;
    first(problem, sparse, reference);
    for (Design design : designs_of(options_, load == "natural")) {
      design.options.receive_factor = factor;
      attempt([&] { compare(problem, design, reference); });
    }
    if (options_.wgrad_control) attempt([&] { run_wgrad_control(problem, report_); });
  }
  // A failure is shown; what follows may still run.
  void attempt(const std::function<void()>& part) {
    try {
      part();
    } catch (const Error& error) {
      fmt::print("  FAILED: {}\n", error.what());
      failed = true;
    }
  }
  bool failed = false;

 private:
  // One design: results first, then times.
  void compare(Problem& problem, const Design& design, const Results& reference) {
    poison_results(problem);
    Runner runner(design.options, problem);
    fmt::print("  {}\n", design.label);
    runner.step();
    std::vector<const std::int32_t*> places;
    for (std::size_t d = 0; d < runner.num_gpus(); ++d) {
      for (std::size_t i = 0; i < problem.on(problem.devices()[d]).size(); ++i) places.push_back(runner.stack(d).places(static_cast<int>(i)));
    }
    if (runner.dropped() == 0) places.clear();
    double error = 0;
    const std::string difference = reference.compare(problem, places, design.bound, error);
    WB_CHECK(difference.empty(), "{}; not timed", difference);
    measure(problem, design, runner, error);
  }

  // The sparse stack's routes become the problem's; a token of every rank against the dense loop in double: the largest relative norm.
  static double check_sparse(Problem& problem, Runner& runner) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(problem.shape().E));
    for (std::size_t d = 0; d < runner.num_gpus(); ++d) {
      const DeviceGuard guard(problem.devices()[d]);
      runner.stack(d).add_counts(counts, runner.stream(d));
    }
    WB_CHECK(problem.counts().empty() || problem.counts() == counts, "the sparse stack's routes are not the load's");
    problem.set_counts(counts);
    double error = 0;
    for (int r = 0; r < problem.P(); ++r) {
      if (problem.rank(r).T == 0) continue;
      const DeviceGuard guard(problem.rank(r).device);
      const std::int64_t token = r % 2 == 0 ? 0 : problem.rank(r).T - 1;
      const TokenErrors e = check_token(problem, r, token);
      WB_CHECK(e.out < kOracleBound && e.dx < kOracleBound, "sparse: token {} of rank {} differs from the dense loop in double: out {:.2e}, dx {:.2e}", token,
               r, e.out, e.dx);
      error = std::max({error, e.out, e.dx});
    }
    return error;
  }

  // What the other stacks are compared with.
  void first(Problem& problem, const StackOptions& options, Results& reference) {
    poison_results(problem);
    Runner runner(options, problem);
    runner.step();
    const double error = check_sparse(problem, runner);
    reference.keep(problem);
    fmt::print("  sparse equals the dense loop in double on a token of every rank to {:.1e}; the other stacks equal sparse (relative norm {:.0e})\n", error,
               kStackBound);
    if (is_wanted("sparse")) measure(problem, {"sparse", options, kOracleBound}, runner, error);
  }

  bool is_wanted(const std::string& stack) const { return std::find(options_.stacks.begin(), options_.stacks.end(), stack) != options_.stacks.end(); }

  void measure(Problem& problem, const Design& design, Runner& runner, double error) {
    Row row;
    row.error = error, row.host_waits = runner.stack(0).host_waits(), row.dropped = runner.dropped();
    row.computed_rows = runner.stack(0).computed_rows();
    row.counts = runner.stack(0).step_counts(runner.stream(0));
    const std::vector<PhaseSpan> spans = runner.phases(5, row.phases);
    // One design at a time is far from others in speed only where it launches a kernel an expert: fewer steps there.
    const int iterations = design.options.kind == "loop" ? std::max(8, options_.iterations / 8) : options_.iterations;
    const std::size_t inputs = problem.activation_bytes();
    if (design.options.kind == "sparse") {
      const double exact = static_cast<double>(problem.hottest_rank_rows()) / static_cast<double>(problem.T_max() * problem.shape().K);
      row.predicted_bytes = (design.options.exact ? sparse_bytes(design.options, problem, 0) : runner.stack(0).predicted_bytes()) + inputs,
      row.exact_bytes = sparse_bytes(design.options, problem, exact) + inputs;
    }
    if (row.host_waits == 0) {
      runner.capture();
      row.times = runner.time(true, iterations), row.captured = true, row.variant = design.label + " captured", row.bytes = runner.used_bytes() + inputs;
      report_.add(problem, row, dense_);
      if (design.label == "sparse") compare_loads(problem, row.times.p50);
      if (design.label == "sparse" && !options_.trace.empty()) write_captured_trace(problem, runner, spans);
    }
    row.times = runner.time(false, iterations), row.captured = false, row.variant = design.label + " eager", row.bytes = runner.used_bytes() + inputs;
    report_.add(problem, row, dense_);
  }

  // Steps in the trace's third track lie end to end, and the host's calls of the second end long before: nothing waited for the device.
  void write_captured_trace(Problem& problem, Runner& runner, const std::vector<PhaseSpan>& spans) const {
    constexpr int kSteps = 8;
    const std::vector<ReplaySpan> replays = runner.replays(kSteps);
    write_trace(options_.trace, problem.shape().name, spans, replays);
    double host = 0, device = 0;
    for (const ReplaySpan& r : replays) host = std::max(host, r.host_begin_us + r.host_us), device = std::max(device, r.device_begin_us + r.device_us);
    fmt::print("      trace {}: the host had queued {} captured steps after {:.2f} ms, the device had done them after {:.2f} ms\n", options_.trace, kSteps,
               host * 1e-3, device * 1e-3);
  }

  // A skewed load should cost what its hottest rank has more than the mean.
  void compare_loads(Problem& problem, double us) {
    if (problem.load() == "W0") even_us_ = us;
    if (problem.load() != "W2" || even_us_ == 0) return;
    const double slots = static_cast<double>(problem.hottest_rank_rows()) * problem.P() / static_cast<double>(problem.routes());
    report_.add_rate(
        "moe load",
        fmt::format("{}: one hot expert (W2) over even routes (W0), divided by the hottest rank's slots over the mean ({:.3f})", problem.shape().name, slots),
        us / even_us_ / slots, "x");
  }

  const Options& options_;
  Report& report_;
  double dense_, even_us_ = 0;
};

}  // namespace

int run_module_bench(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const std::vector<Shape> known = read_shapes(options.shapes_file);
  for (const std::string& name : options.shapes) {
    WB_CHECK(std::any_of(known.begin(), known.end(), [&](const Shape& s) { return s.name == name; }), "no shape {} in {}", name, options.shapes_file);
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    WB_FAIL(ErrorCode::kUnsupported, "no GPU is usable here ({}); `waybill doctor` says what is missing",
            error != cudaSuccess ? cudaGetErrorString(error) : "none is visible");
  }
  register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
  std::vector<int> devices{0};
  if (count > 1 && options.ranks > 1) devices.push_back(1);
  Report report(options.path);
  {
    Anchor anchor;
    report.add_rate("dense", "cuBLASLt bf16 8192^3, bursts", anchor.tflops(), "TFLOP/s");
  }
  const double dense = sustained_dense_tflops();
  report.add_rate("dense", "cuBLASLt bf16 8192^3, sustained", dense, "TFLOP/s");
  if (!options.recipes.empty()) report.add_rate("dense", "cuBLASLt E4M3 8192^3, sustained", sustained_dense_tflops(true), "TFLOP/s");
  Comparison comparison(options, report, dense);
  for (const std::string& name : options.shapes) {
    const auto shape = std::find_if(known.begin(), known.end(), [&](const Shape& s) { return s.name == name; });
    for (const std::string& load : options.loads) comparison.attempt([&] { comparison.run(*shape, devices, load); });
    if (options.f32) comparison.attempt([&] { comparison.run_f32(*shape, devices); });
  }
  return comparison.failed ? 1 : 0;
}

}  // namespace waybill::cuda::moe_bench
