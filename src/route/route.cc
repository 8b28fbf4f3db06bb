// SPDX-License-Identifier: Apache-2.0
// Route storage and the rules a route must keep.
#include "waybill/route.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace waybill {
namespace {

void check_shape(std::int64_t T, std::int64_t K, std::int64_t E, DType id_dtype) {
  constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
  WB_CHECK(T >= 0 && T <= kMaxInt32, "a route needs 0 <= T <= {}, got T = {}", kMaxInt32, T);
  WB_CHECK(K >= 1 && K <= kMaxInt32, "a route needs 1 <= K <= {}, got K = {}", kMaxInt32, K);
  WB_CHECK(E >= 1 && E <= kMaxInt32, "a route needs 1 <= E <= {}, got E = {}", kMaxInt32, E);
  WB_CHECK(id_dtype == DType::kI16 || id_dtype == DType::kI32, "route ids are i16 or i32, got {}", to_string(id_dtype));
  WB_CHECK(id_dtype == DType::kI32 || E <= kMaxExpertsInt16, "int16 routes hold at most {} experts, got E = {}: use int32 ids", kMaxExpertsInt16, E);
}

void check_host(const RouteView& route) {
  check_shape(route.T, route.K, route.E, route.id_dtype);
  WB_CHECK(route.device.type == DeviceType::kCpu, "the route must be in host memory, it is on {}", to_string(route.device));
  WB_CHECK(route.T == 0 || (route.ids != nullptr && route.weights != nullptr), "a route of T = {} tokens needs ids and weights, got a null pointer", route.T);
}

void count_ids(const RouteView& route, std::int32_t* counts) {
  std::fill(counts, counts + route.E, 0);
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      if (is_route(id, route.E)) ++counts[id];
    }
  }
}

}  // namespace

Route::Route(std::int64_t T, std::int64_t K, std::int64_t E) : Route(T, K, E, route_id_dtype(E)) {}

Route::Route(std::int64_t T, std::int64_t K, std::int64_t E, DType id_dtype) {
  check_shape(T, K, E, id_dtype);
  ids_ = Tensor(id_dtype, {T, K});
  if (ids_.size() > 0) std::memset(ids_.view().data, 0xff, static_cast<std::size_t>(ids_.size()) * size_bytes(id_dtype));
  weights_ = Tensor::zeros(DType::kF32, {T, K});
  counts_ = Tensor::zeros(DType::kI32, {E});
  view_ = RouteView{T, K, E, id_dtype, ids_.view().data, weights_.as<float>(), counts_.as<std::int32_t>(), Device{}};
}

Route Route::from_ids(std::int64_t T, std::int64_t K, std::int64_t E, std::span<const std::int32_t> ids, std::span<const float> weights) {
  Route route(T, K, E);
  WB_CHECK(static_cast<std::int64_t>(ids.size()) == T * K, "expected T * K = {} ids, got {}", T * K, ids.size());
  WB_CHECK(weights.empty() || weights.size() == ids.size(), "expected T * K = {} weights, got {}", T * K, weights.size());
  const RouteView& view = route.view_;
  for (std::int64_t i = 0; i < T * K; ++i) {
    const std::int32_t id = ids[static_cast<std::size_t>(i)];
    // Before it is narrowed: 65536 as an int16 would look valid.
    WB_CHECK(!is_bad_id(id, E), "route row {}, slot {}: id {} is outside [-1, {})", i / K, i % K, id, E);
    view.set_id(i / K, i % K, id);
    view.weights[i] = weights.empty() ? (id >= 0 ? 1.0f : 0.0f) : weights[static_cast<std::size_t>(i)];
  }
  route.recount();
  validate(view);
  return route;
}

Route Route::copy_of(const RouteView& source) {
  check_host(source);
  Route route(source.T, source.K, source.E, source.id_dtype);
  const auto slots = static_cast<std::size_t>(source.T * source.K);
  if (slots > 0) {
    std::memcpy(route.view_.ids, source.ids, slots * size_bytes(source.id_dtype));
    std::memcpy(route.view_.weights, source.weights, slots * sizeof(float));
  }
  if (source.counts != nullptr)
    std::copy(source.counts, source.counts + source.E, route.view_.counts);
  else
    route.recount();
  return route;
}

void Route::recount() {
  if (view_.counts != nullptr) count_ids(view_, view_.counts);
}

void validate(const RouteView& route, const RouteCheck& check) {
  check_host(route);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(route.E), 0);
  std::vector<std::int32_t> last_row(static_cast<std::size_t>(route.E), -1);  // row that named the expert last
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      const float weight = route.weights[t * route.K + k];
      WB_CHECK(!is_bad_id(id, route.E) || check.allow_out_of_range, "route row {}, slot {}: id {} is outside [-1, {})", t, k, id, route.E);
      WB_CHECK(std::isfinite(weight), "route row {}, slot {}: weight {} of expert {} is not finite", t, k, weight, id);
      if (!is_route(id, route.E)) {
        WB_CHECK(id != -1 || weight == 0.0f, "route row {}, slot {}: id -1 must have weight 0, got {}", t, k, weight);
        continue;
      }
      const auto expert = static_cast<std::size_t>(id);
      WB_CHECK(last_row[expert] != t || check.allow_duplicates, "route row {}, slot {}: expert {} is named twice in the row", t, k, id);
      last_row[expert] = static_cast<std::int32_t>(t);
      ++counts[expert];
    }
  }
  if (route.counts == nullptr) return;
  for (std::int64_t e = 0; e < route.E; ++e) {
    const std::int32_t expected = counts[static_cast<std::size_t>(e)];
    WB_CHECK(route.counts[e] == expected, "route counts[{}] = {}, but the ids name expert {} {} times", e, route.counts[e], e, expected);
  }
}

ExpertPlacement block_placement(std::int64_t E, int P) {
  WB_CHECK(E >= 1, "E must be at least 1, got E = {}", E);
  WB_CHECK(P >= 1, "P must be at least 1, got P = {}", P);
  WB_CHECK(E % P == 0, "E = {} experts cannot be spread evenly over P = {} ranks: E must be divisible by P", E, P);
  ExpertPlacement placement;
  placement.E = E;
  placement.P = P;
  return placement;
}

void validate(const ExpertPlacement& placement) {
  block_placement(placement.E, placement.P);
  const bool has_ranks = placement.rank_table != nullptr;
  WB_CHECK(has_ranks == (placement.local_table != nullptr), "a placement needs both tables or none, got only the {} table", has_ranks ? "rank" : "local");
  if (!has_ranks) return;
  std::vector<std::int32_t> holder(static_cast<std::size_t>(placement.E), -1);  // expert at (rank, local id)
  for (std::int64_t e = 0; e < placement.E; ++e) {
    const std::int64_t rank = placement.rank_table[e], local = placement.local_table[e];
    WB_CHECK(rank >= 0 && rank < placement.P, "placement: expert {} is on rank {}, outside [0, {})", e, rank, placement.P);
    WB_CHECK(local >= 0 && local < placement.L(), "placement: expert {} has local id {}, outside [0, {})", e, local, placement.L());
    std::int32_t& place = holder[static_cast<std::size_t>(rank * placement.L() + local)];
    WB_CHECK(place < 0, "placement: experts {} and {} both have local id {} of rank {}", place, e, local, rank);
    place = static_cast<std::int32_t>(e);
  }
}

}  // namespace waybill
