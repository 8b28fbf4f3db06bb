// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/fp8_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "core/cuda/tensor_map.h"
#include "ops/gemm/cuda/fp8_kernels.h"
#include "ops/gemm/cuda/grouped_launch.h"

namespace waybill::cuda {
namespace {

using fp8_limits::kBlockK;
using gemm_limits::kBlockM;

constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int32_t>::max() - 1024;

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

const Fp8Kernel& find_kernel(const Fp8Problem& p, const GemmTile& tile) {
  for (const Fp8Kernel& kernel : fp8_kernels(p.form, p.output, p.types)) {
    if (kernel.tile == tile) return kernel;
  }
  WB_FAIL(ErrorCode::kUnsupported, "no 8-bit grouped matmul kernel has a tile of {} x {} with {} stages, clusters of {} and {} buffers",
          fp8_limits::block_m(tile), tile.block_n, tile.stages, tile.cluster, tile.buffers);
}

std::int64_t units_of_tiles(std::int64_t m_tiles, std::int64_t n_tiles, int cluster) {
  return cluster == 1 ? m_tiles * n_tiles : m_tiles / 2 * n_tiles + m_tiles % 2 * div_up(n_tiles, 2);
}

CUtensorMap codes_map(const char* name, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns, int box_rows) {
  return make_tensor_map(name, DType::kU8, data, std::max<std::int64_t>(planes, 1), rows, columns, box_rows);
}

void fill_operands(Fp8Params& params, const Fp8Problem& p, const GemmTile& tile) {
  const bool is_tn = p.form == GemmForm::kTN;
  const std::int64_t k_blocks = div_up(p.k, kBlockK);
  params.a = is_tn ? codes_map("a", p.a, p.max_blocks, p.m, kBlockK, 64) : codes_map("a", p.a, 1, p.rows, p.k, 64);
  params.b = is_tn           ? codes_map("b", p.b, p.max_blocks, p.n, kBlockK, tile.block_n / 2)
             : p.b_is_turned ? codes_map("b", p.b, p.groups * k_blocks, p.n, kBlockK, tile.block_n / 2)
                             : codes_map("b", p.b, p.groups, p.n, p.k, tile.block_n / 2);
  params.d = make_tensor_map("d", p.output == GemmOutput::kBf16 ? DType::kBF16 : DType::kF32, p.d, is_tn ? p.groups : 1, is_tn ? p.m : p.rows, p.n,
                             gemm_limits::kBufferRows);
  params.a_scales = p.a_scales, params.b_scales = p.b_scales;
  params.has_scale_map = !is_tn && p.a_scale_stride == 1 && p.a_scale_k % 4 == 0 && reinterpret_cast<std::uintptr_t>(p.a_scales) % 16 == 0;
  if (is_tn) {
    params.a_scale_map = make_row_map("a's scales", p.a_scales, p.max_blocks, p.m, p.m, fp8_limits::block_m(tile));
    params.b_scale_map = make_row_map("b's scales", p.b_scales, p.max_blocks, p.n, p.n, tile.block_n);
  } else if (params.has_scale_map) {
    params.a_scale_map = make_row_map("a's scales", p.a_scales, k_blocks, p.rows, p.a_scale_k, fp8_limits::scale_box(fp8_limits::block_m(tile)));
  }
  params.a_scale_stride = is_tn ? p.m : p.a_scale_stride, params.a_scale_k = p.a_scale_k, params.b_scale_stride = p.n;
  params.b_scale_group = p.b_scale_group, params.b_scale_column = p.b_scale_column, params.b_scale_k = p.b_scale_k;
  params.b_blocks = p.b_is_turned ? static_cast<int>(k_blocks) : 0, params.max_blocks = static_cast<int>(p.max_blocks);
}

}  // namespace

std::span<const Fp8Kernel> fp8_kernels(GemmForm form, GemmOutput output, Fp8Types types) {
  using Table = std::span<const Fp8Kernel> (*)();
  static constexpr Table kNt[2][3] = {{fp8_kernels_nt_e4m3_bf16, fp8_kernels_nt_e4m3_f32, fp8_kernels_nt_e4m3_add},
                                      {fp8_kernels_nt_e5m2_e4m3_bf16, fp8_kernels_nt_e5m2_e4m3_f32, fp8_kernels_nt_e5m2_e4m3_add}};
  static constexpr Table kTn[3][3] = {{fp8_kernels_tn_e4m3_bf16, fp8_kernels_tn_e4m3_f32, fp8_kernels_tn_e4m3_add},
                                      {fp8_kernels_tn_e5m2_e4m3_bf16, fp8_kernels_tn_e5m2_e4m3_f32, fp8_kernels_tn_e5m2_e4m3_add},
                                      {fp8_kernels_tn_e4m3_e5m2_bf16, fp8_kernels_tn_e4m3_e5m2_f32, fp8_kernels_tn_e4m3_e5m2_add}};
  const auto t = static_cast<std::size_t>(types), o = static_cast<std::size_t>(output);
  if (form == GemmForm::kTN) return kTn[t][o]();
  if (form != GemmForm::kNT || t > 1) return {};
  return kNt[t][o]();
}

std::string refuse_fp8(const Fp8Problem& p, int device) {
  int major = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return fmt::format("needs compute capability 9.0, cuda:{} has {}.x", device, major);
  for (const auto& [name, value] : {std::pair("rows", p.rows), std::pair("m", p.m), std::pair("n", p.n), std::pair("k", p.k), std::pair("groups", p.groups),
                                    std::pair("blocks", p.max_blocks), std::pair("blocks of b", p.groups * div_up(p.k, kBlockK))}) {
    if (value > kMaxExtent) return fmt::format("{} = {} exceeds {}", name, value, kMaxExtent);
  }
  if (p.form == GemmForm::kNT && p.types == Fp8Types::kE4M3E5M2) return "takes E5M2 rows, or E4M3 rows and weights, but no E5M2 weights";
  if (p.form == GemmForm::kNT && p.k == 0) return "nothing to contract";
  if (p.form == GemmForm::kNT && p.k % 16 != 0) return fmt::format("rows must be multiples of 16 bytes: k = {}", p.k);
  if (p.n % 8 != 0 || p.m % 8 != 0) return fmt::format("the result's rows and columns must be multiples of 8: m = {}, n = {}", p.m, p.n);
  for (const auto& [name, pointer] : {std::pair("a", p.a), std::pair("b", p.b), std::pair("d", static_cast<const void*>(p.d)),
                                      std::pair("a's scales", p.form == GemmForm::kTN ? static_cast<const void*>(p.a_scales) : nullptr),
                                      std::pair("b's scales", p.form == GemmForm::kTN ? static_cast<const void*>(p.b_scales) : nullptr)}) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return fmt::format("{} is not aligned to 16 bytes: {}", name, fmt::ptr(pointer));
  }
  if (p.bias != nullptr && reinterpret_cast<std::uintptr_t>(p.bias) % 8 != 0) return fmt::format("bias is not aligned to 8 bytes: {}", fmt::ptr(p.bias));
  return {};
}

std::string describe(const Fp8Tuning& t) {
  return fmt::format("{}x{}x128, {} stages, cluster {}, {} buffers, band {}", fp8_limits::block_m(t.tile), t.tile.block_n, t.tile.stages, t.tile.cluster,
                     t.tile.buffers, t.band);
}

void run_fp8(const Fp8Problem& p, const Fp8Tuning& tuning, int device, cudaStream_t stream) {
  const bool is_tn = p.form == GemmForm::kTN;
  if (p.groups == 0 || p.n == 0 || (is_tn ? p.m == 0 : p.rows == 0)) return;
  const GemmTile& tile = tuning.tile;
  const Fp8Kernel& kernel = find_kernel(p, tile);
  const GroupedLaunch launch{reinterpret_cast<const void*>(kernel.kernel), tile.cluster, static_cast<std::size_t>(fp8_limits::shared_bytes(p.form, tile)),
                             tile.block_n, 128 * (1 + fp8_limits::math_groups(tile))};
  const int clusters = resident_clusters(launch, device);
  const std::int64_t n_tiles = div_up(p.n, tile.block_n);
  Fp8Params params{};
  fill_operands(params, p, tile);
  params.offsets = p.offsets, params.groups = static_cast<int>(p.groups), params.rows = static_cast<int>(p.rows);
  params.m = static_cast<int>(p.m), params.n = static_cast<int>(p.n), params.k = static_cast<int>(p.k);
  params.d_stride = p.n, params.d_plane = p.m * p.n;
  params.cuts_last_round = tuning.cuts_last_round, params.prefetches_sums = tuning.prefetches_sums;
  params.band = tuning.band, params.d_data = p.d, params.bias = p.bias, params.status = p.status;
  params.num_passes = 1, params.slices_per_cluster = 1, params.min_slice_blocks = std::numeric_limits<int>::max() / 4;
  std::int64_t units = std::min<std::int64_t>((p.rows / kBlockM + p.groups) * n_tiles, clusters);
  std::size_t split_units = 0;
  if (is_tn) {
    const std::int64_t tiles = units_of_tiles(div_up(p.m, fp8_limits::block_m(tile)), n_tiles, tile.cluster);
    // As run_grouped() does: one group of many tiles fills the GPU by itself.
    if (tuning.slices_per_cluster > 0 && tiles < tuning.slices_per_cluster * clusters && p.rows >= 2 * kBlockK * tuning.min_slice_blocks) {
      params.slices_per_cluster = tuning.slices_per_cluster, params.min_slice_blocks = std::max(tuning.min_slice_blocks, 8);
      params.max_split_units = gemm_limits::max_split_units(clusters, tuning.slices_per_cluster);
      split_units = static_cast<std::size_t>(params.max_split_units);
      params.num_passes = static_cast<int>(std::clamp<std::int64_t>(1024 / p.groups, 2, 12));
    }
    params.slice_tiles = static_cast<int>(tiles);
    units = std::min<std::int64_t>(p.groups * tiles + params.max_split_units, clusters);
  }
  // Partial tiles of two warpgroups are what the scratch counts.
  const std::size_t partials = div_up(static_cast<std::int64_t>(split_units) * tile.cluster * fp8_limits::math_groups(tile), 2);
  const GroupedScratch& scratch = grouped_scratch(device, stream, partials, static_cast<std::size_t>(kBlockM * tile.block_n));
  params.ticket = scratch.ticket.as<std::uint32_t>(), params.arrivals = scratch.arrivals.as<std::uint32_t>(), params.partials = scratch.partials.as<float>();
  launch_grouped(launch, static_cast<int>(units), tuning.overlap, stream, &params);
}

Fp8Tuning choose_fp8_tuning(const Fp8Problem& p, int num_sms) {
  Fp8Tuning best;
  best.band = p.form == GemmForm::kTN || (p.k >= 4096 && p.n > 2048) ? 8 : 2;  // measured (docs/perf/grouped-gemm-fp8.md)
  if (p.form == GemmForm::kTN) {
    const bool adds = p.output == GemmOutput::kAddF32, fetches = adds && p.rows <= gemm_limits::kFetchedRows * std::max<std::int64_t>(p.groups, 1);
    // 128 x 192 or 192 x 128: at the same rate (docs/perf/grouped-gemm-fp8.md), so the one that computes less beyond the edges.
    const std::int64_t wide = div_up(p.m, 128) * div_up(p.n, 192), high = div_up(p.m, 192) * div_up(p.n, 128);
    best.prefetches_sums = adds && !fetches && p.rows <= (high <= wide ? 2048 : 1024) * std::max<std::int64_t>(p.groups, 1);  // measured, likewise
    if (high <= wide) {
      best.tile = fetches ? GemmTile{128, 3, 2, 4} : GemmTile{128, 4, 2, 2};
    } else {
      best.tile = fetches ? GemmTile{192, 3, 2, 6} : (adds ? GemmTile{192, 4, 2, 2} : GemmTile{192, 4, 2, 3});
    }
    return best;
  }
  struct Choice {
    GemmTile tile;
    double cost, short_cost;  // of a full wave, beside its size; the second where 256 columns take few waves: results in flight count more there
  };
  static constexpr Choice kChoices[] = {{{256, 4, 2, 2}, 1.0, 1.0}, {{128, 5, 2, 2}, 1.15, 1.15}, {{128, 5, 1, 2}, 1.2, 1.2}, {{128, 4, 2, 2}, 1.1, 0.95}};
  const std::int64_t mean = div_up(p.rows, std::max<std::int64_t>(p.groups, 1));
  double best_cost = 0;
  bool is_short = false;
  for (const Choice& choice : kChoices) {
    const int rows = fp8_limits::block_m(choice.tile);
    const std::int64_t units = p.groups * units_of_tiles(div_up(mean, rows), div_up(p.n, choice.tile.block_n), choice.tile.cluster);
    const std::int64_t clusters = num_sms / choice.tile.cluster, last = units % clusters;
    const bool is_cut = choice.tile.block_n == 256 && p.output == GemmOutput::kBf16 && units > clusters && last > 0 && 2 * last <= clusters;
    const double rounds = static_cast<double>(div_up(units, clusters)) - (is_cut ? 0.5 : 0.0);
    if (choice.tile.block_n == 256) is_short = rounds <= 4;
    const double cost = rounds * choice.tile.block_n * rows / kBlockM * (is_short ? choice.short_cost : choice.cost);
    if (best_cost == 0 || cost < best_cost) best.tile = choice.tile, best_cost = cost;
  }
  return best;
}

}  // namespace waybill::cuda
