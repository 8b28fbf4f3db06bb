// SPDX-License-Identifier: Apache-2.0
// What `waybill bench router` runs, and its check against the reference, for every device.
#pragma once

#include <functional>
#include <vector>

#include "bench_problem.h"
#include "waybill/router.h"

namespace waybill::cli {

// In host memory.
struct RouterProblem {
  BenchShape shape;
  RouterConfig config;
  RouterLossConfig losses;  // z
  std::vector<float> logits_f32, d_weights;
  std::vector<std::uint16_t> logits_16;
  RouterInputs inputs;
  Route route;
  Tensor d_logits;

  RouterProblem(const BenchOptions& options, BenchShape resolved);
  RouterOutputs outputs() const;
  // Of one forward pass.
  double logit_bytes() const;
  double route_bytes() const;
};

// How a device computes the problem; results are left in the problem's route and d_logits.
struct RouterRuns {
  std::function<void()> forward, backward;
  std::function<double()> z_loss;
};

// Ids equal to the bit, weights, gradients and the z-loss within fp32 rounding of the reference.
void check_router_bench(RouterProblem& problem, const RouterRuns& runs);

// Is there a GPU that this build can use? False in CPU builds.
bool has_usable_gpu();
// A small problem on the first GPU against the reference; throws with the first difference.
void check_router_on_gpu();
// `waybill bench router --device cuda`.
void bench_router_on_gpu(const BenchOptions& options);

}  // namespace waybill::cli
