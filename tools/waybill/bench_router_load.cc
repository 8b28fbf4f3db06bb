// SPDX-License-Identifier: Apache-2.0
#include "bench_router_load.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "bench_loads.h"
#include "waybill/error.h"

namespace waybill::cli {
namespace {

// The valid ids of a row, in order.
std::vector<std::int32_t> ids_of(const RouteView& route, std::int64_t t) {
  std::vector<std::int32_t> ids;
  for (std::int64_t k = 0; k < route.K; ++k) {
    if (is_route(route.id(t, k), route.E)) ids.push_back(route.id(t, k));
  }
  return ids;
}

// Least distance of two chosen logits above `value`: two units in the last place of the type, so that they differ after rounding even where a
// power of two lies between, and enough for two scores to differ in fp32 (a sigmoid is flat far from 0).
float gap_at(float value, DType dtype) {
  const float units = dtype == DType::kBF16 ? 0x1p-6f : dtype == DType::kF16 ? 0x1p-9f : 0.0f;
  return std::max(1e-3f, units * std::abs(value));
}

// One row of logits whose values change places.
class Row {
 public:
  explicit Row(std::span<float> values) : values_(values), order_(values.size()), is_chosen_(values.size()) {}

  // The largest values, as many as there are experts, to these experts; every value that need not move stays.
  void raise(const std::vector<std::int32_t>& experts) {
    std::iota(order_.begin(), order_.end(), 0);
    const auto middle = order_.begin() + static_cast<std::ptrdiff_t>(experts.size());
    std::nth_element(order_.begin(), middle, order_.end(), [&](std::int32_t a, std::int32_t b) { return at(a) != at(b) ? at(a) > at(b) : a < b; });
    std::sort(order_.begin(), middle);
    choose(experts);
    auto from = order_.begin();
    for (const std::int32_t expert : experts) {
      if (std::binary_search(order_.begin(), middle, expert)) continue;  // has one of the largest already
      while (is_chosen_[static_cast<std::size_t>(*from)] != 0) ++from;
      std::swap(at(expert), at(*from++));
    }
  }
  // The experts' values descend in their order and stay above all others.
  void sort(const std::vector<std::int32_t>& experts, DType dtype) {
    std::vector<float> chosen;
    chosen.reserve(experts.size());
    for (const std::int32_t expert : experts) chosen.push_back(at(expert));
    std::sort(chosen.begin(), chosen.end(), std::greater<>());
    choose(experts);
    float below = -std::numeric_limits<float>::infinity();
    for (std::size_t e = 0; e < values_.size(); ++e) below = is_chosen_[e] != 0 ? below : std::max(below, values_[e]);
    for (std::size_t k = experts.size(); k-- > 0;) {
      if (std::isfinite(below)) chosen[k] = std::max(chosen[k], below + gap_at(below, dtype));
      below = at(experts[k]) = chosen[k];
    }
  }
  // As if the other experts did not exist.
  void keep_only(const std::vector<std::int32_t>& experts) {
    choose(experts);
    for (std::size_t e = 0; e < values_.size(); ++e) values_[e] = is_chosen_[e] != 0 ? values_[e] : -std::numeric_limits<float>::infinity();
  }

 private:
  float& at(std::int32_t expert) { return values_[static_cast<std::size_t>(expert)]; }
  void choose(const std::vector<std::int32_t>& experts) {
    std::fill(is_chosen_.begin(), is_chosen_.end(), 0);
    for (const std::int32_t expert : experts) is_chosen_[static_cast<std::size_t>(expert)] = 1;
  }

  std::span<float> values_;
  std::vector<std::int32_t> order_;
  std::vector<std::uint8_t> is_chosen_;
};

std::vector<std::int64_t> groups_of(const std::vector<std::int32_t>& experts, std::int64_t group_size) {
  std::vector<std::int64_t> groups;
  groups.reserve(experts.size());
  for (const std::int32_t expert : experts) groups.push_back(expert / group_size);
  std::sort(groups.begin(), groups.end());
  groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
  return groups;
}

}  // namespace

Route router_load(const BenchOptions& options, const BenchShape& shape) {
  if (options.load == kRandomLoad) return {};
  BenchShape one_rank = shape;
  one_rank.P = 1;
  return std::move(make_load(options, one_rank).front());
}

void give_routes(const RouterConfig& config, const RouteView& wanted, DType dtype, std::span<float> logits, const std::string& load, const std::string& shape) {
  const std::int64_t E = wanted.E, group_size = E / config.num_groups;
  for (std::int64_t t = 0; t < wanted.T; ++t) {
    Row row(logits.subspan(static_cast<std::size_t>(t * E), static_cast<std::size_t>(E)));
    const std::vector<std::int32_t> experts = ids_of(wanted, t);
    if (config.num_groups > 1) {
      const std::vector<std::int64_t> groups = groups_of(experts, group_size);
      WB_CHECK(static_cast<std::int64_t>(groups.size()) <= config.num_kept_groups,
               "--load {}: the experts of token {} are in {} groups, the router of shape {} keeps {} of {}, so it cannot give this load; -E {} routes without "
               "groups",
               load, t, groups.size(), shape, config.num_kept_groups, config.num_groups, E);
      std::vector<std::int32_t> members;
      for (const std::int64_t group : groups) {
        for (std::int64_t i = 0; i < group_size; ++i) members.push_back(static_cast<std::int32_t>(group * group_size + i));
      }
      row.raise(members);
    }
    row.raise(experts);
    row.sort(experts, dtype);
    if (static_cast<std::int64_t>(experts.size()) < wanted.K) row.keep_only(experts);
  }
}

void expect_routes(const RouteView& seen, const RouteView& wanted, const std::string& load) {
  WB_CHECK(seen.T == wanted.T && seen.K == wanted.K && seen.E == wanted.E, "--load {}: routes [{}, {}] over {} experts where [{}, {}] over {} were wanted",
           load, seen.T, seen.K, seen.E, wanted.T, wanted.K, wanted.E);
  for (std::int64_t t = 0; t < wanted.T; ++t) {
    std::vector<std::int32_t> ids = ids_of(wanted, t);
    ids.resize(static_cast<std::size_t>(wanted.K), -1);
    for (std::int64_t k = 0; k < wanted.K; ++k) {
      WB_CHECK(seen.id(t, k) == ids[static_cast<std::size_t>(k)], "--load {}: token {}, slot {}: the router chose expert {} where the load has {}", load, t, k,
               seen.id(t, k), ids[static_cast<std::size_t>(k)]);
    }
  }
}

}  // namespace waybill::cli
