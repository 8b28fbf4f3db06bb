// SPDX-License-Identifier: Apache-2.0
// What `waybill bench router` runs, and its check against the reference, for every device.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench_problem.h"
#include "waybill/router.h"

namespace waybill::cli {

// In host memory. Its logits are random; with --load they give the load's routes.
struct RouterProblem {
  BenchShape shape;
  RouterConfig config;
  RouterLossConfig losses;  // z
  std::vector<float> logits_f32, d_weights;
  std::vector<std::uint16_t> logits_16;
  RouterInputs inputs;
  Route route, wanted;  // what the router chose; the load's routes, empty where random logits decide
  std::string load;
  Tensor d_logits;

  RouterProblem(const BenchOptions& options, BenchShape resolved);
  // T of W9 and of recordings is the load's.
  RouterProblem(const BenchOptions& options, BenchShape resolved, Route load);
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

// What `waybill bench router` asked for: shape and load.
RouterProblem make_router_problem(const BenchOptions& options);

// Ids equal to the bit, weights, gradients and the z-loss within fp32 rounding of the reference.
void check_router_bench(RouterProblem& problem, const RouterRuns& runs);
// A load that was asked for is the load that is timed: the router gives its ids.
void check_router_load(RouterProblem& problem, const RouterRuns& runs);

// Is there a GPU that this build can use? False in CPU builds.
bool has_usable_gpu();
// A small problem on the first GPU against the reference; throws with the first difference.
void check_router_on_gpu();
// `waybill bench router --device cuda`.
void bench_router_on_gpu(const BenchOptions& options);

}  // namespace waybill::cli
