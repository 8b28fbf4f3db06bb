// SPDX-License-Identifier: Apache-2.0
// Stacks of the MoE benchmark, their memory, and the check that comes before any time.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_moe.h"
#include "bench_verbs.h"

namespace waybill::cli {
namespace {

MoeStackConfig stack_of(const BenchShape& shape, MoeStackKind kind, DenseMapChanges changes = {}) {
  MoeStackConfig config;
  config.kind = kind;
  config.changes = changes;
  config.moe.H = shape.H;
  config.moe.F = shape.F;
  config.moe.E = shape.E;
  config.moe.K = shape.K;
  config.moe.router = shape.router;
  return config;
}

// Largest difference over the largest wanted value; only rows with keep[row] where keep is given.
double relative_difference(const std::vector<float>& seen, const std::vector<float>& wanted, const std::vector<char>& keep) {
  const std::size_t width = keep.empty() ? 1 : wanted.size() / keep.size();
  double worst = 0, scale = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    scale = std::max(scale, std::abs(static_cast<double>(wanted[i])));
    if (!keep.empty() && keep[i / width] == 0) continue;
    const double distance = std::abs(static_cast<double>(seen[i]) - static_cast<double>(wanted[i]));
    worst = std::isfinite(distance) ? std::max(worst, distance) : HUGE_VAL;
  }
  return scale > 0 ? worst / scale : worst;
}

}  // namespace

std::vector<NamedStack> bench_stacks(const BenchShape& shape, const std::vector<std::string>& only, bool ablation) {
  std::vector<NamedStack> stacks;
  for (const MoeStackKind kind :
       {MoeStackKind::kSparse, MoeStackKind::kLoop, MoeStackKind::kPadded, MoeStackKind::kCapacity, MoeStackKind::kBlockSparse, MoeStackKind::kDenseMap}) {
    const bool chosen = only.empty() || std::find(only.begin(), only.end(), to_string(kind)) != only.end();
    if (chosen || kind == MoeStackKind::kSparse) stacks.push_back({to_string(kind), "", stack_of(shape, kind), false});
  }
  for (const std::string& name : only) parse_moe_stack(name);
  if (!ablation) return stacks;
  const auto add = [&](const char* name, const char* metric, const MoeStackConfig& config) { stacks.push_back({name, metric, config, true}); };
  DenseMapChanges changes;
  add("dense-map", "", stack_of(shape, MoeStackKind::kDenseMap, changes));
  changes.compact_routes = true;
  add("+ compact routes", "ids bytes", stack_of(shape, MoeStackKind::kDenseMap, changes));
  changes.local_slice = true;
  add("+ local probability slice", "weights bytes", stack_of(shape, MoeStackKind::kDenseMap, changes));
  changes.row_lists = true;
  add("+ row lists", "slots visited", stack_of(shape, MoeStackKind::kDenseMap, changes));
  changes.fast_top_k = true;
  add("+ fast top-k", "scores visited", stack_of(shape, MoeStackKind::kDenseMap, changes));
  add("sparse (no permuted copy)", "sent bytes", stack_of(shape, MoeStackKind::kSparse));
  return stacks;
}

StackMemory::StackMemory(const BenchShape& s, std::uint64_t seed, int rank, std::int64_t T) {
  const std::int64_t L = s.E / s.P, inner = 2 * s.F;
  const float scale = 1 / std::sqrt(static_cast<float>(s.H)), inner_scale = 1 / std::sqrt(static_cast<float>(s.F));
  gate = random_floats(s.E * s.H, seed + 10, scale);
  for (std::int64_t e = rank * L; e < (rank + 1) * L; ++e) {
    const std::vector<float> first = random_floats(inner * s.H, seed + 100 + 2 * static_cast<std::uint64_t>(e), scale);
    const std::vector<float> second = random_floats(s.H * s.F, seed + 101 + 2 * static_cast<std::uint64_t>(e), inner_scale);
    w1.insert(w1.end(), first.begin(), first.end());
    w2.insert(w2.end(), second.begin(), second.end());
  }
  x = random_floats(T * s.H, seed + 3000000 + static_cast<std::uint64_t>(rank));
  d_out = random_floats(T * s.H, seed + 4000000 + static_cast<std::uint64_t>(rank));
  d_gate.resize(gate.size());
  d_w1.resize(w1.size());
  d_w2.resize(w2.size());
  out.resize(x.size());
  dx.resize(x.size());
  parameters.gate = TensorView::of(gate.data(), {s.E, s.H});
  parameters.w1 = TensorView::of(w1.data(), {L, inner, s.H});
  parameters.w2 = TensorView::of(w2.data(), {L, s.H, s.F});
  gradients.gate = TensorView::of(d_gate.data(), {s.E, s.H});
  gradients.w1 = TensorView::of(d_w1.data(), {L, inner, s.H});
  gradients.w2 = TensorView::of(d_w2.data(), {L, s.H, s.F});
}

void StackMemory::clear_gradients() {
  for (std::vector<float>* values : {&d_gate, &d_w1, &d_w2}) std::fill(values->begin(), values->end(), 0.0f);
}

StackOutputs outputs_of(const StackMemory& memory, const MoeStack& stack) {
  const RouteView& route = stack.route().view();
  const RouteView& kept = stack.kept_route().view();
  StackOutputs outputs{memory.out, memory.dx, memory.d_gate, memory.d_w1, memory.d_w2, std::vector<char>(static_cast<std::size_t>(route.T), 1)};
  for (std::int64_t i = 0; i < route.T * route.K; ++i) {
    if (kept.id(i / route.K, i % route.K) != route.id(i / route.K, i % route.K)) outputs.whole[static_cast<std::size_t>(i / route.K)] = 0;
  }
  return outputs;
}

std::string difference(const StackOutputs& seen, const StackOutputs& wanted, bool drops, double tolerance) {
  const std::vector<char> everything;
  const auto check = [&](const char* name, const std::vector<float>& a, const std::vector<float>& b, const std::vector<char>& keep) -> std::string {
    if (a.size() != b.size()) return fmt::format("{} has {} values, expected {}", name, a.size(), b.size());
    const double worst = relative_difference(a, b, keep);
    return worst <= tolerance ? "" : fmt::format("{} differs by {:.3g} of its largest value, allowed is {:.3g}", name, worst, tolerance);
  };
  const std::vector<char>& keep = drops ? seen.whole : everything;
  std::string text = check("out", seen.out, wanted.out, keep);
  if (text.empty()) text = check("dx", seen.dx, wanted.dx, keep);
  if (drops) return text;
  if (text.empty()) text = check("the gate's gradient", seen.d_gate, wanted.d_gate, everything);
  if (text.empty()) text = check("w1's gradient", seen.d_w1, wanted.d_w1, everything);
  if (text.empty()) text = check("w2's gradient", seen.d_w2, wanted.d_w2, everything);
  return text;
}

void refuse_unequal(Fabric& fabric, const std::string& stack, const std::string& text) {
  std::int64_t unequal = text.empty() ? 0 : 1;
  fabric.all_reduce(std::span<std::int64_t>(&unequal, 1), ReduceOp::kSum, "bench equal");
  if (unequal == 0) return;
  // Every rank says what the first unequal one found.
  std::vector<char> mine(200, '\0'), all(mine.size() * static_cast<std::size_t>(fabric.size()));
  std::copy_n(text.begin(), std::min(text.size(), mine.size() - 1), mine.begin());
  fabric.all_gather(mine.data(), all.data(), mine.size(), "bench difference");
  std::string first;
  for (std::size_t p = 0; first.empty() && p < static_cast<std::size_t>(fabric.size()); ++p) first = all.data() + p * mine.size();
  WB_FAIL(ErrorCode::kInternal, "bench moe: {} does not agree with sparse on {} rank(s), so nothing is timed: {}", stack, unequal, first);
}

}  // namespace waybill::cli
