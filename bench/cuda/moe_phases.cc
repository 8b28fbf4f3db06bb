// SPDX-License-Identifier: Apache-2.0
// Where a step of the MoE layer spends its time: forward and backward on virtual ranks of one GPU, a time per phase from events between the
// kernels (eager), and the whole step as one graph.
//   bench_cuda_moe_phases [--ranks P]
#include <cstdio>
#include <cstring>
#include <map>

#include "bench/cuda/gemm_burst.h"
#include "core/cuda/graph.h"
#include "cuda/device_random.h"
#include "fabric/cuda_local/local_ranks.h"
#include "moe/cuda/device_moe.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/router/cuda/router_cuda.h"

namespace waybill::cuda {
namespace {

struct Shape {
  const char* name;
  std::int64_t T, H, F, E, K;
};
constexpr Shape kShapes[] = {
    {"T8192 H7168 F2048 E64 K8", 8192, 7168, 2048, 64, 8},
    {"T8192 H512 F512 E64 K36", 8192, 512, 512, 64, 36},
    {"T8192 H2048 F512 E512 K10", 8192, 2048, 512, 512, 10},
    {"T16384 H2048 F768 E128 K8", 16384, 2048, 768, 128, 8},
};

// Time between the marks of one pass, by phase.
class PhaseEvents {
 public:
  void mark(Phase phase, cudaStream_t stream) {
    if (!on) return;
    if (next_ == events_.size()) events_.emplace_back(std::make_unique<CudaEvent>());
    phases_.push_back(phase);
    events_[next_++]->record(stream);
  }
  std::map<Phase, double> take() {
    std::map<Phase, double> us;
    for (std::size_t i = 0; i + 1 < next_; ++i) {
      if (phases_[i] != Phase::kOther) us[phases_[i]] += static_cast<double>(events_[i + 1]->elapsed_us_since(*events_[i]));
    }
    next_ = 0, phases_.clear();
    return us;
  }
  bool on = false;

 private:
  std::vector<std::unique_ptr<CudaEvent>> events_;
  std::vector<Phase> phases_;
  std::size_t next_ = 0;
};

class Tensors {
 public:
  TensorView random(std::initializer_list<std::int64_t> shape, float scale) {
    const TensorView view = make(DType::kBF16, shape);
    fill_normal(view.data, view.dtype, static_cast<std::size_t>(view.size()), ++seed_, scale, nullptr);
    return view;
  }
  TensorView make(DType dtype, std::initializer_list<std::int64_t> shape) {
    TensorView view(nullptr, dtype, shape, Device{DeviceType::kCuda, 0});
    memory_.emplace_back(static_cast<std::size_t>(view.size()) * size_bytes(dtype));
    view.data = memory_.back().data();
    return view;
  }

 private:
  std::vector<DeviceBuffer> memory_;
  std::uint64_t seed_ = 0;
};

void report(const char* name, int P, const std::map<Phase, double>& forward, const std::map<Phase, double>& backward, double graph_us, double flops) {
  std::printf("%s, %d rank(s)\n  %-12s %9s %9s\n", name, P, "us", "forward", "backward");
  double sum_forward = 0, sum_backward = 0;
  for (const Phase phase :
       {Phase::kGate, Phase::kRouter, Phase::kPlan, Phase::kDispatch, Phase::kShared, Phase::kExpertGemm, Phase::kActivation, Phase::kCombine}) {
    const double f = forward.contains(phase) ? forward.at(phase) : 0, b = backward.contains(phase) ? backward.at(phase) : 0;
    if (f + b > 0) std::printf("  %-12s %9.1f %9.1f\n", to_string(phase), f, b);
    sum_forward += f, sum_backward += b;
  }
  std::printf("  %-12s %9.1f %9.1f   one graph %.1f us, %.0f TFLOP/s (expert matmuls: 18 S H F)\n", "sum", sum_forward, sum_backward, graph_us,
              flops / graph_us * 1e-6);
  std::fflush(stdout);
}

void run(const Shape& s, int P, float factor) {
  MoeConfig c;
  c.H = s.H, c.F = s.F, c.E = s.E, c.K = s.K, c.T_max = s.T;
  c.mode = ExchangeMode::kCaptured, c.receive_factor = factor, c.combine_wire = CombineWire::kBF16, c.recipe.kind = Recipe::kBF16;
  PhaseEvents events;
  DeviceMoeOptions options;
  options.on_phase = [&](Phase phase, cudaStream_t stream) { events.mark(phase, stream); };
  const int devices[] = {0};
  CudaLocalGroup group(P, devices, DeviceMoeLayer::arena_bytes(c, P, options));
  const CudaStream stream;
  DeviceMoeLayer layer(
      c, local_ranks(group, 0), 0, [&](const std::string& name, std::size_t bytes) { return group.window(name, bytes); }, options);
  DeviceMoeStep step = layer.make_step();
  Tensors tensors;
  std::vector<MoeTensors> weights, gradients;
  std::vector<TensorView> x, out, d_out, dx;
  const std::int64_t L = s.E / P;
  for (int p = 0; p < P; ++p) {
    MoeTensors w, g;
    w.gate = tensors.random({s.E, s.H}, 1 / std::sqrt(static_cast<float>(s.H)));
    w.w1 = tensors.random({L, 2 * s.F, s.H}, 1 / std::sqrt(static_cast<float>(s.H))),
    w.w2 = tensors.random({L, s.H, s.F}, 1 / std::sqrt(static_cast<float>(s.F)));
    g.gate = tensors.make(DType::kF32, {s.E, s.H});
    g.w1 = tensors.make(DType::kBF16, {L, 2 * s.F, s.H}), g.w2 = tensors.make(DType::kBF16, {L, s.H, s.F});
    weights.push_back(w), gradients.push_back(g);
    x.push_back(tensors.random({s.T, s.H}, 1)), d_out.push_back(tensors.random({s.T, s.H}, 1));
    out.push_back(tensors.make(DType::kBF16, {s.T, s.H})), dx.push_back(tensors.make(DType::kBF16, {s.T, s.H}));
  }
  WB_TRY_CUDA(cudaDeviceSynchronize());
  const auto forward = [&](cudaStream_t on) { layer.forward(weights, x, out, step, {}, on); };
  const auto backward = [&](cudaStream_t on) { layer.backward(weights, gradients, x, d_out, dx, step, {}, on); };
  forward(stream), backward(stream);
  stream.synchronize();
  const std::string error = group.first_error();
  if (!error.empty() || step.report(0).valid == 0) {
    std::printf("%s: %s, slot demand %ld of %ld\n", s.name, error.c_str(), static_cast<long>(step.report(0).max_slot_demand),
                static_cast<long>(layer.budget().slots));
    return;
  }
  std::vector<std::map<Phase, double>> forwards, backwards;
  for (int i = 0; i < 8; ++i) {
    spin(10, stream);  // the host queues ahead
    events.on = true;
    forward(stream);
    stream.synchronize();
    forwards.push_back(events.take());
    events.on = false;
    spin(10, stream);
    events.on = true;
    backward(stream);
    stream.synchronize();
    backwards.push_back(events.take());
    events.on = false;
  }
  const GraphExec graph = GraphExec::capture(stream, [&](cudaStream_t on) { forward(on), backward(on); });
  const Spread time = time_burst(stream, 7, 5, 2, [&] { graph.launch(stream); });
  const auto median = [](std::vector<std::map<Phase, double>>& all) {
    std::map<Phase, double> middle;
    for (const auto& [phase, ignored] : all[0]) {
      std::vector<double> values;
      for (auto& one : all) values.push_back(one[phase]);
      std::nth_element(values.begin(), values.begin() + 4, values.end());
      middle[phase] = values[4];
    }
    return middle;
  };
  report(s.name, P, median(forwards), median(backwards), time.us, 18.0 * static_cast<double>(s.T * s.K * s.H * s.F) * P);
}

}  // namespace
}  // namespace waybill::cuda

int main(int argc, char** argv) {
  using namespace waybill::cuda;
  register_router(), register_gemm(), register_activation();
  const int only = argc > 2 && std::strcmp(argv[1], "--ranks") == 0 ? std::atoi(argv[2]) : 0;
  try {
    for (const Shape& shape : kShapes) {
      for (const int P : {1, 2}) {
        if (only == 0 || only == P) run(shape, P, 1.25f);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
