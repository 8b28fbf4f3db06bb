// SPDX-License-Identifier: Apache-2.0
// Launches that may begin while the kernel before them on the stream ends (programmatic dependent launch, sm_90).
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <type_traits>

namespace waybill::cuda {

// Off: every launch waits for the end of the one before it, as plain launches do. For measurements; results never depend on it.
inline std::atomic<bool>& dependent_launches() {
  static std::atomic<bool> on{true};
  return on;
}

// Queues kernel(args...). overlap: the kernel calls ptx::wait_for_dependencies() in every thread that touches global memory, before it
// does so; the CTAs then start as soon as those of the kernel before it leave room (needs sm_90; captured as such in graphs). Errors
// surface at check_launch().
template <class... Params, class... Args>
void launch_kernel(void (*kernel)(Params...), unsigned grid, unsigned threads, std::size_t smem, cudaStream_t stream, bool overlap, const Args&... args) {
  static_assert((std::is_same_v<Params, Args> && ...), "the arguments are passed by address: their types must be the kernel's");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = overlap && dependent_launches().load(std::memory_order_relaxed) ? 1 : 0;
  const void* pointers[] = {static_cast<const void*>(&args)...};
  (void)cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), const_cast<void**>(pointers));
}

}  // namespace waybill::cuda
