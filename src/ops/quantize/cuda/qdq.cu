// SPDX-License-Identifier: Apache-2.0
// Rounds rows to a block format and back to bf16; before that, where asked, rotates 16 rows of a group at a time. Grid: persistent, 256 threads; a CTA
// takes 32 rows of a group x 64 columns at a time through shared memory. Two-level scales need a pass of its own for the largest magnitude of a
// group. Bytes: x once (NVFP4: twice), y once. No speed claim: no matrix instructions of these formats exist on Hopper.
#include <algorithm>

#include "ops/quantize/cuda/codec.cuh"
#include "ops/quantize/cuda/group_table.cuh"
#include "ops/quantize/cuda/qdq.h"
#include "ops/quantize/cuda/wide_rows.cuh"

namespace waybill::cuda {
namespace {

constexpr int kThreads = 256, kRows = 32, kColumns = 64, kHadamard = 16, kMaxBlocks = kRows * kColumns / 16;
constexpr std::uint64_t kHadamardStream = 0x100;  // beside the streams of draws

struct QdqShared {
  float tile[kRows][kColumns + 1];
  float factor[kMaxBlocks], divisor[kMaxBlocks], decoded[kMaxBlocks];
};

// A tile's place: rows of the group from `first` on, of which `valid` exist and `written` are stored.
struct Place {
  int group, column0, valid, written;
  std::int64_t first, source0, y0;
};

__device__ __forceinline__ int log2_of(int power) { return 31 - __clz(power); }

__device__ __forceinline__ Place place_of(const QdqCall& p, const GroupTable& table, std::int64_t unit) {
  const int column_tiles = (p.x.columns + kColumns - 1) / kColumns, block = static_cast<int>(unit / column_tiles);
  Place at;
  at.column0 = static_cast<int>(unit - static_cast<std::int64_t>(block) * column_tiles) * kColumns;
  at.group = table.group_of_block(block);
  at.first = static_cast<std::int64_t>(block - table.first_block(at.group)) * kRows;
  const int rows = table.end_row(at.group) - table.first_row(at.group), left = rows - static_cast<int>(at.first);
  at.valid = min(left, kRows), at.written = p.hadamard ? min((left + kHadamard - 1) / kHadamard * kHadamard, kRows) : at.valid;
  at.source0 = table.first_row(at.group) + at.first;
  at.y0 = (p.hadamard ? static_cast<std::int64_t>(table.first_block<1>(at.group)) * kHadamard : table.first_row(at.group)) + at.first;
  return at;
}

__device__ __forceinline__ void load_tile(const QdqCall& p, const Place& at, QdqShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), r = thread / 8, c = thread % 8 * 8;
  uint4 w = make_uint4(0, 0, 0, 0);
  if (r < at.valid && at.column0 + c < p.x.columns) {
    const std::int64_t source = source_row(p.x, at.source0 + r);
    if (source >= 0) w = ptx::ld_stream_v4(static_cast<const std::uint16_t*>(p.x.data) + source * p.x.stride + at.column0 + c);
  }
  const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    shared.tile[r][c + 2 * i] = __uint_as_float(words[i] << 16), shared.tile[r][c + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// H D of 16 rows of a column; the order of the additions is that of hadamard_rows_ref().
__device__ __forceinline__ void rotate(QdqShared& shared, std::uint32_t signs) {
  const int thread = static_cast<int>(threadIdx.x), c = thread % kColumns, r0 = thread / kColumns * kHadamard;
  if (r0 >= kRows) return;
  float v[kHadamard];
#pragma unroll
  for (int i = 0; i < kHadamard; ++i) v[i] = __fmul_rn((signs >> i & 1u) != 0 ? -0.25f : 0.25f, shared.tile[r0 + i][c]);
#pragma unroll
  for (int half = 1; half < kHadamard; half *= 2) {
#pragma unroll
    for (int i = 0; i < kHadamard; ++i) {
      if ((i & half) != 0) continue;
      const float a = v[i], b = v[i + half];
      v[i] = __fadd_rn(a, b), v[i + half] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < kHadamard; ++i) shared.tile[r0 + i][c] = v[i];
}

template <ElementFormat kFormat>
__device__ __forceinline__ void find_scales(const QdqCall& p, const Place& at, QdqShared& shared) {
  const int rows_shift = log2_of(p.block_rows), columns_shift = log2_of(p.block_columns), across = kColumns >> columns_shift;
  const int blocks = across * (kRows >> rows_shift), per_block = min(kThreads / blocks, 32), size = 1 << (rows_shift + columns_shift);
  const int thread = static_cast<int>(threadIdx.x), block = thread / per_block, part = thread % per_block;
  std::uint32_t amax = 0;
  if (block < blocks) {
    const int row0 = block / across << rows_shift, column0 = block % across << columns_shift;
    for (int e = part; e < size; e += per_block) {
      amax = max(amax, __float_as_uint(shared.tile[row0 + (e >> columns_shift)][column0 + (e & (p.block_columns - 1))]) & kMagnitudeBits);
    }
  }
  for (int mask = per_block / 2; mask > 0; mask /= 2) amax = max(amax, __shfl_xor_sync(ptx::kFullWarp, amax, mask));
  if (block >= blocks || part != 0) return;
  const BlockScale scale = block_scale<kFormat>(amax, p.scale, p.rule, p.scale == ScaleFormat::kE4M3 ? __ldg(p.group_scales + at.group) : 1.0f);
  shared.factor[block] = scale.factor, shared.divisor[block] = scale.divisor;
  shared.decoded[block] = p.scale == ScaleFormat::kE4M3 ? decode_one<ElementFormat::kE4M3>(scale.stored) : decode_e8m0_bits(scale.stored);
}

template <ElementFormat kFormat>
__device__ __forceinline__ void store_tile(const QdqCall& p, const Place& at, const QdqShared& shared, std::uint64_t key) {
  constexpr bool kDivides = kFormat == ElementFormat::kE2M1;
  const int thread = static_cast<int>(threadIdx.x), r = thread / 8, c = thread % 8 * 8;
  if (r >= at.written || at.column0 + c >= p.x.columns) return;
  const int rows_shift = log2_of(p.block_rows), columns_shift = log2_of(p.block_columns), across = kColumns >> columns_shift;
  const float group = kDivides ? __ldg(p.group_scales + at.group) : 1.0f;
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int block = (r >> rows_shift) * across + (c + i >> columns_shift);
    const BlockScale scale{0, shared.factor[block], shared.divisor[block]};
    const float value = to_element<kDivides>(shared.tile[r][c + i], scale);
    std::uint32_t code;
    if (p.stochastic) {
      const auto counter = static_cast<std::uint64_t>((at.first + r) * p.x.columns + at.column0 + c + i);
      code = encode_one_stochastic<kFormat>(value, static_cast<std::uint32_t>(random_u64(key, counter) >> 32));
    } else {
      code = encode_one<kFormat>(value);
    }
    float back = __fmul_rn(decode_one<kFormat>(code), shared.decoded[block]);
    if constexpr (kDivides) back = __fdiv_rn(back, group);
    const std::uint32_t bits = bf16_bits(back);
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
  }
  *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.y) + (at.y0 + r) * p.x.columns + at.column0 + c) = make_uint4(words[0], words[1], words[2], words[3]);
}

// The largest number of the tile; a NaN counts for nothing, it spoils its block only.
__device__ __forceinline__ void add_largest(const QdqCall& p, const Place& at, const QdqShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), r = thread / 8, c = thread % 8 * 8;
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t magnitude = __float_as_uint(shared.tile[r][c + i]) & kMagnitudeBits;
    if (magnitude <= kInfinityBits) amax = max(amax, magnitude);
  }
  amax = ptx::redux_max(amax);
  if (thread % 32 == 0) atomicMax(reinterpret_cast<std::uint32_t*>(p.group_scales) + at.group, amax);
}

template <ElementFormat kFormat, bool kFindsLargest>
__global__ void __launch_bounds__(kThreads) qdq(const __grid_constant__ QdqCall p) {
  extern __shared__ int memory[];
  __shared__ QdqShared shared;
  GroupTable table;
  table.build<kRows, kHadamard>(p.x, memory);
  if (p.hadamard && !kFindsLargest && blockIdx.x == 0) {
    for (int g = static_cast<int>(threadIdx.x); g <= p.x.groups; g += kThreads) {
      p.y_offsets[g] = (g < p.x.groups ? table.first_block<1>(g) : table.num_blocks<1>()) * kHadamard;
    }
  }
  const std::uint64_t seed = p.seed.pointer != nullptr ? *p.seed.pointer : p.seed.value, draws = random_u64(seed, p.draws);
  const auto signs = static_cast<std::uint16_t>(random_u64(seed, kHadamardStream + p.draws));
  const std::int64_t units = static_cast<std::int64_t>(table.num_blocks()) * ((p.x.columns + kColumns - 1) / kColumns);
  for (std::int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Place at = place_of(p, table, unit);
    load_tile(p, at, shared);
    __syncthreads();
    if (p.hadamard) {
      rotate(shared, signs);
      __syncthreads();
    }
    if constexpr (kFindsLargest) {
      add_largest(p, at, shared);
    } else {
      find_scales<kFormat>(p, at, shared);
      __syncthreads();
      store_tile<kFormat>(p, at, shared, random_u64(draws, static_cast<std::uint64_t>(p.first_id + at.group * p.id_stride)));
    }
    __syncthreads();
  }
}

template <ElementFormat kFormat, bool kFindsLargest>
void launch(const QdqCall& p, cudaStream_t stream) {
  const std::int64_t units = (p.x.rows / kRows + p.x.groups) * ((p.x.columns + kColumns - 1) / kColumns);
  const std::size_t bytes = GroupTable::bytes(p.x.groups, 2);
  allow_shared(qdq<kFormat, kFindsLargest>, bytes + sizeof(QdqShared));
  qdq<kFormat, kFindsLargest><<<static_cast<unsigned>(std::min<std::int64_t>(std::max<std::int64_t>(units, 1), 132 * 8)), kThreads, bytes, stream>>>(p);
}

}  // namespace

void launch_qdq(const QdqCall& p, cudaStream_t stream) {
  if (p.x.columns == 0 || p.x.groups == 0) return;
  if (p.element == ElementFormat::kE4M3) return launch<ElementFormat::kE4M3, false>(p, stream);
  (void)cudaMemsetAsync(p.group_scales, 0, static_cast<std::size_t>(p.x.groups) * sizeof(float), stream);
  launch<ElementFormat::kE2M1, true>(p, stream);
  launch_group_scales_finish(p.group_scales, p.x.groups, stream);
  launch<ElementFormat::kE2M1, false>(p, stream);
}

}  // namespace waybill::cuda
