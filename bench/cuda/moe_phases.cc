// SPDX-License-Identifier: Apache-2.0
// Where a step of the MoE layer spends its time: forward and backward on virtual ranks of one GPU, a time per phase from events between the
// kernels (eager), and the whole step as one graph.
//   bench_cuda_moe_phases [--ranks P] [--filter TEXT] [--recipe bf16|fp8|mxfp8|nvfp4] [--load W0,W1,...]      --load: replays the routes of these loads of
//   bench/shapes/loads.toml
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/gemm_burst.h"
#include "bench/cuda/moe/problem.h"
#include "bench/cuda/run_main.h"
#include "core/cuda/graph.h"
#include "fabric/cuda_local/local_ranks.h"
#include "moe/cuda/device_moe.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/gemm/cuda/quantized_cuda.h"
#include "ops/quantize/cuda/quantize_cuda.h"
#include "ops/router/cuda/router_cuda.h"
#include "waybill/workload.h"

namespace waybill::cuda::moe_bench {
namespace {

const Shape kShapes[] = {
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

void report(const std::string& name, int P, const std::map<Phase, double>& forward, const std::map<Phase, double>& backward, double graph_us, double flops) {
  std::printf("%s, %d rank(s)\n  %-12s %9s %9s\n", name.c_str(), P, "us", "forward", "backward");
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

void run(const Shape& s, int P, const std::string& load, Recipe recipe) {
  Problem problem(s, P, {0}, load);
  const std::string name = s.name + (load == "natural" ? "" : " " + load) + (recipe == Recipe::kBF16 ? "" : fmt::format(" {}", to_string(recipe)));
  PhaseEvents events;
  DeviceMoeOptions options;
  options.on_phase = [&](Phase phase, cudaStream_t stream) { events.mark(phase, stream); };
  const int devices[] = {0};
  const double mean = static_cast<double>(problem.T_max() * s.K);
  MoeConfig c = problem.layer_config(load == "natural" ? 1.25 : std::max(1.25, 1.05 * static_cast<double>(problem.hottest_rank_rows()) / mean));
  c.recipe.kind = recipe;
  CudaLocalGroup group(P, devices, DeviceMoeLayer::arena_bytes(c, P, options));
  const CudaStream stream;
  DeviceMoeLayer layer(
      c, local_ranks(group, 0), 0, [&](const std::string& window, std::size_t bytes) { return group.window(window, bytes); }, options);
  DeviceMoeStep step = layer.make_step();
  std::vector<MoeTensors> weights, gradients;
  std::vector<TensorView> x, out, d_out, dx, ids;
  for (const RankTensors* t : problem.on(0)) {
    weights.push_back(t->weights), gradients.push_back(t->gradients);
    x.push_back(t->x), out.push_back(t->out), d_out.push_back(t->d_out), dx.push_back(t->dx);
    if (load != "natural") ids.push_back(t->ids);
  }
  DeviceMoeForward replay;
  replay.replay_ids = ids;
  const auto forward = [&](cudaStream_t on) { layer.forward(weights, x, out, step, replay, on); };
  const auto backward = [&](cudaStream_t on) { layer.backward(weights, gradients, x, d_out, dx, step, {}, on); };
  forward(stream), backward(stream);
  stream.synchronize();
  const std::string error = group.first_error();
  WB_CHECK(error.empty() && step.report(0).valid != 0, "{}: {}, slot demand {} of {}", name, error, step.report(0).max_slot_demand, layer.budget().slots);
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
  const double routes = load == "natural" ? static_cast<double>(s.T * s.K * P) : static_cast<double>(problem.routes());
  report(name, P, median(forwards), median(backwards), time.us, 18.0 * routes * static_cast<double>(s.H * s.F));
}

int main_checked(int argc, char** argv) {
  int only = 0;
  CaseFilter filter;
  std::vector<std::string> loads{"natural"};
  Recipe recipe = Recipe::kBF16;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    WB_CHECK(i + 1 < argc, "{} is no option, or its value is missing", argument);
    const std::string value = argv[++i];
    if (argument == "--ranks") {
      only = std::atoi(value.c_str());
      WB_CHECK(only == 1 || only == 2, "--ranks takes 1 or 2, got {}", value);
    } else if (argument == "--recipe") {
      const Recipe known[] = {Recipe::kBF16, Recipe::kFP8, Recipe::kMXFP8, Recipe::kNVFP4};
      const Recipe* found = std::find_if(std::begin(known), std::end(known), [&](Recipe r) { return value == to_string(r); });
      WB_CHECK(found != std::end(known), "--recipe takes bf16, fp8, mxfp8 or nvfp4, got {}", value);
      recipe = *found;
    } else if (argument == "--filter") {
      filter = CaseFilter(value);
    } else if (argument == "--load") {
      loads.clear();
      std::stringstream list(value);
      for (std::string load; std::getline(list, load, ',');) {
        if (load != "natural") parse_workload(load);  // a wrong name ends here
        loads.push_back(load);
      }
    } else {
      WB_FAIL(ErrorCode::kInvalidArgument, "unknown option {}", argument);
    }
  }
  register_router(), register_gemm(), register_activation(), register_quantize(), register_quantized_gemm();
  for (const Shape& shape : kShapes) {
    for (const std::string& load : loads) {
      if (!filter.takes(shape.name + " " + load)) continue;
      for (const int P : {1, 2}) {
        if (only == 0 || only == P) run(shape, P, load, recipe);
      }
    }
  }
  filter.check_used();
  return 0;
}

}  // namespace
}  // namespace waybill::cuda::moe_bench

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_moe_phases", waybill::cuda::moe_bench::main_checked, argc, argv); }
