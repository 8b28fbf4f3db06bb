// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "waybill/simulate.h"

namespace waybill {

double group_hit_probability(std::int64_t E, std::int64_t K, std::int64_t n) {
  WB_CHECK(E >= 1 && n >= 1 && E % n == 0, "E = {} is not divisible into {} equal groups", E, n);
  WB_CHECK(K >= 1 && K <= E, "K = {} is outside 1 to E = {}", K, E);
  // C(E - E/n, K) / C(E, K) as a product of K factors; 0 once the other groups hold fewer than K experts.
  const std::int64_t others = E - E / n;
  double missed = 1.0;
  for (std::int64_t i = 0; i < K; ++i) missed *= static_cast<double>(std::max<std::int64_t>(others - i, 0)) / static_cast<double>(E - i);
  return 1.0 - missed;
}

ExchangeCopies exchange_copies(std::int64_t E, std::int64_t K, int P, int num_domains) {
  WB_CHECK(P >= 1 && num_domains >= 1 && P % num_domains == 0, "P = {} ranks do not divide into {} domains", P, num_domains);
  const double ranks = P, domains = num_domains;
  const double rank_hit = group_hit_probability(E, K, P);
  ExchangeCopies copies;
  copies.no_dedup = static_cast<double>(K) * (1 - 1 / ranks);
  copies.rank_dedup = (ranks - 1) * rank_hit;
  copies.network_no_dedup = static_cast<double>(K) * (1 - 1 / domains);
  copies.network_rank_dedup = (ranks - ranks / domains) * rank_hit;
  copies.network_hierarchical = (domains - 1) * group_hit_probability(E, K, num_domains);
  copies.link_hierarchical = (ranks - domains) * rank_hit;
  return copies;
}

}  // namespace waybill
