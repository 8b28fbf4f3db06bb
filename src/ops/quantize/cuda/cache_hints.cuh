// SPDX-License-Identifier: Apache-2.0
// Copies and stores of what is used once, marked so that they leave the L2 first.
#pragma once

#include <cstdint>

namespace waybill::cuda {

__device__ __forceinline__ std::uint64_t leave_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// ptx::copy_async_16() under a policy.
__device__ __forceinline__ void copy_async_16_under(std::uint32_t smem, const void* gmem, bool is_there, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem), "l"(gmem), "r"(is_there ? 16 : 0), "l"(policy) : "memory");
}

template <bool kStreams, class Vector>
__device__ __forceinline__ void store_once(Vector* to, const Vector& value) {
  if constexpr (kStreams) {
    __stcs(to, value);
  } else {
    *to = value;
  }
}

}  // namespace waybill::cuda
