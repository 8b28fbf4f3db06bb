// SPDX-License-Identifier: Apache-2.0
// What one instruction set provides to the matmul engine: register tiles and the packing that feeds them. Every set has the same
// interface; the portable one runs anywhere. Each element is a chain of multiply-adds in ascending k that starts at 0, so its value
// depends neither on tile sizes nor on threads. The AVX-512 and AVX2 sets fuse the multiply-add and agree bit for bit; the portable
// set rounds the product first.
#pragma once

#include <cstdint>

#include "waybill/dtype.h"
#include "waybill/export.h"

namespace waybill::detail {

constexpr int kMaxTileRows = 14;
constexpr int kMaxTileColumns = 32;
constexpr int kPackRows = 32;            // rows a packing call may read at most
constexpr std::int64_t kMaxDepth = 384;  // k values packed at a time, at most
constexpr std::int64_t kPackSlack = 32;  // floats that packing may write past the end of a panel

// Cache lines to fetch while a tile's sums are formed: one for each k, `period` of four at a time along `step`, then a jump. Addresses are
// only hints and may lie anywhere.
struct PrefetchRun {
  const char* at;
  std::int64_t step, jump;  // bytes; the jump is added after `period` fours
  std::int64_t left, period;
};

// A full register tile: sum[m, n] = (start ? start[m, n] : 0) + sum_k a[k, m] b[k, n], then c[m, n] = sum or, when `add` is set, c[m, n] += sum.
// a is [depth, rows], b is [depth, tile columns] with rows b_stride apart; start and c may be the same memory.
struct TileArgs {
  std::int64_t depth;
  const float *a, *b;
  std::int64_t b_stride;
  const float* start;
  std::int64_t start_stride;
  float* c;
  std::int64_t c_stride;
  bool add;
  const float* next_c;  // c of the tile that follows: a hint
  PrefetchRun next;
};
using TileFn = void (*)(const TileArgs& args);

// Turns `width` rows (pointers at their first k) into the panel [depth, width]. May write kPackSlack floats past its end.
using PackRowsFn = void (*)(const void* const* rows, int width, std::int64_t depth, float* panel);

// Copies `width` elements at `byte` of each of `num_rows` rows to the panel [num_rows, panel_width]; a null row and the columns past `width`
// become zeros. width <= panel_width <= 32.
using PackColumnsFn = void (*)(const void* const* rows, int num_rows, std::int64_t byte, int width, int panel_width, float* panel);

// Finishes a row: out[n] = acc[n] (+ bias[n]) (+ out[n]); bias may be null.
using FinishFn = void (*)(const float* acc, const float* bias, std::int64_t width, bool accumulate, void* out);

struct KernelSet {
  const char* name;
  int tile_rows, tile_columns;
  TileFn tile[kMaxTileRows + 1];  // by number of rows, 1 .. tile_rows
  PackRowsFn pack_rows_f32, pack_rows_bf16;
  PackColumnsFn pack_columns_f32, pack_columns_bf16;
  FinishFn finish_f32, finish_bf16;
};

extern const KernelSet kPortableKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#endif

// The sets this machine can run, best first.
struct KernelList {
  const KernelSet* sets[3];
  int count;
};
const KernelList& usable_kernels();

// The set in use: the best usable one, or the one that WB_FORCE=gemm:<name> or force_gemm() names. null = the reference loops.
const KernelSet* selected_kernels();

// Tests and benchmarks: pins a set by name ("avx512", "avx2", "portable", "ref"); "" returns to the default. kUnsupported when this
// machine cannot run it.
WB_API void force_gemm(const char* name);

}  // namespace waybill::detail
