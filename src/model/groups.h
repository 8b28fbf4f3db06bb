// SPDX-License-Identifier: Apache-2.0
// The rank groups of a model and the sums over them.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "model/parameters.h"

namespace waybill::model {

// World W = P x D for every P that a layer uses: ranks with equal rank / P exchange tokens, ranks with equal rank % P hold the same
// experts.
class Groups {
 public:
  Groups(const ModelConfig& config, Fabric& world);  // collective

  Fabric& world() const { return world_; }
  Fabric& expert_parallel(int P) const { return *by_P_.at(P).expert_parallel; }
  Fabric& replicas(int P) const { return *by_P_.at(P).replicas; }

 private:
  struct Pair {
    std::unique_ptr<Fabric> expert_parallel, replicas;
  };
  Fabric& world_;
  std::map<int, Pair> by_P_;
};

// Sums gradients: replicated parameters over the world, experts over their D replicas only. Small tensors share a bucket. Sums
// are in rank order, so every holder of a parameter gets the same bits. Collective, one order on every rank.
void reduce_gradients(const ModelConfig& config, ParameterList& list, const Groups& groups);

// The L2 norm of all gradients, each parameter once over the world. Per-expert squares are gathered in global expert order, so the
// value does not depend on P or D for equal gradients. Collective.
double gradient_norm(const ModelConfig& config, const ParameterList& list, const Groups& groups);

}  // namespace waybill::model
