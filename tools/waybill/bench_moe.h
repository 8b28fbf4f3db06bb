// SPDX-License-Identifier: Apache-2.0
// What `waybill bench moe` compares: named stacks, what one forward and backward of each left behind, and whether two of them agree.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "bench_record.h"
#include "waybill/baselines.h"

namespace waybill::cli {

struct NamedStack {
  std::string name;    // "dense-map", "+ compact routes"
  std::string metric;  // ablation: what this change is about
  MoeStackConfig config;
  bool is_ablation = false;
};
// All designs, then the ladder from the dense map to the sparse layer, one change at a time.
std::vector<NamedStack> bench_stacks(const BenchShape& shape, const std::vector<std::string>& only, bool ablation);

// Memory of one rank: parameters (a function of the global expert, so that they do not depend on P), inputs and results.
struct StackMemory {
  std::vector<float> gate, w1, w2, d_gate, d_w1, d_w2, x, out, d_out, dx;
  MoeTensors parameters, gradients;

  StackMemory(const BenchShape& shape, std::uint64_t seed, int rank, std::int64_t T);
  void clear_gradients();
};

struct StackOutputs {
  std::vector<float> out, dx, d_gate, d_w1, d_w2;
  std::vector<char> whole;  // [T] nothing of the token was dropped
};
StackOutputs outputs_of(const StackMemory& memory, const MoeStack& stack);

// Largest |a - b| / largest |b|, over whole tokens only where something was dropped (gradients of weights are then left out: they
// differ). "" where all are at most `tolerance`, else which one differs by how much. This rank's part.
std::string difference(const StackOutputs& seen, const StackOutputs& wanted, bool drops, double tolerance = 1e-4);
// Throws kInternal on every rank where any rank has a difference: unequal results are not timed.
void refuse_unequal(Fabric& fabric, const std::string& stack, const std::string& difference);

// What one stack cost: counters summed over ranks of one forward and backward, phases a mean over ranks and calls.
struct StackCost {
  MoeStackCounters counters;
  Timing forward, both;
  PhaseTimes phases;
};

// The two tables of the terminal: all designs, and the ablation with the metric of each change.
void print_stacks(const std::vector<NamedStack>& stacks, const std::vector<StackCost>& costs, bool replayed);
void add_records(BenchReport& report, const BenchRecord& base, const NamedStack& stack, const StackCost& cost);

}  // namespace waybill::cli
