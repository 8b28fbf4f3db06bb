// SPDX-License-Identifier: Apache-2.0
#include "moe/dense_path.h"

#include <algorithm>
#include <span>
#include <utility>

#include "moe/capacity.h"

namespace waybill::moe {
namespace {

template <class T>
Fabric::Span span_of(T* data, std::int64_t count) {
  return {const_cast<std::remove_const_t<T>*>(data), static_cast<std::size_t>(count) * sizeof(T)};
}

// Every rank's `mine` [count[rank], width] behind one another in rank order: [sum(count), width].
template <class T>
std::vector<T> gather_rows(Fabric& ep, const T* mine, const std::vector<std::int64_t>& row_offsets, std::int64_t width, const char* phase) {
  const int P = ep.size();
  const auto me = static_cast<std::size_t>(ep.rank());
  std::vector<T> all(static_cast<std::size_t>(row_offsets.back() * width));
  std::vector<Fabric::Span> send(static_cast<std::size_t>(P)), receive(static_cast<std::size_t>(P));
  for (std::size_t p = 0; p < send.size(); ++p) {
    send[p] = span_of(mine, (row_offsets[me + 1] - row_offsets[me]) * width);
    receive[p] = span_of(all.data() + row_offsets[p] * width, (row_offsets[p + 1] - row_offsets[p]) * width);
  }
  ep.all_to_all(send, receive, phase);
  return all;
}

// The reverse: values [sum(count), width] go back to the rows' ranks; result [P, T, width] by the rank they come from.
std::vector<float> scatter_rows(Fabric& ep, const float* values, const std::vector<std::int64_t>& row_offsets, std::int64_t width, const char* phase) {
  const auto me = static_cast<std::size_t>(ep.rank());
  const std::int64_t mine = (row_offsets[me + 1] - row_offsets[me]) * width;
  std::vector<float> parts(static_cast<std::size_t>(mine) * static_cast<std::size_t>(ep.size()));
  std::vector<Fabric::Span> send(static_cast<std::size_t>(ep.size())), receive(send.size());
  for (std::size_t p = 0; p < send.size(); ++p) {
    send[p] = span_of(values + row_offsets[p] * width, (row_offsets[p + 1] - row_offsets[p]) * width);
    receive[p] = span_of(parts.data() + static_cast<std::int64_t>(p) * mine, mine);
  }
  ep.all_to_all(send, receive, phase);
  return parts;
}

// Global ids of this rank's experts in local order.
std::vector<std::int32_t> local_experts(const ExpertPlacement& placement, int rank) {
  std::vector<std::int32_t> experts(static_cast<std::size_t>(placement.L()));
  for (std::int64_t e = 0; e < placement.E; ++e) {
    if (placement.rank_of(e) == rank) experts[static_cast<std::size_t>(placement.local_of(e))] = static_cast<std::int32_t>(e);
  }
  return experts;
}

std::vector<std::int64_t> gather_offsets(Fabric& ep, std::int64_t T) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(ep.size()));
  ep.all_gather(&T, counts.data(), sizeof(T), "dense counts");
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

}  // namespace

RowHandle DensePath::plan(const RouteView& route, std::int64_t pad_capacity, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kPlan);
  const std::int64_t T = route.T, K = route.K, E = placement_.E;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(T * K));
  std::vector<std::uint8_t> map(static_cast<std::size_t>(T * E), 0);
  std::vector<float> probabilities(static_cast<std::size_t>(T * E), 0.0f);
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int32_t id = ids[static_cast<std::size_t>(i)] = route.id(i / K, i % K);
    if (!is_route(id, E)) continue;
    const auto at = static_cast<std::size_t>(i / K * E + id);
    map[at] = 1;
    probabilities[at] += route.weights[i];
  }
  RowHandle handle = exchange_map(T, map.data(), probabilities.data(), pad_capacity);
  handle.exchange.plan.K = K;
  handle.ids = std::move(ids);
  return handle;
}

RowHandle DensePath::plan_map(const TensorView& dense_map, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kPlan);
  const float* probabilities = dense_map.as<float>();
  std::vector<std::uint8_t> map(static_cast<std::size_t>(dense_map.size()));
  for (std::size_t i = 0; i < map.size(); ++i) map[i] = probabilities[i] != 0.0f ? 1 : 0;
  return exchange_map(dense_map.shape[0], map.data(), probabilities, -1);
}

// The collective part: the whole map goes to every rank, and each builds its layout from its experts' columns.
RowHandle DensePath::exchange_map(std::int64_t T, const std::uint8_t* map, const float* probabilities, std::int64_t pad_capacity) {
  const std::int64_t E = placement_.E;
  RowHandle handle;
  handle.exchange.plan.T = T;
  handle.exchange.plan.P = ep_.size();
  std::vector<std::int64_t> row_offsets = gather_offsets(ep_, T);
  const std::vector<std::uint8_t> all_map = gather_rows(ep_, map, row_offsets, E, "dense map");
  const std::vector<float> all_probabilities = gather_rows(ep_, probabilities, row_offsets, E, "dense probabilities");
  const std::int64_t peers = ep_.size() - 1;
  bytes_.ids += peers * T * E;
  bytes_.weights += peers * T * E * 4;
  bytes_.counts += peers * 8;

  const std::vector<std::int32_t> experts = local_experts(placement_, ep_.rank());
  std::vector<std::int64_t> row_slot_offsets{0};
  std::vector<std::int32_t> slot_expert;
  std::vector<float> slot_weight;
  for (std::int64_t r = 0; r < row_offsets.back(); ++r) {
    for (std::size_t l = 0; l < experts.size(); ++l) {
      const auto at = static_cast<std::size_t>(r * E + experts[l]);
      if (all_map[at] == 0) continue;
      slot_expert.push_back(static_cast<std::int32_t>(l));
      slot_weight.push_back(all_probabilities[at]);
    }
    row_slot_offsets.push_back(static_cast<std::int64_t>(slot_expert.size()));
  }
  handle.exchange.layout =
      make_receive_layout(ep_.size(), placement_.L(), std::move(row_offsets), std::move(row_slot_offsets), slot_expert.data(), slot_weight.data(), alignment_);
  if (pad_capacity >= 0) {
    ep_.all_reduce(std::span<std::int64_t>(&pad_capacity, 1), ReduceOp::kSum, "dense capacity");
    pad_to_capacity(handle.exchange.layout, pad_capacity);
  }
  return handle;
}

void DensePath::dispatch(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kDispatch);
  const std::int64_t width = x.shape[1];
  const std::vector<float> all = gather_rows(ep_, x.as<float>(), handle.layout().row_offsets, width, "dense dispatch");
  rows.resize(DType::kF32, {handle.layout().R(), width});
  std::copy(all.begin(), all.end(), rows.as<float>());
  bytes_.rows += (ep_.size() - 1) * x.shape[0];
  bytes_.payload += (ep_.size() - 1) * x.shape[0] * width * 4;
}

void DensePath::combine(const RowHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t T = out.shape[0], width = out.shape[1];
  const std::vector<float> parts = scatter_rows(ep_, z.as<float>(), handle.layout().row_offsets, width, "dense combine");
  float* sums = out.as<float>();
  for (std::int64_t i = 0; i < T * width; ++i) {
    float sum = 0.0f;
    for (std::int64_t p = 0; p < ep_.size(); ++p) sum += parts[static_cast<std::size_t>(p * T * width + i)];
    sums[i] = sum;
  }
  bytes_.combined += (handle.layout().R() - T) * width * 4;
}

void DensePath::return_slot_values(const RowHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t T = handle.exchange.plan.T, K = handle.exchange.plan.K, L = placement_.L();
  const std::vector<float> parts = return_columns(handle, slot_values);
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int32_t id = handle.ids[static_cast<std::size_t>(i)];
    const bool valid = is_route(id, placement_.E);
    d_weights[i] = valid ? parts[static_cast<std::size_t>((placement_.rank_of(id) * T + i / K) * L + placement_.local_of(id))] : 0.0f;
  }
}

void DensePath::return_map_values(const RowHandle& handle, const float* slot_values, const TensorView& d_map, PhaseTimes* times) {
  const PhaseScope scope(times, Phase::kCombine);
  const std::int64_t T = handle.exchange.plan.T, E = placement_.E, L = placement_.L();
  const std::vector<float> parts = return_columns(handle, slot_values);
  float* out = d_map.as<float>();
  for (std::int64_t i = 0; i < T * E; ++i) {
    const std::int64_t e = i % E;
    out[i] = parts[static_cast<std::size_t>((placement_.rank_of(e) * T + i / E) * L + placement_.local_of(e))];
  }
}

// Slot values as [P, T, L]: what each rank's local experts say about this rank's tokens; 0 where there is no slot.
std::vector<float> DensePath::return_columns(const RowHandle& handle, const float* slot_values) {
  const ReceiveLayout& layout = handle.layout();
  const std::int64_t L = placement_.L();
  std::vector<float> columns(static_cast<std::size_t>(layout.R() * L), 0.0f);
  for (std::int64_t l = 0; l < L; ++l) {
    const auto expert = static_cast<std::size_t>(l);
    for (std::int32_t s = layout.expert_offsets[expert]; s < layout.expert_offsets[expert] + layout.expert_counts[expert]; ++s) {
      columns[static_cast<std::size_t>(layout.slot_row[static_cast<std::size_t>(s)] * L + l)] = slot_values[s];
    }
  }
  bytes_.weights += (layout.R() - handle.exchange.plan.T) * L * 4;
  return scatter_rows(ep_, columns.data(), layout.row_offsets, L, "dense weight gradients");
}

}  // namespace waybill::moe
