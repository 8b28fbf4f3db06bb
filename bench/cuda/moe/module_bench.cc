// SPDX-License-Identifier: Apache-2.0
// The order of the module benchmark: shapes, loads, designs, checks, times. Options: bench/cuda/moe_bench.cc.
#include "bench/cuda/moe/module_bench.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bench/cuda/gemm_anchor.h"
#include "bench/cuda/moe/check.h"
#include "bench/cuda/moe/options.h"
#include "bench/cuda/moe/report.h"
#include "bench/cuda/moe/wgrad_control.h"
#include "core/cuda/cuda_error.h"
#include "cuda/device_random.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"

namespace waybill::cuda::moe_bench {
namespace {

constexpr double kOracleBound = 2e-2, kStackBound = 2e-2;
constexpr int kDenseCalls = 250;  // of sustained_dense_tflops()

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
  constexpr int kWarm = 100;
  const DenseGemm gemm(kSize, kSize, kSize, is_fp8);
  const CudaStream stream;
  const std::size_t bytes = static_cast<std::size_t>(kSize * kSize) * 2;
  const DeviceBuffer a(bytes), b(bytes), c(bytes);
  for (const DeviceBuffer* buffer : {&a, &b}) {
    if (is_fp8) fill_e4m3(*buffer, static_cast<std::size_t>(kSize), stream);
    if (!is_fp8) fill_normal(buffer->data(), DType::kBF16, bytes / 2, 7, 1.0f, stream);
  }
  std::vector<std::unique_ptr<CudaEvent>> events;
  for (int i = 0; i <= kDenseCalls; ++i) events.push_back(std::make_unique<CudaEvent>());
  for (int i = 0; i < kWarm; ++i) gemm.run(a.data(), b.data(), c.data(), stream);
  for (int i = 0; i < kDenseCalls; ++i) events[static_cast<std::size_t>(i)]->record(stream), gemm.run(a.data(), b.data(), c.data(), stream);
  events.back()->record(stream);
  stream.synchronize();
  std::vector<double> us;
  for (int i = 0; i < kDenseCalls; ++i)
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
    for (const int blocks : stack == "exact-blocks" ? o.column_blocks : std::vector<int>{stack == "exact" ? 0 : 1}) {
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
    if (std::find(o.stacks.begin(), o.stacks.end(), "beside") == o.stacks.end()) continue;
    for (const int sms : o.combine_sms) {
      add(fmt::format("sparse {}, combine beside dW1 on {} SMs", to_string(recipe), sms), "sparse", MapChange::kNone, false);
      list.back().options.recipe = recipe, list.back().options.combine_sms = sms, list.back().bound = recipe == Recipe::kNVFP4 ? 0.5 : 0.12;
    }
  }
  if (!o.ablation) return list;
  if (natural) add("dense-map + fast top-k", "dense-map", MapChange::kFastTopK, false);
  add("dense-map + compact routes", "dense-map", MapChange::kCompactRoutes, false);
  add("dense-map + local slice", "dense-map", MapChange::kLocalSlice, false);
  add("sparse, rows copied", "sparse", MapChange::kRowLists, true);
  return list;
}

// Where the time of a shape goes: the host's clock, waits for the GPU included.
class Spent {
 public:
  enum Part { kSetup = 0, kCheck, kPhases, kSteps, kControl, kNumParts };
  // Runs body and books its time.
  template <class Body>
  auto in(Part part, const Body& body) {
    const Booked booked{seconds_[part]};
    return body();
  }
  void print_and_clear() {
    fmt::print("  time spent, s: tensors and stacks {:.1f}, checks {:.1f}, phases {:.1f}, measured steps {:.1f}, controls {:.1f}\n", seconds_[kSetup],
               seconds_[kCheck], seconds_[kPhases], seconds_[kSteps], seconds_[kControl]);
    std::fill(std::begin(seconds_), std::end(seconds_), 0.0);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Booked {
    double& sum;
    Clock::time_point start = Clock::now();
    ~Booked() { sum += std::chrono::duration<double>(Clock::now() - start).count(); }
  };
  double seconds_[kNumParts] = {};
};

class Comparison {
 public:
  Comparison(const Options& options, Report& report, double dense) : options_(options), report_(report), dense_(dense) {}

  // The sparse stack alone with weight gradients that are added to in f32.
  void run_f32(const Shape& shape, const std::vector<int>& devices) {
    Problem problem = spent_.in(Spent::kSetup, [&] { return Problem(shape, options_.ranks, devices, "natural", true); });
    for (int r = 0; r < problem.P(); ++r) {
      const DeviceGuard guard(problem.rank(r).device);
      for (const TensorView& g : {problem.rank(r).gradients.w1, problem.rank(r).gradients.w2, problem.rank(r).gradients.gate})
        WB_TRY_CUDA(cudaMemset(g.data, 0, static_cast<std::size_t>(g.size()) * 4));
      WB_TRY_CUDA(cudaDeviceSynchronize());
    }
    StackOptions options;
    options.receive_factor = options_.factor, options.accumulate = true;
    const std::unique_ptr<Runner> runner = spent_.in(Spent::kSetup, [&] { return std::make_unique<Runner>(options, problem); });
    const double error = spent_.in(Spent::kCheck, [&] { return runner->step(), check_sparse(problem, *runner); });
    measure(problem, {"sparse, gradients f32 +=", options, kOracleBound}, *runner, error);
    spent_.print_and_clear();
  }

  void run(const Shape& shape, const std::vector<int>& devices, const std::string& load) {
    Problem problem = spent_.in(Spent::kSetup, [&] { return Problem(shape, options_.ranks, devices, load); });
    double factor = options_.factor;
    if (load != "natural") {  // ids are known
      const double mean = static_cast<double>(problem.T_max() * shape.K);
      factor = std::max(factor, 1.05 * static_cast<double>(problem.hottest_rank_rows()) / mean);
    }
    fmt::print("{}, {} ranks on {} GPUs ({}), load {}, receive_factor {:.2f}\n", shape.label(), problem.P(), devices.size(), problem.evidence(), load, factor);
    Results reference(problem);
    StackOptions sparse;
    sparse.receive_factor = factor;
    first(problem, sparse, reference);
    for (Design design : designs_of(options_, load == "natural")) {
      design.options.receive_factor = factor;
      if (shape.latent > 0 && design.options.kind != "sparse") {
        fmt::print("  {}: has no latent width, not run\n", design.label);
        continue;
      }
      attempt([&] { compare(problem, design, reference); });
    }
    if (options_.wgrad_control) attempt([&] { spent_.in(Spent::kControl, [&] { run_wgrad_control(problem, report_); }); });
    spent_.print_and_clear();
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
    const std::unique_ptr<Runner> runner = spent_.in(Spent::kSetup, [&] { return std::make_unique<Runner>(design.options, problem); });
    fmt::print("  {}\n", design.label);
    double error = 0;
    const std::string difference = spent_.in(Spent::kCheck, [&] {
      runner->step();
      std::vector<const std::int32_t*> places;
      for (std::size_t d = 0; d < runner->num_gpus(); ++d) {
        for (std::size_t i = 0; i < problem.on(problem.devices()[d]).size(); ++i) places.push_back(runner->stack(d).places(static_cast<int>(i)));
      }
      if (runner->dropped() == 0) places.clear();
      return reference.compare(problem, places, design.bound, error);
    });
    WB_CHECK(difference.empty(), "{}; not timed", difference);
    measure(problem, design, *runner, error);
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
    const std::unique_ptr<Runner> runner = spent_.in(Spent::kSetup, [&] { return std::make_unique<Runner>(options, problem); });
    const double error = spent_.in(Spent::kCheck, [&] { return runner->step(), check_sparse(problem, *runner); });
    reference.keep(problem);
    fmt::print("  sparse equals the dense loop in double on a token of every rank to {:.1e}; the other stacks equal sparse (relative norm {:.0e})\n", error,
               kStackBound);
    if (is_wanted("sparse")) measure(problem, {"sparse", options, kOracleBound}, *runner, error);
  }

  bool is_wanted(const std::string& stack) const { return std::find(options_.stacks.begin(), options_.stacks.end(), stack) != options_.stacks.end(); }

  void measure(Problem& problem, const Design& design, Runner& runner, double error) {
    Row row;
    row.error = error, row.host_waits = runner.stack(0).host_waits(), row.dropped = runner.dropped();
    row.computed_rows = runner.stack(0).computed_rows();
    row.counts = runner.stack(0).step_counts(runner.stream(0));
    const std::vector<PhaseSpan> spans = spent_.in(Spent::kPhases, [&] { return runner.phases(5, row.phases); });
    const int iterations = iterations_of(design, row.phases.step);
    const std::size_t inputs = problem.activation_bytes();
    if (design.options.kind == "sparse") {
      const double exact = static_cast<double>(problem.hottest_rank_rows()) / static_cast<double>(problem.T_max() * problem.shape().K);
      row.predicted_bytes = (design.options.exact ? sparse_bytes(design.options, problem, 0) : runner.stack(0).predicted_bytes()) + inputs,
      row.exact_bytes = sparse_bytes(design.options, problem, exact) + inputs;
    }
    if (row.host_waits == 0) {
      spent_.in(Spent::kSetup, [&] { runner.capture(); });
      row.times = spent_.in(Spent::kSteps, [&] { return runner.time(true, iterations); });
      row.captured = true, row.variant = design.label + " captured", row.bytes = runner.used_bytes() + inputs;
      report_.add(problem, row, dense_);
      if (design.label == "sparse") compare_loads(problem, row.times.p50);
      if (design.label == "sparse" && !options_.trace.empty()) write_captured_trace(problem, runner, spans);
      if (!options_.has_eager_row(design.label)) return;
    }
    row.times = spent_.in(Spent::kSteps, [&] { return runner.time(false, iterations); });
    row.captured = false, row.variant = design.label + " eager", row.bytes = runner.used_bytes() + inputs;
    report_.add(problem, row, dense_);
  }

  // A design that launches a kernel an expert is far slower than the others: fewer steps there. --most-seconds bounds what is beside the two that are compared.
  int iterations_of(const Design& design, double step_us) const {
    if (design.options.kind == "loop") return std::max(8, options_.iterations / 8);
    if (options_.seconds == 0 || step_us <= 0 || design.label == "sparse" || design.label == "dense-map") return options_.iterations;
    return std::min(options_.iterations, std::max(20, static_cast<int>(options_.seconds * 1e6 / step_us)));
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
        us / even_us_ / slots, "x", options_.iterations);
  }

  const Options& options_;
  Report& report_;
  double dense_, even_us_ = 0;
  Spent spent_;
};

}  // namespace

int run_module_bench(int argc, char** argv) {
  const std::optional<Options> given = parse_options(argc, argv);
  if (!given) return 0;
  const Options& options = *given;
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
    report.add_rate("dense", "cuBLASLt bf16 8192^3, bursts", anchor.tflops(), "TFLOP/s", 50);
  }
  const double dense = sustained_dense_tflops();
  report.add_rate("dense", "cuBLASLt bf16 8192^3, sustained", dense, "TFLOP/s", kDenseCalls);
  if (!options.recipes.empty()) report.add_rate("dense", "cuBLASLt E4M3 8192^3, sustained", sustained_dense_tflops(true), "TFLOP/s", kDenseCalls);
  Comparison comparison(options, report, dense);
  for (const std::string& name : options.shapes) {
    const auto shape = std::find_if(known.begin(), known.end(), [&](const Shape& s) { return s.name == name; });
    for (const std::string& load : options.loads) comparison.attempt([&] { comparison.run(*shape, devices, load); });
    if (options.f32) comparison.attempt([&] { comparison.run_f32(*shape, devices); });
  }
  return comparison.failed ? 1 : 0;
}

}  // namespace waybill::cuda::moe_bench
