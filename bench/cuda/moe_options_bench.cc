// SPDX-License-Identifier: Apache-2.0
// What the layer's options cost: forward and backward as one graph on one GPU, plain and with one option at a time, interleaved with the plain layer; and what
// a shared expert of width F saves while rows travel, beside the layer that computes it after they came.
//   bench_cuda_moe_options [--filter TEXT] [--load W1] [--ranks P]      --load: replays the routes of a load of bench/shapes/loads.toml; virtual ranks, 1 by
//   default
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>

#include "bench/cuda/case_filter.h"
#include "bench/cuda/gemm_burst.h"
#include "bench/cuda/moe/problem.h"
#include "bench/cuda/run_main.h"
#include "core/cuda/graph.h"
#include "cuda/device_random.h"
#include "fabric/cuda_local/local_ranks.h"
#include "moe/cuda/device_moe.h"
#include "ops/activation/cuda/activation_cuda.h"
#include "ops/gemm/cuda/gemm_cuda.h"
#include "ops/router/cuda/router_cuda.h"
#include "waybill/workload.h"

namespace waybill::cuda::moe_bench {
namespace {

struct Variant {
  const char* name;
  std::function<void(MoeConfig&)> change;
  bool is_shared = false;  // compared with the layer whose shared expert waits for the rows
};

// A layer with its step as a graph.
class Case {
 public:
  Case(Problem& problem, const Variant& variant) : stream_(0) {
    MoeConfig c = problem.layer_config(1.25);
    variant.change(c);
    const int P = problem.P(), devices[] = {0};
    group_ = std::make_unique<CudaLocalGroup>(P, devices, DeviceMoeLayer::arena_bytes(c, P));
    layer_ = std::make_unique<DeviceMoeLayer>(c, local_ranks(*group_, 0), 0,
                                              [&](const std::string& name, std::size_t bytes) { return group_->window(name, bytes); });
    step_ = layer_->make_step();
    std::vector<MoeTensors> weights, gradients;
    std::vector<TensorView> x, out, d_out, dx, ids;
    for (const RankTensors* t : problem.on(0)) {
      weights.push_back(t->weights), gradients.push_back(t->gradients);
      if (c.expert_bias) add_biases(c, P, weights.back(), gradients.back());
      if (c.shared_F > 0) add_shared(c, weights.back(), gradients.back());
      x.push_back(t->x), out.push_back(t->out), d_out.push_back(t->d_out), dx.push_back(t->dx);
      if (problem.load() != "natural") ids.push_back(t->ids);
    }
    DeviceMoeForward replay;
    replay.replay_ids = ids;
    const auto both = [&](cudaStream_t on) {
      layer_->forward(weights, x, out, step_, replay, on);
      layer_->backward(weights, gradients, x, d_out, dx, step_, {}, on);
    };
    both(stream_);
    stream_.synchronize();
    const DeviceMoeReport& report = step_.report(0);
    WB_CHECK(group_->first_error().empty() && report.valid != 0, "{}: {}, slot demand {} of {}", variant.name, group_->first_error(), report.max_slot_demand,
             layer_->budget().slots);
    dropped = report.dropped_routes;
    graph_ = GraphExec::capture(stream_, both);
  }
  double us() {
    return time_burst(stream_, 3, 5, 2, [&] { graph_.launch(stream_); }).us;
  }
  std::int32_t dropped = 0;

 private:
  void add_biases(const MoeConfig& c, int P, MoeTensors& weights, MoeTensors& gradients) {
    const auto zeros = [&](std::int64_t width) {
      memory_.emplace_back(static_cast<std::size_t>(c.L(P) * width) * 4, 0);
      memory_.back().fill(0, stream_);
      return TensorView(memory_.back().data(), DType::kF32, {c.L(P), width}, Device{DeviceType::kCuda, 0});
    };
    weights.b1 = zeros(c.inner_width()), weights.b2 = zeros(c.row_width());
    gradients.b1 = zeros(c.inner_width()), gradients.b2 = zeros(c.row_width());
  }

  void add_shared(const MoeConfig& c, MoeTensors& weights, MoeTensors& gradients) {
    const auto normal = [&](std::int64_t rows, std::int64_t columns) {
      memory_.emplace_back(static_cast<std::size_t>(rows * columns) * 2, 0);
      fill_normal(memory_.back().data(), DType::kBF16, static_cast<std::size_t>(rows * columns), 31, 1 / std::sqrt(static_cast<float>(columns)), stream_);
      return TensorView(memory_.back().data(), DType::kBF16, {rows, columns}, Device{DeviceType::kCuda, 0});
    };
    for (MoeTensors* t : {&weights, &gradients}) t->shared_w1 = normal(c.shared_inner_width(), c.H), t->shared_w2 = normal(c.H, c.shared_F);
  }

  CudaStream stream_;
  std::unique_ptr<CudaLocalGroup> group_;
  std::unique_ptr<DeviceMoeLayer> layer_;
  DeviceMoeStep step_;
  std::vector<DeviceBuffer> memory_;
  GraphExec graph_;
};

int main_checked(int argc, char** argv) {
  CaseFilter filter;
  std::string load = "natural";
  int ranks = 1;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    WB_CHECK((option == "--filter" || option == "--load" || option == "--ranks") && i + 1 < argc, "{} is no option, or its value is missing", option);
    if (option == "--ranks") {
      const std::string value = argv[i + 1];
      const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), ranks);
      WB_CHECK(error == std::errc() && stop == value.data() + value.size() && ranks >= 1, "--ranks '{}' must be an integer of at least 1", value);
    } else if (option == "--filter") {
      filter = CaseFilter(argv[i + 1]);
    } else {
      load = argv[i + 1];
      if (load != "natural") parse_workload(load);  // a wrong name ends here
    }
  }
  register_router(), register_gemm(), register_activation();
  const Variant plain{"plain", [](MoeConfig&) {}};
  const Variant after{"shared expert behind dispatch", [](MoeConfig& c) { c.shared_F = c.F, c.overlap_shared = false; }};
  const Variant variants[] = {
      {"expert biases", [](MoeConfig& c) { c.expert_bias = true; }},
      {"aux loss", [](MoeConfig& c) { c.aux_coefficient = 1e-3f; }},
      {"aux and global loss", [](MoeConfig& c) { c.aux_coefficient = c.global_coefficient = 1e-3f; }},
      {"capacity 1.25", [](MoeConfig& c) { c.capacity_factor = 1.25; }},
      {"dense map", [](MoeConfig& c) { c.force_dense_map = true; }},
      {"padded to capacity 1.25", [](MoeConfig& c) { c.capacity_factor = 1.25, c.pad_to_capacity = true; }},
      {"shared expert beside dispatch", [](MoeConfig& c) { c.shared_F = c.F, c.overlap_shared = true; }, true},
  };
  const Shape shapes[] = {{"T8192 H2048 F768 E128 K8", 8192, 2048, 768, 128, 8},
                          {"T8192 H512 F512 E64 K36", 8192, 512, 512, 64, 36},
                          {"T8192 H2048 F512 E512 K10", 8192, 2048, 512, 512, 10},
                          {"T8192 H7168 F2048 E64 K8", 8192, 7168, 2048, 64, 8}};
  for (const Shape& shape : shapes) {
    std::unique_ptr<Problem> problem;  // where a case is wanted
    std::unique_ptr<Case> references[2];
    for (const Variant& variant : variants) {
      const std::string name = shape.name + ", " + variant.name;
      if (!filter.takes(name)) continue;
      if (!problem) problem = std::make_unique<Problem>(shape, ranks, std::vector<int>{0}, load);
      std::unique_ptr<Case>& reference = references[variant.is_shared ? 1 : 0];
      if (!reference) reference = std::make_unique<Case>(*problem, variant.is_shared ? after : plain);
      Case changed(*problem, variant);
      constexpr int kRounds = 6;
      double before = 0, with = 0;
      for (int round = 0; round < kRounds; ++round) before += reference->us() / kRounds, with += changed.us() / kRounds;
      std::printf("%-52s plain %9.1f us, with %9.1f us: + %7.1f us (%.3f)", name.c_str(), before, with, with - before, with / before);
      std::printf(changed.dropped > 0 ? ", %d routes dropped\n" : "\n", changed.dropped);
      std::fflush(stdout);
    }
  }
  filter.check_used();
  return 0;
}

}  // namespace
}  // namespace waybill::cuda::moe_bench

int main(int argc, char** argv) { return waybill::cuda::run_main("bench_cuda_moe_options", waybill::cuda::moe_bench::main_checked, argc, argv); }
