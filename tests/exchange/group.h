// SPDX-License-Identifier: Apache-2.0
// Runs dispatch, local experts and combine on P ranks as threads and keeps what every rank saw.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "exchange/exchange_ref.h"
#include "route/random_routes.h"
#include "waybill/exchange.h"

namespace waybill::testing_support {

using Floats = std::vector<float>;

// One step's inputs of a whole group.
struct Group {
  ExpertPlacement placement;
  std::vector<Route> routes;
  std::vector<Floats> x;  // [P][T * H]
  std::int64_t H = 0;

  reference::GroupRoutes views() const {
    reference::GroupRoutes group{placement, {}};
    for (const Route& route : routes) group.routes.push_back(route.view());
    return group;
  }
  std::vector<const float*> x_pointers() const {
    std::vector<const float*> pointers;
    for (const Floats& rows : x) pointers.push_back(rows.data());
    return pointers;
  }
  ExchangeConfig config() const {
    ExchangeConfig config;
    config.H = H;
    config.E = placement.E;
    config.K = routes[0].K();
    return config;
  }
};

inline Floats integer_stamps(std::size_t count, std::uint64_t seed) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(static_cast<int>(random_u64(seed, i) % 31) - 15);
  return values;
}

inline Floats normal_values(std::size_t count, std::uint64_t seed) {
  Floats values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = random_normal(seed, i);
  return values;
}

// Random routes of every rank; T per rank.
inline Group random_group(const std::vector<std::int64_t>& T, std::int64_t K, std::int64_t E, std::int64_t H, RandomRoute options, bool integers) {
  Group group;
  group.placement = block_placement(E, static_cast<int>(T.size()));
  group.H = H;
  const std::uint64_t seed = options.seed;
  for (std::size_t p = 0; p < T.size(); ++p) {
    options.seed = seed * 1000 + p;
    group.routes.push_back(random_route(T[p], K, E, options));
    const auto count = static_cast<std::size_t>(T[p] * H);
    group.x.push_back(integers ? integer_stamps(count, options.seed + 77) : normal_values(count, options.seed + 77));
  }
  return group;
}

inline Tensor to_tensor(const Floats& values, std::int64_t rows, std::int64_t columns, DType dtype) {
  Tensor tensor(dtype, {rows, columns});
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32)
      tensor.as<float>()[i] = values[i];
    else
      tensor.as<bf16>()[i] = bf16(values[i]);
  }
  return tensor;
}

inline Floats to_floats(const TensorView& view) {
  Floats values(static_cast<std::size_t>(view.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[i] : static_cast<float>(static_cast<const bf16*>(view.data)[i]);
  }
  return values;
}

struct RankResult {
  DispatchHandle handle;
  Floats rows, z, out;
  Floats d_weights;  // slot values = the slots' weights, so this returns the routes' weights
  StatusWord status;
  ExchangeBytes bytes;
  PhaseTimes times;
};

struct RunOptions {
  DType x_dtype = DType::kF32, out_dtype = DType::kF32;
  bool weighted = false;
  ThreadPool* pool = nullptr;
  int ranks_per_node = 0;  // of the threads engine
};

// plan, dispatch, identity experts, local reduce, combine. Buffers are poisoned with NaN before they are written.
inline RankResult run_rank(Exchange& exchange, const Group& group, std::size_t p, const RunOptions& options) {
  RankResult result;
  const std::int64_t H = group.H, T = group.routes[p].T();
  const Floats poison(static_cast<std::size_t>(T * H), std::numeric_limits<float>::quiet_NaN());
  result.handle = exchange.plan(group.routes[p], &result.times);
  const ReceiveLayout& layout = result.handle.layout;
  Tensor rows;
  exchange.dispatch(result.handle, to_tensor(group.x[p], T, H, options.x_dtype), rows, &result.times);
  Tensor y(options.x_dtype, {layout.S_padded(), H}), z(DType::kF32, {layout.R(), H});
  permute(layout, rows, y, Stream::cpu(options.pool));
  unpermute_reduce(layout, y, options.weighted, z, Stream::cpu(options.pool));
  Tensor out = to_tensor(poison, T, H, options.out_dtype);
  exchange.combine(result.handle, z, out, &result.times);
  result.d_weights.assign(static_cast<std::size_t>(T * group.routes[p].K()), -1.0f);
  exchange.return_slot_values(result.handle, layout.slot_weight.data(), result.d_weights.data(), &result.times);
  result.rows = to_floats(rows);
  result.z = to_floats(z);
  result.out = to_floats(out);
  result.status = exchange.status();
  result.bytes = exchange.bytes();
  return result;
}

inline std::vector<RankResult> run_group(const Group& group, const ExchangeConfig& config, const RunOptions& options = {}) {
  std::vector<RankResult> results(group.routes.size());
  run_ranks(
      group.placement.P,
      [&](Fabric& fabric) {
        const auto p = static_cast<std::size_t>(fabric.rank());
        Exchange exchange(config, group.placement, fabric, options.pool);
        results[p] = run_rank(exchange, group, p, options);
      },
      FabricOptions{.ranks_per_node = options.ranks_per_node});
  return results;
}

inline bool same_bits(const Floats& a, const Floats& b) { return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0); }

inline std::int64_t valid_slots(const RouteView& route, std::int64_t t) {
  std::int64_t valid = 0;
  for (std::int64_t k = 0; k < route.K; ++k) valid += is_route(route.id(t, k), route.E) ? 1 : 0;
  return valid;
}

// Identity experts with unit weights: every token comes back times the number of its valid slots, to the bit.
inline void expect_factor(const Group& group, std::size_t p, const Floats& out) {
  const RouteView& route = group.routes[p].view();
  ASSERT_EQ(out.size(), static_cast<std::size_t>(route.T * group.H));
  for (std::int64_t t = 0; t < route.T; ++t) {
    const auto factor = static_cast<float>(valid_slots(route, t));
    for (std::int64_t h = 0; h < group.H; ++h) {
      const auto i = static_cast<std::size_t>(t * group.H + h);
      const float expected = factor == 0 ? 0.0f : factor * group.x[p][i];
      ASSERT_EQ(out[i], expected) << "rank " << p << ", token " << t << ", column " << h;
    }
  }
}

// Text of the error that every rank must end with; ranks that did not fail give "".
inline std::vector<std::string> errors_of_ranks(int P, const std::function<void(Fabric&)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(P));
  run_ranks(P, [&](Fabric& fabric) {
    try {
      body(fabric);
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(fabric.rank())] = error.what();
    }
  });
  return texts;
}

}  // namespace waybill::testing_support
