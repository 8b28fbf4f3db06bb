// SPDX-License-Identifier: Apache-2.0
// What a grouped matmul kernel gets from the host, and the sizes that both sides must agree on. D = A B^T in every form:
//   kNT  A [rows, k], B [groups, n, k]  D [rows, n]       row-ragged, the forward product
//   kNN  A [rows, k], B [groups, k, n]  D [rows, n]       row-ragged, dgrad without a transposed copy
//   kTN  A [rows, m], B [rows, n]       D [groups, m, n]  contraction over a group's rows, wgrad
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "core/cuda/activation_kind.h"
#include "waybill/status.h"

namespace waybill::cuda {

enum class GemmForm : int { kNT = 0, kNN = 1, kTN = 2 };
enum class GemmOutput : int { kBf16 = 0, kF32 = 1, kAddF32 = 2 };

// What happens between the sums and D; the two with an activation are described in grouped_activation.cuh.
enum class GemmEpilogue : int { kPlain = 0, kActivation = 1, kActivationGradient = 2 };

// One compiled kernel: output tiles of 128 x block_n, k blocks of 64, `stages` of them in shared memory, clusters of 1 or 2 CTAs. buffers: of 2 KiB
// that a math warp has for its part of the result; the copy engine stores from them, while the next tile is computed where there are 2 or more.
struct GemmTile {
  int block_n = 256, stages = 4, cluster = 2, buffers = 2;
  friend bool operator==(const GemmTile&, const GemmTile&) = default;
};

struct GroupedParams {
  CUtensorMap a, b, d, h;       // h: the pre-activation, [rows, planes of n / planes columns]; with an activation only
  const std::int32_t* offsets;  // [groups + 1]
  int groups;
  int rows;     // of the ragged tensors; offsets beyond them are cut and reported
  int m, n, k;  // m: kTN only; k: kNT, kNN only
  int band;     // row tiles (pairs in a cluster) that are walked together before the next columns, for the L2
  // Units of a last round that has work for half of the clusters at most are cut in two by columns (kernels that can: kCutsLastRound).
  bool cuts_last_round;
  int long_batch;  // kTN without slices: so many units of long groups at a time are drawn beside those of the others; 0: groups in order
  // kNT, kNN: row s of A is row a_list[s] of a_data [a_rows, k], a zero row where a_list[s] is outside; null: row s itself, through the map.
  // kTN: row s of A, or of B, likewise; a row outside adds nothing, whatever the other operand holds.
  const std::int32_t *a_list, *b_list;
  const void *a_data, *b_data;
  int a_rows, b_rows;
  void* d_data;
  std::int64_t d_stride, d_plane;  // elements from one row of D to the next; kTN: from one group to the next
  const float* bias;               // [groups, n] or null; kNT, kNN
  ActivationKind act_kind;
  float act_limit, act_alpha;
  void* h_data;             // kActivation: null where the pre-activation is not wanted
  const float* row_weight;  // [rows] or null
  float* weight_parts;      // kActivationGradient: [rows, ceil(n / 64)] or null
  // kTN: a group of 1.5 q k blocks or more is cut into slices of 0.75 q to 1.5 q, whose fp32 partial tiles meet in `partials`. q is the work
  // of all groups over (clusters * slices_per_cluster), at least min_slice_blocks.
  int slices_per_cluster, min_slice_blocks;
  int slice_tiles;      // of the product whose slices these are: a part of a product is cut as the whole
  int num_passes;       // kTN: over the groups: those in slices, then ever shorter ones
  int max_split_units;  // what `partials` has room for; only broken offsets pass it, and such units are left out
  float* partials;
  std::uint32_t* arrivals;  // one a partial tile and warpgroup: meetings of slices; zero between launches
  std::uint32_t* ticket;    // the next unit of work, zero between launches
  StatusWord* status;       // or null
};

namespace gemm_limits {
inline constexpr int kBlockM = 128, kBlockK = 64;
inline constexpr int kBlockBytes = kBlockK * 2;      // of a row of a k block: the span of the 128-byte swizzle
inline constexpr int kHalfBytes = 64 * kBlockBytes;  // 64 rows of a k block
constexpr int stage_bytes(int block_n) { return (kBlockM + block_n) * kBlockBytes; }
inline constexpr int kControlBytes = 1024;  // barriers and the ring of units
inline constexpr int kMathWarps = 8;
// wgrad that adds to D fetches D's values where groups have so many rows at most, measured (docs/perf/grouped-gemm.md).
inline constexpr int kFetchedRows = 512;
inline constexpr int kBufferRows = 16, kBufferBytes = kBufferRows * 128;  // of a result buffer
constexpr int shared_bytes(const GemmTile& tile) { return tile.stages * stage_bytes(tile.block_n) + kMathWarps * tile.buffers * kBufferBytes + kControlBytes; }

// Units of cut groups stay below this; each needs `cluster` partial tiles. A group of b blocks has at most 4 b / 3 q slices, q rounds down (by
// 1/8 at most, it is at least 8), and a group's last block counts whole (1/12 of a cut group at most).
constexpr int max_split_units(int num_clusters, int slices_per_cluster) { return num_clusters * slices_per_cluster * 13 / 8 + num_clusters; }
}  // namespace gemm_limits

// A compiled kernel behind a plain pointer.
struct GemmKernel {
  GemmForm form;
  GemmOutput output;
  GemmEpilogue epilogue;
  GemmTile tile;
  void (*kernel)(const GroupedParams);
};

}  // namespace waybill::cuda
