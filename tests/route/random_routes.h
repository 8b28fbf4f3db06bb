// SPDX-License-Identifier: Apache-2.0
// Random routes from a seed, for route and exchange tests.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "waybill/random.h"
#include "waybill/route.h"

namespace waybill::testing_support {

struct RandomRoute {
  std::uint64_t seed = 1;
  double drop = 0;                                 // share of slots that become -1
  std::int64_t first_expert = 0, num_experts = 0;  // ids from [first, first + num); 0 = all
  bool unit_weights = false;
};

inline Route random_route(std::int64_t T, std::int64_t K, std::int64_t E, const RandomRoute& options) {
  const std::int64_t pool = options.num_experts > 0 ? options.num_experts : E;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(T * K), -1);
  std::vector<float> weights(ids.size(), 0.0f);
  std::vector<std::int32_t> deck(static_cast<std::size_t>(pool));
  std::uint64_t counter = 0;
  const auto next = [&] { return random_u64(options.seed, counter++); };
  for (std::int64_t t = 0; t < T; ++t) {
    std::iota(deck.begin(), deck.end(), static_cast<std::int32_t>(options.first_expert));
    for (std::int64_t k = 0; k < std::min(K, pool); ++k) {
      const auto pick = static_cast<std::size_t>(k) + next() % static_cast<std::uint64_t>(pool - k);
      std::swap(deck[static_cast<std::size_t>(k)], deck[pick]);
      const bool dropped = static_cast<double>(next() >> 11) * 0x1p-53 < options.drop;
      const float weight = options.unit_weights ? 1.0f : 0.05f + static_cast<float>(next() >> 40) * (1.0f / 16777216.0f);
      if (dropped) continue;
      ids[static_cast<std::size_t>(t * K + k)] = deck[static_cast<std::size_t>(k)];
      weights[static_cast<std::size_t>(t * K + k)] = weight;
    }
  }
  return Route::from_ids(T, K, E, ids, weights);
}

}  // namespace waybill::testing_support
