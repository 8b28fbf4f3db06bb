// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: value i of stream `key` is a pure function, so it does not depend on ranks, threads or order.
#pragma once

#include <cmath>
#include <cstdint>

#include "waybill/export.h"

namespace waybill {

// SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers with good avalanche.
WB_HD inline std::uint64_t mix64(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

WB_HD inline std::uint64_t random_u64(std::uint64_t key, std::uint64_t counter) { return mix64(mix64(key) ^ mix64(counter * 0xd1342543de82ef95ull + 1)); }

// Uniform in [0, 1), 24 random bits.
WB_HD inline float random_uniform(std::uint64_t key, std::uint64_t counter) {
  return static_cast<float>(random_u64(key, counter) >> 40) * (1.0f / 16777216.0f);
}

// Standard normal by Box-Muller, in double so that libm differences vanish in the float.
inline float random_normal(std::uint64_t key, std::uint64_t counter) {
  const std::uint64_t u = random_u64(key, counter);
  const double a = (static_cast<double>(u >> 40) + 1.0) / 16777217.0;
  const double b = static_cast<double>(u & 0xffffffffull) / 4294967296.0;
  return static_cast<float>(std::sqrt(-2.0 * std::log(a)) * std::cos(6.283185307179586 * b));
}

}  // namespace waybill
