// SPDX-License-Identifier: Apache-2.0
// Rows from their slots in no fixed order: sums [R, H] f32 += y [S, H] bf16 by atomics of four floats, then z = bf16(sums). sums must be zeroed before.
// Grid: 2 CTAs an SM. Bytes: S rows of bf16 read, S of f32 added in L2, R of f32 read, R of bf16 written.
#include "bench/negative/cuda/older_designs.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512, kCtas = 264;

__global__ void __launch_bounds__(kThreads, 2)
    atomic_rows(const std::int32_t* slot_row, const std::int32_t* num_slots, int H, const __nv_bfloat16* y, float* sums) {
  using Row = Vector<__nv_bfloat16>;
  const int lane = static_cast<int>(threadIdx.x) & 31, warps = static_cast<int>(gridDim.x) * kThreads / 32;
  for (int s = static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 32); s < *num_slots; s += warps) {
    const int row = slot_row[s];
    if (row < 0) continue;  // padding of an expert
    for (int h = lane * 8; h < H; h += 256) {
      float v[8];
      Row::to_float(load_row(reinterpret_cast<const unsigned char*>(y + static_cast<std::int64_t>(s) * H + h)), v);
      float* to = sums + static_cast<std::int64_t>(row) * H + h;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      atomicAdd(reinterpret_cast<float4*>(to), make_float4(v[0], v[1], v[2], v[3]));
      atomicAdd(reinterpret_cast<float4*>(to) + 1, make_float4(v[4], v[5], v[6], v[7]));
#else
      for (int i = 0; i < 8; ++i) atomicAdd(to + i, v[i]);
#endif
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2) round_sums(const float4* sums, std::int64_t count, uint2* z) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    const float4 v = sums[i];
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
    z[i] = make_uint2(reinterpret_cast<const unsigned&>(low), reinterpret_cast<const unsigned&>(high));
  }
}

}  // namespace

void launch_atomic_combine(const AtomicCombine& c, cudaStream_t stream) {
  const std::int64_t values = static_cast<std::int64_t>(c.R) * c.H;
  (void)cudaMemsetAsync(c.sums, 0, static_cast<std::size_t>(values) * 4, stream);
  atomic_rows<<<kCtas, kThreads, 0, stream>>>(c.slot_row, c.num_slots, c.H, static_cast<const __nv_bfloat16*>(c.y), c.sums);
  round_sums<<<kCtas, kThreads, 0, stream>>>(reinterpret_cast<const float4*>(c.sums), values / 4, static_cast<uint2*>(c.z));
}

}  // namespace waybill::cuda
