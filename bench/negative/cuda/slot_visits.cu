// SPDX-License-Identifier: Apache-2.0
// Permute and its counterpart where a row's slots stand in a dense map [R, L]: every entry looked at one by one, groups of 32 without a slot left
// out, or set bits of a ballot.
#include "bench/negative/cuda/older_designs.h"
#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 512, kVectors = 2, kPiece = kVectors * 512;

__global__ void __launch_bounds__(kThreads) fill_map(const std::int32_t* offsets, const std::int32_t* slot_row, int L, std::int32_t* map) {
  const int e = static_cast<int>(blockIdx.x);
  for (int s = offsets[e] + static_cast<int>(threadIdx.x); s < offsets[e + 1]; s += kThreads) map[static_cast<std::int64_t>(slot_row[s]) * L + e] = s;
}

// visit(position) for the slots of a row in expert order; all lanes.
template <SlotVisit kVisit, class Visit>
__device__ __forceinline__ void for_slots(const std::int32_t* row, int L, const Visit& visit) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int base = 0; base < L; base += 32) {
    const int position = base + lane < L ? row[base + lane] : -1;
    unsigned bits = 0;
    if constexpr (kVisit != SlotVisit::kEvery) {
      bits = __ballot_sync(ptx::kFullWarp, position >= 0);
      if (bits == 0) continue;
    }
    if constexpr (kVisit == SlotVisit::kSetBits) {
      for (; bits != 0; bits &= bits - 1) visit(__shfl_sync(ptx::kFullWarp, position, __ffs(static_cast<int>(bits)) - 1));
    } else {
      for (int j = 0; j < 32; ++j) {
        const int at = __shfl_sync(ptx::kFullWarp, position, j);
        if (at >= 0) visit(at);
      }
    }
  }
}

template <SlotVisit kVisit>
__global__ void __launch_bounds__(kThreads, 2) map_permute(const std::int32_t* map, int R, int L, const unsigned char* rows, unsigned char* y, int row_bytes) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const RowItems items(R, (row_bytes + kPiece - 1) / kPiece);
  for (int item = items.first; item < items.count; item += items.step) {
    const std::int64_t row = items.row(item);
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      const int at = piece * kPiece + lane * 16;
      uint4 v[kVectors] = {};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * 512 < row_bytes) v[i] = load_row(rows + row * row_bytes + at + i * 512);
      }
      for_slots<kVisit>(map + row * L, L, [&](int position) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * 512 < row_bytes) store_row(y + static_cast<std::int64_t>(position) * row_bytes + at + i * 512, v[i]);
        }
      });
    }
  }
}

template <SlotVisit kVisit>
__global__ void __launch_bounds__(kThreads, 2) map_unpermute(const std::int32_t* map, int R, int L, const unsigned char* y, unsigned char* z, int row_bytes) {
  using Bf16 = Vector<__nv_bfloat16>;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const RowItems items(R, (row_bytes + kPiece - 1) / kPiece);
  for (int item = items.first; item < items.count; item += items.step) {
    const std::int64_t row = items.row(item);
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      const int at = piece * kPiece + lane * 16;
      float sum[kVectors][8] = {};
      for_slots<kVisit>(map + row * L, L, [&](int position) {
        uint4 v[kVectors] = {};
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (at + i * 512 < row_bytes) v[i] = load_row(y + static_cast<std::int64_t>(position) * row_bytes + at + i * 512);
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          float x[8];
          Bf16::to_float(v[i], x);
#pragma unroll
          for (int j = 0; j < 8; ++j) sum[i][j] += x[j];
        }
      });
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (at + i * 512 < row_bytes) *reinterpret_cast<uint4*>(z + row * row_bytes + at + i * 512) = Bf16::from_float(sum[i]);
      }
    }
  }
}

template <class Launch>
void with_visit(SlotVisit visit, const Launch& launch) {
  switch (visit) {
    case SlotVisit::kEvery:
      return launch(std::integral_constant<SlotVisit, SlotVisit::kEvery>());
    case SlotVisit::kPruned:
      return launch(std::integral_constant<SlotVisit, SlotVisit::kPruned>());
    default:
      return launch(std::integral_constant<SlotVisit, SlotVisit::kSetBits>());
  }
}

}  // namespace

void launch_slot_map(const std::int32_t* expert_offsets, const std::int32_t* slot_row, std::int32_t R, std::int32_t L, std::int32_t* map, cudaStream_t stream) {
  (void)cudaMemsetAsync(map, 0xff, static_cast<std::size_t>(R) * static_cast<std::size_t>(L) * 4, stream);
  fill_map<<<static_cast<unsigned>(L), kThreads, 0, stream>>>(expert_offsets, slot_row, L, map);
}

void launch_map_permute(SlotVisit visit, const std::int32_t* map, std::int32_t R, std::int32_t L, const void* rows, void* y, std::int32_t row_bytes,
                        cudaStream_t stream) {
  with_visit(visit, [&](auto which) {
    map_permute<decltype(which)::value>
        <<<264, kThreads, 0, stream>>>(map, R, L, static_cast<const unsigned char*>(rows), static_cast<unsigned char*>(y), row_bytes);
  });
}

void launch_map_unpermute(SlotVisit visit, const std::int32_t* map, std::int32_t R, std::int32_t L, const void* y, void* z, std::int32_t row_bytes,
                          cudaStream_t stream) {
  with_visit(visit, [&](auto which) {
    map_unpermute<decltype(which)::value>
        <<<264, kThreads, 0, stream>>>(map, R, L, static_cast<const unsigned char*>(y), static_cast<unsigned char*>(z), row_bytes);
  });
}

}  // namespace waybill::cuda
