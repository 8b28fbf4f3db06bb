// SPDX-License-Identifier: Apache-2.0
// The control beside the library's wgrad: the same kernel, but the slices of a group do not meet in a tree. Each adds its tile to D by reductions of the copy
// engine as it comes, so that sums depend on the order of arrival and D must be f32 and cleared, or hold what is added to. Benchmarks only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace waybill::cuda {

// d [groups, m, n] f32 += sum over a group's rows s of a[s, :] b[s, :]. a [rows, m], b [rows, n] bf16, contiguous device memory aligned to 16 bytes, m and n
// multiples of 8; offsets [groups + 1] i32. A group of 1.5 blocks_per_slice (8 or more) or more blocks of 64 rows is cut into slices; 0: none is.
struct UnorderedWgrad {
  const void *a, *b;
  const std::int32_t* offsets;
  std::int64_t groups, rows, m, n;
  float* d;
  int blocks_per_slice;
};
// Queues the product; nothing waits. The first call on a stream must not be inside a capture. The caller has checked blocks_per_slice.
void launch_unordered_wgrad(const UnorderedWgrad& wgrad, int device, cudaStream_t stream);

// d bf16 = sums, count values (a multiple of 4), rounded to nearest.
void launch_round_wgrad(const float* sums, void* d, std::int64_t count, cudaStream_t stream);

}  // namespace waybill::cuda
