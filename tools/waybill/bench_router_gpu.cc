// SPDX-License-Identifier: Apache-2.0
// Router forward, backward and losses on the first GPU. Times are device times of launches inside one CUDA graph.
#include <fmt/format.h>

#include <cstdlib>

#include "bench_record.h"
#include "bench_router_problem.h"
#include "waybill/log.h"
#include "waybill/route_io.h"

#if defined(WAYBILL_WITH_CUDA)
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/graph.h"
#include "ops/router/cuda/router_cuda.h"
#endif

namespace waybill::cli {

#if !defined(WAYBILL_WITH_CUDA)

bool has_usable_gpu() { return false; }
void check_router_on_gpu() { WB_FAIL(ErrorCode::kUnsupported, "this build has no CUDA kernels"); }
void bench_router_on_gpu(const BenchOptions&) {
  WB_FAIL(ErrorCode::kUnsupported, "--device cuda needs a build with CUDA: configure with -DWAYBILL_CUDA=ON where nvcc is installed");
}

#else
namespace {

using cuda::CudaEvent;
using cuda::CudaStream;
using cuda::DeviceBuffer;
using cuda::GraphExec;

constexpr int kLaunches = 10;  // of one graph

// The problem's copy on the device.
class GpuRouterBench {
 public:
  explicit GpuRouterBench(RouterProblem& problem)
      : problem_(problem),
        logits_(static_cast<std::size_t>(problem.logit_bytes())),
        ids_(routes() * size_bytes(problem.route.view().id_dtype)),
        weights_(routes() * 4),
        counts_(static_cast<std::size_t>(problem.shape.E) * 4),
        d_weights_(routes() * 4),
        d_logits_(elements() * 4),
        losses_(3 * sizeof(double)) {
    logits_.upload(problem.inputs.logits.data, logits_.bytes());
    d_weights_.upload(problem.d_weights.data(), d_weights_.bytes());
    WB_TRY_CUDA(cudaDeviceSynchronize());
    inputs_.logits = TensorView(logits_.data(), problem.inputs.logits.dtype, {problem.shape.T, problem.shape.E}, logits_.device());
    route_ = problem.route.view();
    route_.ids = ids_.data(), route_.weights = weights_.as<float>(), route_.counts = counts_.as<std::int32_t>(), route_.device = logits_.device();
    d_view_ = TensorView(d_logits_.data(), DType::kF32, {problem.shape.T, problem.shape.E}, logits_.device());
  }
  void forward() {
    RouterOutputs outputs;
    outputs.route = route_;
    router_forward(problem_.config, inputs_, outputs, stream());
  }
  void backward() { router_backward(problem_.config, problem_.losses, inputs_, route_, d_weights_.as<float>(), {}, 1.0f, d_view_, stream()); }
  void losses() { cuda::router_losses_device({problem_.config, problem_.losses, inputs_, route_, {}, stream()}, losses_.as<double>()); }

  // With the results in host memory.
  RouterRuns runs() {
    RouterRuns runs;
    runs.forward = [this] {
      forward();
      const RouteView& host = problem_.route.view();
      ids_.download(host.ids, ids_.bytes(), stream_), weights_.download(host.weights, weights_.bytes(), stream_);
      stream_.synchronize();
    };
    runs.backward = [this] {
      backward();
      d_logits_.download(problem_.d_logits.view().data, d_logits_.bytes(), stream_);
      stream_.synchronize();
    };
    runs.z_loss = [this] {
      losses();
      double values[3] = {};
      losses_.download(values, sizeof(values), stream_);
      stream_.synchronize();
      return values[2];
    };
    return runs;
  }

  Timing time(const BenchOptions& options, const std::function<void()>& body) {
    body();  // scratch, kernel attributes
    stream_.synchronize();
    const GraphExec graph = GraphExec::capture(stream_, [&](cudaStream_t) {
      for (int i = 0; i < kLaunches; ++i) body();
    });
    const CudaEvent begin, end;
    std::vector<double> samples;
    double total = 0;
    for (std::int64_t i = 0; i < 3 + options.iterations || (total < options.seconds * 1e6 && i < 10000); ++i) {
      begin.record(stream_);
      graph.launch(stream_);
      end.record(stream_);
      end.synchronize();
      const double us = static_cast<double>(end.elapsed_us_since(begin));
      if (i >= 3) samples.push_back(us / kLaunches), total += us;
    }
    return summarise(std::move(samples));
  }

 private:
  std::size_t routes() const { return static_cast<std::size_t>(problem_.shape.T * problem_.shape.K); }
  std::size_t elements() const { return static_cast<std::size_t>(problem_.shape.T * problem_.shape.E); }
  Stream stream() const { return Stream{Device{DeviceType::kCuda, 0}, stream_.get(), nullptr}; }

  RouterProblem& problem_;
  CudaStream stream_;
  DeviceBuffer logits_, ids_, weights_, counts_, d_weights_, d_logits_, losses_;
  RouterInputs inputs_;
  RouteView route_;
  TensorView d_view_;
};

// Bytes a microsecond that a device copy moves, read and written.
double copy_rate() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const DeviceBuffer from(kBytes), to(kBytes);
  const CudaStream stream;
  const CudaEvent begin, end;
  double best = 0;
  from.fill(1, stream);
  for (int i = 0; i < 5; ++i) {
    begin.record(stream);
    WB_TRY_CUDA(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream));
    end.record(stream);
    end.synchronize();
    best = std::max(best, 2.0 * static_cast<double>(kBytes) / static_cast<double>(end.elapsed_us_since(begin)));
  }
  return best;
}

}  // namespace

bool has_usable_gpu() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  return found;
}

void check_router_on_gpu() {
  BenchShape shape;
  shape.T = 70, shape.E = shape.router.E = 256, shape.K = shape.router.K = 8;
  shape.router.score = ScoreFunction::kSigmoid;
  RouterProblem problem(BenchOptions{}, shape);
  GpuRouterBench gpu(problem);
  check_router_bench(problem, gpu.runs());
}

void bench_router_on_gpu(const BenchOptions& options) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error != cudaSuccess || count == 0) {
    WB_FAIL(ErrorCode::kUnsupported, "--device cuda: no GPU can be used ({}); waybill doctor says what is missing",
            error != cudaSuccess ? cudaGetErrorString(error) : "none found");
  }
  setenv("WB_LOG", "select", 1);
  set_log_callback({});
  RouterProblem problem = make_router_problem(options);
  GpuRouterBench gpu(problem);
  BenchReport report(options, problem.shape, 1);
  if (!options.no_check) check_router_bench(problem, gpu.runs());
  check_router_load(problem, gpu.runs());
  report.set_checked(!options.no_check);
  BenchRecord record;
  record.op = "router";
  record.implementation = chosen_implementation("router", [&] { gpu.runs().forward(); });
  if (!options.save_route.empty()) save_route(options.save_route, problem.route);
  record.load = summarise_load(problem.load, {problem.route.view()});
  const double rate = copy_rate(), logit_bytes = problem.logit_bytes(), route_bytes = problem.route_bytes();
  const auto add = [&](const char* variant, double bytes, const std::function<void()>& body) {
    record.variant = variant, record.bytes = bytes;
    record.floor_us = bytes / rate, record.floor_kind = "device copy";
    record.timing = gpu.time(options, body);
    report.add(record);
  };
  if (options.pass != "backward") add("forward, cuda graph", logit_bytes + route_bytes, [&] { gpu.forward(); });
  if (options.pass != "forward") {
    add("backward with z-loss, cuda graph", logit_bytes + route_bytes + static_cast<double>(problem.shape.T * problem.shape.E) * 4, [&] { gpu.backward(); });
    add("losses (z), cuda graph", logit_bytes, [&] { gpu.losses(); });
  }
  report.finish();
}

#endif

}  // namespace waybill::cli
