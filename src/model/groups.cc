// SPDX-License-Identifier: Apache-2.0
#include "model/groups.h"

#include <cstring>

#include "waybill/optimizer.h"

namespace waybill::model {
namespace {

constexpr std::int64_t kBucket = 1 << 20;  // floats: one collective for many small tensors

// Sums the gradients over one group, packed into buckets in list order.
void reduce_over(Fabric& group, const std::vector<const Tensor*>& gradients) {
  if (group.size() == 1) return;
  std::vector<float> bucket;
  std::size_t first = 0;
  while (first < gradients.size()) {
    std::size_t last = first;
    std::int64_t count = 0;
    while (last < gradients.size() && (last == first || count + gradients[last]->size() <= kBucket)) count += gradients[last++]->size();
    if (last == first + 1) {
      group.all_reduce(std::span<float>(gradients[first]->as<float>(), static_cast<std::size_t>(count)), ReduceOp::kSum, "gradients");
    } else {
      bucket.resize(static_cast<std::size_t>(count));
      float* at = bucket.data();
      for (std::size_t i = first; i < last; at += gradients[i++]->size())
        std::memcpy(at, gradients[i]->as<float>(), static_cast<std::size_t>(gradients[i]->size()) * sizeof(float));
      group.all_reduce(std::span<float>(bucket), ReduceOp::kSum, "gradients");
      at = bucket.data();
      for (std::size_t i = first; i < last; at += gradients[i++]->size())
        std::memcpy(gradients[i]->as<float>(), at, static_cast<std::size_t>(gradients[i]->size()) * sizeof(float));
    }
    first = last;
  }
}

int layer_P(const ModelConfig& config, const Parameter& p) { return config.layers[static_cast<std::size_t>(p.layer)].P; }

double sum_of_squares(const float* values, std::int64_t count) {
  constexpr int kLanes = 8;  // independent sums, added in order at the end
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += static_cast<double>(values[i + l]) * static_cast<double>(values[i + l]);
  for (; i < count; ++i) lanes[0] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

}  // namespace

Groups::Groups(const ModelConfig& config, Fabric& world) : world_(world) {
  for (const LayerConfig& layer : config.layers) {
    if (!layer.is_moe || by_P_.count(layer.P) != 0) continue;
    Pair& pair = by_P_[layer.P];
    const int rank = world.rank();
    pair.expert_parallel = world.split(rank / layer.P, rank, fmt::format("expert_parallel{}", layer.P));
    pair.replicas = world.split(rank % layer.P, rank, fmt::format("replicas{}", layer.P));
  }
}

void reduce_gradients(const ModelConfig& config, ParameterList& list, const Groups& groups) {
  std::vector<const Tensor*> replicated;
  std::map<int, std::vector<const Tensor*>> experts;  // by P
  for (const Parameter& p : list.parameters) {
    if (!p.trainable) continue;
    (p.is_expert ? experts[layer_P(config, p)] : replicated).push_back(&p.grad);
  }
  reduce_over(groups.world(), replicated);
  for (const auto& [P, gradients] : experts) reduce_over(groups.replicas(P), gradients);
}

double gradient_norm(const ModelConfig& config, const ParameterList& list, const Groups& groups) {
  std::vector<double> replicated, experts;
  for (const Parameter& p : list.parameters) {
    if (!p.trainable) continue;
    if (!p.is_expert) {
      replicated.push_back(sum_of_squares(p.grad.as<float>(), p.grad.size()));
      continue;
    }
    // Each expert is added by one rank: its holder in the first expert-parallel group.
    const std::size_t first = experts.size();
    experts.resize(first + static_cast<std::size_t>(p.num_experts), 0.0);
    if (groups.world().rank() / layer_P(config, p) != 0) continue;
    const std::int64_t L = p.grad.dim(0), size = L > 0 ? p.grad.size() / L : 0;
    for (std::int64_t e = 0; e < L; ++e) experts[first + static_cast<std::size_t>(p.expert_begin + e)] = sum_of_squares(p.grad.as<float>() + e * size, size);
  }
  if (groups.world().size() > 1) groups.world().all_reduce(std::span<double>(experts), ReduceOp::kSum, "gradient norm");
  return norm_from_parts(replicated, experts);
}

}  // namespace waybill::model
