// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/widened_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "core/cuda/cuda_error.h"
#include "core/cuda/tensor_map.h"
#include "ops/gemm/cuda/grouped_launch.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kMinRing = 4 * kWidenedBand;  // blocks of rows: what is read, what comes next, and room to run ahead

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_mxfp8(const QuantConfig& c) { return c.element == ElementFormat::kE4M3 && c.scale == ScaleFormat::kE8M0 && c.block_rows == 1 && c.block_columns == 32; }
bool is_nvfp4(const QuantConfig& c) { return c.element == ElementFormat::kE2M1 && c.scale == ScaleFormat::kE4M3 && c.block_rows == 1 && c.block_columns == 16; }

// Slots of both rings; 0: no room.
struct Rings {
  std::int64_t blocks = 0, groups = 0;
};
Rings rings_of(const WidenedProblem& p) {
  const std::int64_t weights = p.n * p.k, block = kWidenedRows * p.k, all_blocks = p.rows / kWidenedRows + p.groups;
  Rings r;
  r.groups = std::clamp<std::int64_t>(p.wide_elements / 2 / weights, std::min<std::int64_t>(p.groups, 2), p.groups);
  if (p.wide_elements - r.groups * weights > all_blocks * block) r.groups = std::min(p.groups, (p.wide_elements - all_blocks * block) / weights);
  r.blocks = std::min((p.wide_elements - r.groups * weights) / block, all_blocks);
  if (r.blocks < std::min(kMinRing, all_blocks)) return {};
  return r;
}

CodedSource source_of(const QuantizedView& q, std::uint16_t* wide) {
  CodedSource s{};
  s.codes = static_cast<const std::uint8_t*>(q.codes.data), s.code_stride = q.codes.stride[0];
  s.scales = static_cast<const std::uint8_t*>(q.scales.data), s.scale_stride = q.scales.stride[0];
  s.group_scales = static_cast<const float*>(q.group_scales ? q.group_scales.data : nullptr), s.wide = wide;
  return s;
}

GroupedLaunch launch_of(bool is_e4m3) {
  return {is_e4m3 ? widened_nt_e4m3() : widened_nt_e2m1(), kWidenedTile.cluster, static_cast<std::size_t>(gemm_limits::shared_bytes(kWidenedTile)),
          kWidenedTile.block_n};
}

}  // namespace

std::string refuse_widened(const WidenedProblem& p, int device) {
  int major = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return fmt::format("needs compute capability 9.0, cuda:{} has {}.x", device, major);
  const bool are_mxfp8 = is_mxfp8(p.row_config) && is_mxfp8(p.weight_config), are_nvfp4 = is_nvfp4(p.row_config) && is_nvfp4(p.weight_config);
  if (!are_mxfp8 && !are_nvfp4) return "takes MXFP8 (E4M3) and NVFP4 with blocks along the contraction in both operands";
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1024;
  if (std::max({p.rows, p.n, p.k, p.groups, p.rows / kWidenedRows + p.groups * (1 + div_up(p.n, kWidenedRows))}) > kMost / kWidenedRows * 128) {
    return fmt::format("extents are too large: {} rows, {} groups of [{}, {}]", p.rows, p.groups, p.n, p.k);
  }
  if (p.k % 32 != 0 || p.k < 256 || p.n % 8 != 0 || p.n == 0) return fmt::format("takes k in 32s from 256 on and n in eights, got {} and {}", p.k, p.n);
  constexpr std::int64_t kAligned = 8;
  for (const QuantizedView* q : {&p.coded_rows, &p.coded_weights}) {
    if (!q->codes || !q->scales || q->codes.stride[1] != 1 || q->scales.stride[1] != 1) return "needs codes and scales with adjacent columns";
    if (reinterpret_cast<std::uintptr_t>(q->codes.data) % static_cast<std::uintptr_t>(kAligned) != 0 || q->codes.stride[0] % kAligned != 0) {
      return fmt::format("needs codes aligned to {} bytes", kAligned);
    }
  }
  if (reinterpret_cast<std::uintptr_t>(p.d) % 16 != 0 || reinterpret_cast<std::uintptr_t>(p.bias) % 8 != 0) return "the result or the bias is not aligned";
  if (p.coded_rows.scales.shape[0] < p.rows || p.coded_weights.scales.shape[0] < p.groups * p.n) return "needs scales of all rows";
  if (rings_of(p).blocks == 0) return "has no room beside a group's weights";
  return {};
}

void run_widened(const WidenedProblem& p, const WidenedTuning& tuning, int device, cudaStream_t stream) {
  const Rings rings = rings_of(p);
  const detail::WidenedRoom room = detail::widened_room(p.rows, p.groups, p.n);
  const GroupedLaunch launch = launch_of(is_mxfp8(p.row_config));
  const int clusters = resident_clusters(launch, device);
  auto* words = reinterpret_cast<std::uint32_t*>(p.room);
  WidenedParams w{};
  auto* wide = static_cast<std::uint16_t*>(p.wide);
  w.weights = source_of(p.coded_weights, wide), w.rows = source_of(p.coded_rows, wide + rings.groups * p.n * p.k);
  w.first_block = p.room + room.first_block, w.first_turn = p.room + room.first_turn;
  w.rows_ready = words + room.rows_ready, w.weights_ready = words + room.weights_ready;
  w.rows_read = words + room.rows_read, w.weights_read = words + room.weights_read;
  w.next_piece = words + room.tickets, w.next_unit = words + room.tickets + 1;
  w.weight_blocks = static_cast<int>(div_up(p.n, kWidenedRows));
  w.ring_blocks = static_cast<int>(rings.blocks), w.ring_groups = static_cast<int>(rings.groups);
  w.piece_rows = static_cast<int>(std::bit_floor(static_cast<std::uint64_t>(std::clamp<std::int64_t>(tuning.piece_elements / p.k, 1, 64))));
  w.piece_shift = std::countr_zero(static_cast<unsigned>(kWidenedRows / w.piece_rows));
  w.opening_turns = tuning.opening_blocks;
  GroupedParams& g = w.product;
  g.a = make_tensor_map("rows", DType::kBF16, w.rows.wide, 0, rings.blocks * kWidenedRows, p.k, gemm_limits::kBlockM / 2);
  g.b = make_tensor_map("weights", DType::kBF16, w.weights.wide, rings.groups, p.n, p.k, kWidenedTile.block_n / 2);
  g.d = make_strided_tensor_map("d", DType::kBF16, p.d, 1, p.rows, p.n, p.n, p.rows * p.n, gemm_limits::kBufferRows);
  g.offsets = p.room, g.groups = static_cast<int>(p.groups), g.rows = static_cast<int>(p.rows), g.n = static_cast<int>(p.n), g.k = static_cast<int>(p.k);
  g.band = tuning.band, g.d_data = p.d, g.d_stride = p.n, g.d_plane = p.n, g.bias = p.bias;
  g.num_passes = 1, g.slices_per_cluster = 1, g.min_slice_blocks = std::numeric_limits<int>::max() / 4;
  launch_widened_setup({p.offsets, p.room, p.room + room.first_block, p.room + room.first_turn, words + room.counts, room.words - room.counts, g.groups, g.rows,
                        w.weight_blocks, p.status},
                       stream);
  check_launch("widened_setup");
  const std::int64_t units = std::min<std::int64_t>((p.rows / gemm_limits::kBlockM + p.groups) * div_up(p.n, kWidenedTile.block_n), clusters);
  launch_grouped(launch, static_cast<int>(units), true, stream, &w);
}

}  // namespace waybill::cuda
