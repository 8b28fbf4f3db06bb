// SPDX-License-Identifier: Apache-2.0
// Sums of rows read by the SMs' copy engine (sm_90): each warp has a ring of buffers, and its loads run as far ahead as the ring reaches,
// over the ends of parts, pieces and items.
//
// An item (RowItems) is a range of pieces (2 KB) of one result row; its parts are the rows to be added, in order. Two objects of the kernel
// say what they are, item by item, each reading ahead for itself:
//   Parts::take(items, item, row)  number of parts of `item`; lane d's row[0] is part d, row[1] part d + 32. Negative: nothing comes any more.
//   Sums::take(items, item)        the same number; weight(d) of a part; out(items, item): the result row, null: none; done(items, item)
//                                  kBase: base(items, item): a row of f32 that is added last, by ordinary loads that are on their way while parts come; null:
//                                  none
// The sum is fp32, starts with the first part (exact where there is only one) and goes by parts in order; an item without parts gets 0, or its base.
#pragma once

#include "exchange/cuda/row_vectors.cuh"

namespace waybill::cuda {

inline constexpr int kRingVectors = 4;
inline constexpr int kRingPiece = kRingVectors * 32 * 16;
inline constexpr int kRingWarps = 16;
inline constexpr int kMaxRingStages = 16;

// Of one warp.
struct Ring {
  unsigned char* stages;
  std::uint64_t* full;
  int num, row_bytes;
};

using RingBarriers = std::uint64_t[kRingWarps][kMaxRingStages];

// smem: [warps][stages][kRingPiece]. Called by all lanes before the first load.
__device__ __forceinline__ Ring make_ring(unsigned char* smem, RingBarriers& full, int stages, int row_bytes) {
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  if ((threadIdx.x & 31) == 0) {
    for (int s = 0; s < stages; ++s) ptx::mbarrier_init(&full[warp][s], 1);
    ptx::mbarrier_init_fence();
    ptx::fence_async_proxy();
  }
  __syncwarp();
  return Ring{smem + static_cast<std::size_t>(warp) * static_cast<std::size_t>(stages) * kRingPiece, full[warp], stages, row_bytes};
}

inline std::size_t ring_smem(int warps, int stages) { return static_cast<std::size_t>(warps) * static_cast<std::size_t>(stages) * kRingPiece; }

// Where the loads of a warp stand. The same in every lane but for `row`.
struct RingCursor {
  int item, piece, end;  // next item; piece and last piece of the item whose parts are being loaded
  int num, d;            // parts of that item, and how many of this `piece` are on their way
  int stage;
  int lost_from;                // items from here on have no parts: a peer was lost
  const unsigned char* row[2];  // lane d: parts d and d + 32 of that item
};

// One more load, when there is one.
template <class Parts>
__device__ __forceinline__ void issue_load(Parts& parts, const RowItems& items, const Ring& ring, RingCursor& c) {
  if (c.d == c.num && c.num > 0 && c.piece + 1 < c.end) ++c.piece, c.d = 0;
  while (c.d == c.num) {  // the next item that has parts
    if (c.item >= items.count) return;
    c.num = parts.take(items, c.item, c.row);
    if (c.num < 0) {
      c.lost_from = c.item, c.item = items.count, c.num = c.d = 0;
      return;
    }
    c.piece = items.begin(c.item), c.end = items.end(c.item), c.d = 0;
    if (c.piece >= c.end) c.num = 0;
    c.item += items.step;
  }
  if ((static_cast<int>(threadIdx.x) & 31) == (c.d & 31)) {
    const int offset = c.piece * kRingPiece;
    const auto bytes = static_cast<std::uint32_t>(min(kRingPiece, ring.row_bytes - offset));
    ptx::mbarrier_arrive_expect(ring.full + c.stage, bytes);
    ptx::bulk_load(ring.stages + c.stage * kRingPiece, (c.d < 32 ? c.row[0] : c.row[1]) + offset, bytes, ring.full + c.stage);
  }
  ++c.d;
  if (++c.stage == ring.num) c.stage = 0;
}

template <class Part, class Out, bool kWeighted, bool kBase = false, class Parts, class Sums>
__device__ __forceinline__ void sum_items(const RowItems& items, const Ring& ring, Parts& parts, Sums& sums) {
  constexpr int kValues = Vector<Part>::kValues;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  RingCursor cursor{items.first, 0, 0, 0, 0, 0, 0x7fffffff, {nullptr, nullptr}};
  for (int s = 0; s < ring.num; ++s) issue_load(parts, items, ring, cursor);
  int stage = 0;
  std::uint32_t parity = 0;
  for (int item = items.first; item < items.count; item += items.step) {
    int num = sums.take(items, item);
    if (item >= cursor.lost_from) num = 0;
    Out* out = sums.template out<Out>(items, item);
    const float* base = nullptr;
    if constexpr (kBase) base = sums.base(items, item);
    for (int piece = items.begin(item); piece < items.end(item); ++piece) {
      const int offset = piece * kRingPiece + lane * 16;
      float sum[kRingVectors][kValues] = {};
      for (int d = 0; d < num; ++d) {
        const float weight = kWeighted ? sums.weight(d) : 1.0f;
        ptx::mbarrier_wait(ring.full + stage, parity);
#pragma unroll
        for (int i = 0; i < kRingVectors; ++i) {
          if (offset + i * 512 >= ring.row_bytes) continue;
          float x[kValues];
          Vector<Part>::to_float(*reinterpret_cast<const uint4*>(ring.stages + stage * kRingPiece + lane * 16 + i * 512), x);
#pragma unroll
          for (int j = 0; j < kValues; ++j) {
            const float part = kWeighted ? weight * x[j] : x[j];
            sum[i][j] = d == 0 ? part : sum[i][j] + part;
          }
        }
        __syncwarp();  // all lanes have read the stage
        issue_load(parts, items, ring, cursor);
        if (++stage == ring.num) stage = 0, parity ^= 1u;
      }
      if constexpr (kBase) {
#pragma unroll
        for (int i = 0; i < kRingVectors; ++i) {
          if (base == nullptr || offset + i * 512 >= ring.row_bytes) continue;
          const auto* more = reinterpret_cast<const float4*>(base + (offset + i * 512) / static_cast<int>(sizeof(Part)));
#pragma unroll
          for (int j = 0; j < kValues; j += 4) {
            const float4 four = __ldcs(more + j / 4);
            const float parts4[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) sum[i][j + n] = num == 0 ? parts4[n] : sum[i][j + n] + parts4[n];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRingVectors; ++i) {
        if (out != nullptr && offset + i * 512 < ring.row_bytes) store_values<Out>(out + (offset + i * 512) / static_cast<int>(sizeof(Part)), sum[i]);
      }
    }
    sums.done(items, item);
  }
}

}  // namespace waybill::cuda
