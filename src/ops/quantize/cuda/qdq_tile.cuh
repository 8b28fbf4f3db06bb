// SPDX-License-Identifier: Apache-2.0
// What the kernels of blocks along the rows share: a warp takes 32 rows of a group x 64 columns, a lane 16 rows x 4 columns in registers, so that a rotation
// and a column's block of 16 never leave the lane.
#pragma once

#include <algorithm>

#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/launch_grid.h"
#include "ops/quantize/cuda/qdq_block.cuh"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

inline constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 32, kColumns = 64, kLaneRows = 16, kLaneColumns = 4;
inline constexpr std::uint64_t kHadamardStream = 0x100;  // beside the streams of draws

// A lane's place: rows of the group from `first` on, of which `valid` exist and `written` are stored.
struct Place {
  int group, column, valid, written;
  std::int64_t first, y0;
};

// A lane's values: word c / 2 of row i holds columns c and c + 1.
struct Values {
  std::uint32_t w[kLaneRows][2];
  __device__ __forceinline__ float value(int i, int c) const { return __uint_as_float(c % 2 == 0 ? w[i][c / 2] << 16 : w[i][c / 2] & 0xffff0000u); }
};

__device__ __forceinline__ Place load(const QdqCall& p, const GroupTable& table, std::int64_t unit, int column_tiles, Values& x) {
  const int lane = static_cast<int>(threadIdx.x) % 32, block = static_cast<int>(unit / column_tiles), half = lane / 16 * kLaneRows;
  Place at;
  at.column = static_cast<int>(unit - static_cast<std::int64_t>(block) * column_tiles) * kColumns + lane % 16 * kLaneColumns;
  at.group = table.group_of_block(block);
  const int begin = (block - table.first_block(at.group)) * kRows, first_row = table.first_row(at.group), left = table.end_row(at.group) - first_row - begin;
  at.first = begin + half, at.valid = min(max(left - half, 0), kLaneRows);
  at.written = p.hadamard && at.valid > 0 ? kLaneRows : at.valid;
  at.y0 = (p.hadamard ? static_cast<std::int64_t>(table.first_block<1>(at.group)) * kLaneRows : first_row) + at.first;
  const std::int64_t own = lane < left ? source_row(p.x, first_row + begin + lane) : -1;  // of row `lane` of the 32
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) {
    const int source = __shfl_sync(ptx::kFullWarp, static_cast<int>(own), half + i);
    uint2 v = make_uint2(0, 0);
    if (source >= 0 && at.column < p.x.columns) v = ptx::ld_stream_v2(static_cast<const std::uint16_t*>(p.x.data) + source * p.x.stride + at.column);
    x.w[i][0] = v.x, x.w[i][1] = v.y;
  }
  return at;
}

// H D of a column's 16 rows; the order of the additions is that of hadamard_rows_ref().
__device__ __forceinline__ void rotate(float (&v)[kLaneRows], std::uint32_t signs) {
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) v[i] = __fmul_rn((signs >> i & 1u) != 0 ? -0.25f : 0.25f, v[i]);
#pragma unroll
  for (int half = 1; half < kLaneRows; half *= 2) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if ((i & half) != 0) continue;
      const float a = v[i], b = v[i + half];
      v[i] = __fadd_rn(a, b), v[i + half] = __fsub_rn(a, b);
    }
  }
}

__device__ __forceinline__ void take_column(const Values& x, int c, bool rotates, std::uint32_t signs, float (&v)[kLaneRows]) {
#pragma unroll
  for (int i = 0; i < kLaneRows; ++i) v[i] = x.value(i, c);
  if (rotates) rotate(v, signs);
}

template <class Kernel>
void launch_tiles(Kernel kernel, const QdqCall& p, cudaStream_t stream) {
  const std::int64_t units = (p.x.rows / kRows + p.x.groups) * ((p.x.columns + kColumns - 1) / kColumns);
  const std::size_t bytes = GroupTable::bytes(p.x.groups, 2);
  allow_shared(kernel, bytes);
  kernel<<<static_cast<unsigned>(std::clamp<std::int64_t>((units + kWarps - 1) / kWarps, 1, 2 * num_sms())), kThreads, bytes, stream>>>(p);
}

}  // namespace
}  // namespace waybill::cuda
