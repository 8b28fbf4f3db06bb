// SPDX-License-Identifier: Apache-2.0
// The order in which a forced-balance router and the balanced workload visit experts. Route number i goes to expert(i): the mixed-radix
// digits of i mod E, with the prime factors of E as radices in ascending order, read in reverse. For a power of two that is the
// reversal of the bits. Any E consecutive routes visit every expert once, and any P consecutive ones every rank once where P is a
// product of the first factors (every power of two that divides E), so that few tokens already cover all ranks.
// Worked example: E = 8, i = 0..7 -> 0 4 2 6 1 5 3 7.  E = 6 = 2 * 3, i = 0..5 -> 0 3 1 4 2 5.
#pragma once

#include <cstdint>

#include "waybill/export.h"

namespace waybill {

// Plain data: build on the host, pass to kernels by value.
struct BalancedOrder {
  std::int64_t E = 1;
  std::int32_t num_digits = 0;
  std::int32_t radix[32] = {};

  explicit BalancedOrder(std::int64_t num_experts) : E(num_experts) {
    std::int64_t rest = num_experts;
    for (std::int64_t p = 2; rest > 1; ++p) {
      if (p * p > rest) p = rest;
      for (; rest % p == 0; rest /= p) radix[num_digits++] = static_cast<std::int32_t>(p);
    }
  }

  WB_HD std::int32_t expert(std::int64_t i) const {
    std::int64_t rest = i % E;
    std::int64_t result = 0;
    for (std::int32_t d = 0; d < num_digits; ++d) {
      result = result * radix[d] + rest % radix[d];
      rest /= radix[d];
    }
    return static_cast<std::int32_t>(result);
  }
};

}  // namespace waybill
