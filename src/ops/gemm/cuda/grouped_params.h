// SPDX-License-Identifier: Apache-2.0
// What a grouped matmul kernel gets from the host, and the sizes that both sides must agree on. D = A B^T in every form:
//   kNT  A [rows, k], B [groups, n, k]  D [rows, n]       row-ragged, the forward product
//   kNN  A [rows, k], B [groups, k, n]  D [rows, n]       row-ragged, dgrad without a transposed copy
//   kTN  A [rows, m], B [rows, n]       D [groups, m, n]  contraction over a group's rows, wgrad
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "waybill/status.h"

namespace waybill::cuda {

enum class GemmForm : int { kNT = 0, kNN = 1, kTN = 2 };
enum class GemmOutput : int { kBf16 = 0, kF32 = 1, kAddF32 = 2 };

// One compiled kernel: output tiles of 128 x block_n, k blocks of 64, `stages` of them in shared memory, clusters of 1 or 2 CTAs.
struct GemmTile {
  int block_n = 256, stages = 4, cluster = 2;
  friend bool operator==(const GemmTile&, const GemmTile&) = default;
};

struct GroupedParams {
  CUtensorMap a, b;
  const std::int32_t* offsets;  // [groups + 1]
  int groups;
  int rows;     // of the ragged tensors; offsets beyond them are cut and reported
  int m, n, k;  // m: kTN only; k: kNT, kNN only
  int band;     // row tiles (pairs in a cluster) that are walked together before the next columns, for the L2
  void* d;
  const float* bias;  // [groups, n] or null; kNT, kNN
  // kTN: a group of 2 q k blocks or more is cut into slices of q to 1.5 q, whose fp32 partial tiles meet in `partials`. q is the work of
  // all groups over (clusters * slices_per_cluster), at least min_slice_blocks.
  int slices_per_cluster, min_slice_blocks;
  int max_split_units;  // what `partials` has room for; only broken offsets pass it, and such units are left out
  float* partials;
  std::uint32_t* arrivals;  // one a partial tile and warpgroup, zero between launches
  std::uint32_t* ticket;    // the next unit of work, zero between launches
  StatusWord* status;       // or null
};

namespace gemm_limits {
inline constexpr int kBlockM = 128, kBlockK = 64;
inline constexpr int kBlockBytes = kBlockK * 2;      // of a row of a k block: the span of the 128-byte swizzle
inline constexpr int kHalfBytes = 64 * kBlockBytes;  // 64 rows of a k block
constexpr int stage_bytes(int block_n) { return (kBlockM + block_n) * kBlockBytes; }
inline constexpr int kControlBytes = 1024;  // barriers and the ring of units
constexpr int shared_bytes(const GemmTile& tile) { return tile.stages * stage_bytes(tile.block_n) + kControlBytes; }

// Units of cut groups stay below this; each needs `cluster` partial tiles. q rounds down (at most by 1/8, it is at least 8) and a group's last
// block counts whole (at most 1/16 of a cut group).
constexpr int max_split_units(int num_clusters, int slices_per_cluster) { return num_clusters * slices_per_cluster * 5 / 4 + num_clusters; }
}  // namespace gemm_limits

// A compiled kernel behind a plain pointer.
struct GemmKernel {
  GemmForm form;
  GemmOutput output;
  GemmTile tile;
  void (*kernel)(const GroupedParams);
};

}  // namespace waybill::cuda
