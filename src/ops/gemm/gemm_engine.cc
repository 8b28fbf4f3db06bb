// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm_engine.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/gemm/tuning.h"
#include "waybill/tensor.h"

namespace waybill::detail {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// What masked rows read: long enough for the deepest panel in fp32.
alignas(64) const float kZeros[kMaxDepth] = {};

// Per-thread memory of the packed panels.
float* thread_scratch(std::int64_t num_floats) {
  thread_local Buffer buffer;
  const std::size_t bytes = static_cast<std::size_t>(num_floats) * sizeof(float);
  if (buffer.bytes() < bytes) {
    buffer = Buffer();
    buffer = Buffer(bytes);
  }
  return static_cast<float*>(buffer.data());
}

// How a call is cut. Changes speed only.
struct Tiling {
  std::int64_t max_m, tile_n, num_n;
};

struct GroupSizes {
  std::int64_t m, k, first;  // first = row (kM) or k (kK) of the shared tensors at which the group begins
};

GroupSizes sizes_of(const GemmBatch& batch, std::int64_t g) {
  if (batch.ragged == Ragged::kNone) return {batch.m, batch.k, 0};
  const std::int64_t begin = batch.offsets[g], count = batch.offsets[g + 1] - begin;
  return batch.ragged == Ragged::kM ? GroupSizes{count, batch.k, begin} : GroupSizes{batch.m, count, begin};
}

bool has_work(const GemmBatch& batch, const GroupSizes& sizes) {
  return sizes.m > 0 && batch.n > 0 && (sizes.k > 0 || !batch.accumulate || batch.bias != nullptr);
}

Tiling choose_tiling(const GemmBatch& batch, const KernelSet& kernels, int num_threads) {
  Tiling tiling{kMaxTaskRows, 0, ceil_div(batch.n, kMaxTaskColumns)};
  std::int64_t rows = 0, largest = 0;
  for (std::int64_t g = 0; num_threads > 1 && g < batch.groups; ++g) {
    const std::int64_t m = sizes_of(batch, g).m;
    rows += ceil_div(m, tiling.max_m);
    largest = std::max(largest, m);
  }
  const std::int64_t wanted = num_threads > 1 ? kTasksPerThread * num_threads : 1;
  while (rows * tiling.num_n < wanted && ceil_div(batch.n, tiling.num_n) > kMinTaskColumns) tiling.num_n *= 2;
  if (rows * tiling.num_n < wanted && rows > 0) {
    tiling.max_m = std::max<std::int64_t>(round_up(ceil_div(largest, ceil_div(wanted, tiling.num_n)), kernels.tile_rows), kMinTaskRows);
  }
  tiling.tile_n = round_up(ceil_div(std::max<std::int64_t>(batch.n, 1), std::max<std::int64_t>(tiling.num_n, 1)), kernels.tile_columns);
  tiling.num_n = ceil_div(batch.n, tiling.tile_n);
  return tiling;
}

// Packs `extent` outer indices from `outer` and `depth` values of k from `k` into panels of `width`: panel p is [depth, width], the last one
// of a is [depth, rest], the last one of b is filled with zeros.
class Packer {
 public:
  Packer(const Operand& operand, const KernelSet& kernels, std::int64_t g, int width, bool pad)
      : operand_(operand),
        data_(static_cast<const char*>(operand.data)),
        item_(operand.is_bf16 ? 2 : 4),
        base_(g * operand.group_stride),
        width_(width),
        pad_(pad),
        pack_rows_(operand.is_bf16 ? kernels.pack_rows_bf16 : kernels.pack_rows_f32),
        pack_columns_(operand.is_bf16 ? kernels.pack_columns_bf16 : kernels.pack_columns_f32) {}

  const float* floats(std::int64_t outer, std::int64_t k) const { return reinterpret_cast<const float*>(at(outer, k)); }

  // Adjacent outer indices of one k are a row of a panel as it lies in memory.
  bool is_readable_in_place() const {
    return !operand_.is_bf16 && operand_.outer_stride == 1 && operand_.k_rows == nullptr && operand_.k_mask == nullptr && operand_.k_stride >= width_;
  }

  // The part of a panel's lines that the tile `index` of the panel before asks for; those tiles have more steps of k than this one has lines.
  PrefetchRun prefetch(std::int64_t outer, std::int64_t k, std::int64_t depth, std::int64_t index) const {
    constexpr std::int64_t kLine = 64;
    const char* first = at(outer, k);
    if (operand_.k_rows != nullptr) return {first, 0, 0, 1, 1};
    if (operand_.k_stride == 1) {  // rows of `depth` elements
      const std::int64_t fours = ceil_div(depth * item_, 4 * kLine), done = index * (depth / 4);
      const std::int64_t row = done / fours, part = done % fours;
      return {first + row * operand_.outer_stride * item_ + part * 4 * kLine, kLine, operand_.outer_stride * item_ - fours * 4 * kLine, fours - part, fours};
    }
    // In each of `depth` rows. A panel that begins within a line shares it with the panel before, whose reads have brought it; the line that
    // its end reaches into is the one to ask for, hence the last element of a line's length.
    const std::int64_t lines = ceil_div(width_ * item_, kLine);
    return {first + index % lines * kLine + kLine - item_, operand_.k_stride * item_, 0, depth, depth};
  }

  void pack(std::int64_t outer, std::int64_t extent, std::int64_t k, std::int64_t depth, float* out) const {
    const bool along_k = operand_.k_stride == 1 && operand_.k_rows == nullptr && operand_.k_mask == nullptr;
    along_k ? transpose(outer, extent, k, depth, out) : copy(outer, extent, k, depth, out);
  }

 private:
  const char* at(std::int64_t outer, std::int64_t k) const { return data_ + (base_ + outer * operand_.outer_stride + k * operand_.k_stride) * item_; }

  void transpose(std::int64_t outer, std::int64_t extent, std::int64_t k, std::int64_t depth, float* out) const {
    const void* rows[kPackRows];
    for (std::int64_t first = 0; first < extent; first += width_, out += width_ * depth) {
      const int count = static_cast<int>(std::min<std::int64_t>(width_, extent - first));
      for (int i = 0; i < count; ++i) {
        const std::int64_t o = outer + first + i;
        const std::int64_t row = operand_.outer_rows == nullptr ? o : operand_.outer_rows[o];
        rows[i] = row < 0 ? static_cast<const void*>(kZeros) : at(row, k);
      }
      const int panel = pad_ ? width_ : count;
      for (int i = count; i < panel; ++i) rows[i] = kZeros;
      pack_rows_(rows, panel, depth, out);
    }
  }

  // A few rows of k at a time, so that panels are written in runs and the rows stay in the first-level cache meanwhile.
  void copy(std::int64_t outer, std::int64_t extent, std::int64_t k, std::int64_t depth, float* out) const {
    const void* rows[kCopyRows];
    for (std::int64_t done = 0; done < depth; done += kCopyRows) {
      const int num_rows = static_cast<int>(std::min<std::int64_t>(kCopyRows, depth - done));
      for (int i = 0; i < num_rows; ++i) {
        const std::int64_t at_k = k + done + i;
        const bool masked = operand_.k_mask != nullptr && operand_.k_mask[at_k] < 0;
        rows[i] = masked ? nullptr : at(outer, operand_.k_rows == nullptr ? at_k : operand_.k_rows[at_k]);
      }
      for (std::int64_t first = 0; first < extent; first += width_) {
        const int count = static_cast<int>(std::min<std::int64_t>(width_, extent - first));
        const int panel = pad_ ? width_ : count;
        pack_columns_(rows, num_rows, first * item_, count, panel, out + first * depth + done * panel);
      }
    }
  }

  const Operand& operand_;
  const char* data_;
  std::int64_t item_, base_;
  int width_;
  bool pad_;
  PackRowsFn pack_rows_;
  PackColumnsFn pack_columns_;
};

// One (group, m tile, n tile): packs its part of a and b a depth block at a time and finishes its part of c.
class Task {
 public:
  Task(const GemmBatch& batch, const KernelSet& kernels, std::int64_t g, std::int64_t m, std::int64_t rows, std::int64_t n, std::int64_t columns)
      : batch_(batch), kernels_(kernels), sizes_(sizes_of(batch, g)), g_(g), m_(m), rows_(rows), n_(n), columns_(columns) {}

  void run() {
    const std::int64_t num_blocks = std::max<std::int64_t>(ceil_div(sizes_.k, kMaxDepth), 1);
    const std::int64_t depth_step = std::min(round_up(ceil_div(sizes_.k, num_blocks), 8), kMaxDepth);
    const std::int64_t padded = round_up(columns_, kernels_.tile_columns);
    const bool direct = !batch_.c_is_bf16 && batch_.bias == nullptr && batch_.c_mask == nullptr;
    const bool walks_rows = batch_.ragged == Ragged::kK && num_blocks == 1 && depth_step <= kShortDepth;
    const std::int64_t a_floats = round_up(rows_ * depth_step + kPackSlack, 16), b_columns = walks_rows ? padded : kernels_.tile_columns;
    const std::int64_t b_floats = b_columns * depth_step + kPackSlack;
    const bool in_c = direct && !batch_.accumulate && padded == columns_;  // partial sums live in c itself
    const bool keeps_sums = num_blocks > 1 && !in_c;
    float* a = thread_scratch(a_floats + b_floats + (keeps_sums ? rows_ * padded : kMaxTileRows * kMaxTileColumns));
    float* b = a + a_floats;
    float* sums = b + b_floats;

    const std::int64_t first_m = batch_.ragged == Ragged::kM ? sizes_.first : 0, first_k = batch_.ragged == Ragged::kK ? sizes_.first : 0;
    const Packer pack_a(batch_.a, kernels_, g_, kernels_.tile_rows, false);
    const Packer pack_b(batch_.b, kernels_, g_, kernels_.tile_columns, true);
    for (std::int64_t block = 0, k = 0; block < num_blocks; ++block, k += depth_step) {
      const std::int64_t depth = std::min(depth_step, sizes_.k - k);
      pack_a.pack(first_m + m_, rows_, first_k + k, depth, a);
      multiply({a, b, sums, first_k + k, depth, padded, block == 0, block + 1 == num_blocks, keeps_sums, direct, walks_rows}, pack_b);
    }
  }

 private:
  struct Block {
    const float* a;
    float *b, *sums;
    std::int64_t k, depth, padded;
    bool first, last, keeps_sums, direct, walks_rows;
  };

  struct Panel {
    const float* b;
    std::int64_t stride;
  };
  PrefetchRun nothing(const Panel& panel) const { return {reinterpret_cast<const char*>(panel.b), 0, 0, 1, 1}; }

  void multiply(const Block& block, const Packer& pack_b) const { block.walks_rows ? multiply_rows(block, pack_b) : multiply_panels(block, pack_b); }

  // b passes by a panel at a time: packed (or read in place, where few rows of a would not repay the copy) just before it is used, so that it
  // lies in the first caches while the panels of a stream past. Meanwhile the tiles ask for the next panel's lines.
  void multiply_panels(const Block& block, const Packer& pack_b) const {
    const bool in_place = rows_ <= kMaxDirectRows && pack_b.is_readable_in_place();
    for (std::int64_t n = 0; n < columns_; n += kernels_.tile_columns) {
      const std::int64_t width = std::min<std::int64_t>(kernels_.tile_columns, columns_ - n);
      Panel panel{block.b, kernels_.tile_columns};
      if (in_place && width == kernels_.tile_columns) {
        panel = {pack_b.floats(n_ + n, block.k), batch_.b.k_stride};
      } else {
        pack_b.pack(n_ + n, width, block.k, block.depth, block.b);
      }
      const bool block_ends = n + kernels_.tile_columns >= columns_, has_next = !block_ends || !block.last;
      const std::int64_t next_n = block_ends ? 0 : n + kernels_.tile_columns, next_k = block_ends ? block.k + block.depth : block.k;
      for (std::int64_t m = 0, i = 0; m < rows_; m += kernels_.tile_rows, ++i) {
        const bool panel_ends = m + kernels_.tile_rows >= rows_;
        const PrefetchRun next = has_next ? pack_b.prefetch(n_ + next_n, next_k, block.depth, i) : nothing(panel);
        run_tile(block, m, n, panel, panel_ends ? -m : kernels_.tile_rows, panel_ends ? kernels_.tile_columns : 0, &next);
      }
    }
  }

  // Short sums over a large output (the weight gradient of a small group): the output is what moves, so tiles follow its rows, all of b is
  // packed before, and each step of k asks for a line of the next tile's output: all of them at once would hold up the reads of a and b.
  void multiply_rows(const Block& block, const Packer& pack_b) const {
    pack_b.pack(n_, columns_, block.k, block.depth, block.b);
    for (std::int64_t m = 0; m < rows_; m += kernels_.tile_rows) {
      for (std::int64_t n = 0; n < columns_; n += kernels_.tile_columns) {
        const Panel panel{block.b + n * block.depth, kernels_.tile_columns};
        const bool row_ends = n + kernels_.tile_columns >= columns_;
        run_tile(block, m, n, panel, row_ends ? kernels_.tile_rows : 0, row_ends ? -n : kernels_.tile_columns, nullptr);
      }
    }
  }

  // The lines of a tile of the output, a column of lines after the other; a long sum goes on to the tiles behind it.
  PrefetchRun output_lines(const float* c, std::int64_t stride) const {
    const std::int64_t fours = ceil_div(kernels_.tile_rows, 4), step = stride * 4;
    return {reinterpret_cast<const char*>(c), step, 64 - 4 * fours * step, fours, fours};
  }

  // Full fp32 tiles without a bias end in c; others pass through finish(). Sums that span depth blocks wait in `sums`, or in c where nothing
  // else is kept there. The next tile lies `down` rows and `right` columns away; next = null: its output is what the steps of k ask for.
  void run_tile(const Block& block, std::int64_t m, std::int64_t n, const Panel& panel, std::int64_t down, std::int64_t right, const PrefetchRun* next) const {
    const std::int64_t width = std::min<std::int64_t>(kernels_.tile_columns, columns_ - n);
    const int height = static_cast<int>(std::min<std::int64_t>(kernels_.tile_rows, rows_ - m));
    const bool ends_in_c = block.direct && width == kernels_.tile_columns;
    const bool stays_in_c = ends_in_c && !batch_.accumulate;
    float* c = ends_in_c ? static_cast<float*>(batch_.c) + c_index(m, n) : nullptr;
    float* sums = block.sums + (block.keeps_sums ? m * block.padded + n : 0);
    std::int64_t sums_stride = block.keeps_sums ? block.padded : kMaxTileColumns;
    if (stays_in_c) {
      sums = c;
      sums_stride = batch_.c_stride;
    }
    const bool to_c = stays_in_c || (block.last && ends_in_c);
    float* target = to_c ? c : sums;
    const std::int64_t target_stride = to_c ? batch_.c_stride : sums_stride;
    const float* next_target = target + down * target_stride + right;
    const TileArgs args{block.depth,
                        block.a + m * block.depth,
                        panel.b,
                        panel.stride,
                        block.first ? nullptr : sums,
                        sums_stride,
                        target,
                        target_stride,
                        to_c && !stays_in_c,
                        next == nullptr ? target : next_target,
                        next == nullptr ? output_lines(next_target, target_stride) : *next};
    kernels_.tile[height](args);
    if (block.last && !ends_in_c) finish(sums, sums_stride, m, height, n, width);
  }

  std::int64_t c_index(std::int64_t m, std::int64_t n) const {
    const std::int64_t first = batch_.ragged == Ragged::kM ? sizes_.first : 0;
    return g_ * batch_.c_group_stride + (first + m_ + m) * batch_.c_stride + n_ + n;
  }

  void finish(const float* sums, std::int64_t stride, std::int64_t m, int height, std::int64_t n, std::int64_t width) const {
    const std::int64_t item = batch_.c_is_bf16 ? 2 : 4;
    const FinishFn finish_row = batch_.c_is_bf16 ? kernels_.finish_bf16 : kernels_.finish_f32;
    const float* bias = batch_.bias == nullptr ? nullptr : batch_.bias + g_ * batch_.n + n_ + n;
    for (int i = 0; i < height; ++i) {
      char* out = static_cast<char*>(batch_.c) + c_index(m + i, n) * item;
      if (batch_.c_mask != nullptr && batch_.c_mask[sizes_.first + m_ + m + i] < 0) {
        if (!batch_.accumulate) std::memset(out, 0, static_cast<std::size_t>(width * item));
      } else {
        finish_row(sums + i * stride, bias, width, batch_.accumulate, out);
      }
    }
  }

  const GemmBatch& batch_;
  const KernelSet& kernels_;
  GroupSizes sizes_;
  std::int64_t g_, m_, rows_, n_, columns_;
};

}  // namespace

void run_gemm_batch(const GemmBatch& batch, const KernelSet& kernels, ThreadPool* pool) {
  if (batch.n == 0) return;
  const Tiling tiling = choose_tiling(batch, kernels, pool == nullptr ? 1 : pool->num_threads());
  thread_local std::vector<std::int64_t> task_offsets;  // [groups + 1]
  task_offsets.resize(static_cast<std::size_t>(batch.groups) + 1);
  task_offsets[0] = 0;
  for (std::int64_t g = 0; g < batch.groups; ++g) {
    const GroupSizes sizes = sizes_of(batch, g);
    const std::int64_t tasks = has_work(batch, sizes) ? ceil_div(sizes.m, tiling.max_m) * tiling.num_n : 0;
    task_offsets[static_cast<std::size_t>(g) + 1] = task_offsets[static_cast<std::size_t>(g)] + tasks;
  }
  const std::vector<std::int64_t>& first_task = task_offsets;  // workers read the caller's list
  const auto run_tasks = [&](std::int64_t begin, std::int64_t end) {
    std::int64_t g = std::upper_bound(first_task.begin(), first_task.end(), begin) - first_task.begin() - 1;
    for (std::int64_t task = begin; task < end; ++task) {
      while (task >= first_task[static_cast<std::size_t>(g) + 1]) ++g;
      const std::int64_t local = task - first_task[static_cast<std::size_t>(g)];
      const std::int64_t group_m = sizes_of(batch, g).m;
      const std::int64_t step = round_up(ceil_div(group_m, ceil_div(group_m, tiling.max_m)), kernels.tile_rows);
      const std::int64_t m = local / tiling.num_n * step, n = local % tiling.num_n * tiling.tile_n;
      if (m >= group_m) continue;  // rounding the step up may leave the last tile empty
      Task(batch, kernels, g, m, std::min(step, group_m - m), n, std::min(tiling.tile_n, batch.n - n)).run();
    }
  };
  parallel_for(pool, first_task.back(), 1, run_tasks);
}

}  // namespace waybill::detail
