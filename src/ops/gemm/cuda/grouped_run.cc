// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/cuda/grouped_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "core/cuda/tensor_map.h"
#include "ops/gemm/cuda/grouped_kernels.h"
#include "ops/gemm/cuda/grouped_launch.h"
#include "ops/gemm/cuda/grouped_weight_sum.h"

namespace waybill::cuda {
namespace {

using gemm_limits::kBlockK;
using gemm_limits::kBlockM;

constexpr std::int64_t kMaxExtent = std::numeric_limits<std::int32_t>::max() - 1024;  // coordinates of tensor maps are int32

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

const GemmKernel& find_kernel(GemmForm form, GemmOutput output, GemmEpilogue epilogue, const GemmTile& tile) {
  for (const GemmKernel& kernel : grouped_kernels(form, output, epilogue)) {
    if (kernel.tile == tile) return kernel;
  }
  WB_FAIL(ErrorCode::kUnsupported, "no grouped matmul kernel has a tile of 128 x {} with {} stages, clusters of {} and {} buffers", tile.block_n, tile.stages,
          tile.cluster, tile.buffers);
}

GroupedLaunch launch_of(const GemmKernel& kernel) {
  return {reinterpret_cast<const void*>(kernel.kernel), kernel.tile.cluster, static_cast<std::size_t>(gemm_limits::shared_bytes(kernel.tile)),
          kernel.tile.block_n};
}

std::int64_t units_of_tiles(std::int64_t m_tiles, std::int64_t n_tiles, int cluster) {
  return cluster == 1 ? m_tiles * n_tiles : m_tiles / 2 * n_tiles + m_tiles % 2 * div_up(n_tiles, 2);
}

// Maps and pointers of an activation; returns the floats of scratch that sums for d_weight take.
std::size_t fill_activation(GroupedParams& params, const GroupedProblem& p) {
  const GroupedActivation& act = p.activation;
  const bool gated = is_gated(act.kind), is_forward = act.epilogue == GemmEpilogue::kActivation;
  const std::int64_t F = is_forward && gated ? p.n / 2 : p.n, planes = gated ? 2 : 1;
  const auto planes_of = [&](const char* name, const void* data) {
    return make_strided_tensor_map(name, DType::kBF16, data, planes, p.rows, F, planes * F, F, gemm_limits::kBufferRows);
  };
  if (is_forward) {
    params.d = make_tensor_map("the activation", DType::kBF16, p.d, 1, p.rows, F, gemm_limits::kBufferRows);
  } else {
    params.d = planes_of("the gradient of the pre-activation", p.d);
  }
  if (act.h != nullptr) params.h = planes_of("the pre-activation", act.h);
  params.act_kind = act.kind, params.act_limit = act.limit, params.act_alpha = act.alpha, params.h_data = act.h, params.row_weight = act.row_weight;
  return is_forward || act.d_weight == nullptr ? 0 : static_cast<std::size_t>(p.rows * div_up(F, 64));
}

}  // namespace

std::span<const GemmKernel> grouped_kernels(GemmForm form, GemmOutput output, GemmEpilogue epilogue) {
  if (epilogue != GemmEpilogue::kPlain) {
    WB_CHECK(form != GemmForm::kTN && output == GemmOutput::kBf16, "activations belong to forms 0 and 1 with bf16 results, got form {} and output {}",
             static_cast<int>(form), static_cast<int>(output));
    if (epilogue == GemmEpilogue::kActivation) return form == GemmForm::kNT ? grouped_kernels_nt_activation() : grouped_kernels_nn_activation();
    return form == GemmForm::kNT ? grouped_kernels_nt_gradient() : grouped_kernels_nn_gradient();
  }
  using Table = std::span<const GemmKernel> (*)();
  static constexpr Table kTables[3][3] = {{grouped_kernels_nt_bf16, grouped_kernels_nt_f32, grouped_kernels_nt_add},
                                          {grouped_kernels_nn_bf16, grouped_kernels_nn_f32, grouped_kernels_nn_add},
                                          {grouped_kernels_tn_bf16, grouped_kernels_tn_f32, grouped_kernels_tn_add}};
  return kTables[static_cast<int>(form)][static_cast<int>(output)]();
}

std::string refuse_grouped(const GroupedProblem& p, int device) {
  int major = 0;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (major != 9) return fmt::format("needs compute capability 9.0, cuda:{} has {}.x", device, major);
  for (const auto& [name, value] : {std::pair("rows", p.rows), std::pair("m", p.m), std::pair("n", p.n), std::pair("k", p.k), std::pair("groups", p.groups),
                                    std::pair("a_rows", p.a_rows), std::pair("b_rows", p.b_rows)}) {
    if (value > kMaxExtent) return fmt::format("{} = {} exceeds {}", name, value, kMaxExtent);
  }
  const std::int64_t contiguous_a = p.form == GemmForm::kTN ? p.m : p.k, contiguous_b = p.form == GemmForm::kNT ? p.k : p.n;
  if (contiguous_a % 8 != 0 || contiguous_b % 8 != 0 || p.n % 8 != 0) {
    return fmt::format("rows must be multiples of 16 bytes (8 bf16): {} and {} elements, {} of the result", contiguous_a, contiguous_b, p.n);
  }
  for (const auto& [name, pointer] : {std::pair("a", p.a), std::pair("b", p.b), std::pair("d", static_cast<const void*>(p.d))}) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) return fmt::format("{} is not aligned to 16 bytes: {}", name, fmt::ptr(pointer));
  }
  const GroupedActivation& act = p.activation;
  if (act.epilogue != GemmEpilogue::kPlain) {
    if (p.form == GemmForm::kTN || p.output != GemmOutput::kBf16) return "an activation needs a bf16 result of a row-ragged product";
    if (act.epilogue == GemmEpilogue::kActivation && is_gated(act.kind) && p.n % 16 != 0)
      return fmt::format("gate and up must be multiples of 8 wide, got {} together", p.n);
    if (reinterpret_cast<std::uintptr_t>(act.h) % 16 != 0) return fmt::format("h is not aligned to 16 bytes: {}", fmt::ptr(act.h));
    if (act.epilogue == GemmEpilogue::kActivationGradient && act.h == nullptr) return "the gradient needs the pre-activation";
    if (act.epilogue == GemmEpilogue::kActivationGradient && p.bias != nullptr) return "the gradient takes no bias";
  }
  if (p.bias != nullptr && reinterpret_cast<std::uintptr_t>(p.bias) % 8 != 0) return fmt::format("bias is not aligned to 8 bytes: {}", fmt::ptr(p.bias));
  // The gathering warps count in pieces of 16 bytes.
  const std::int64_t a_pieces = p.a_list != nullptr ? p.a_rows * contiguous_a / 8 : 0, b_pieces = p.b_list != nullptr ? p.b_rows * contiguous_b / 8 : 0;
  if (std::max(a_pieces, b_pieces) >= std::int64_t{0xffffffff})
    return fmt::format("reads 64 GiB through a list at most, got {} x 16 bytes", std::max(a_pieces, b_pieces));
  if (p.b_list != nullptr && (p.form != GemmForm::kTN || p.a_list != nullptr)) return "reads one operand through a list, and b in kTN only";
  if (p.form != GemmForm::kTN && p.k == 0) return "nothing to contract";
  return {};
}

std::string describe(const GemmTuning& t) {
  return fmt::format("128x{}x64, {} stages, cluster {}, {} buffers, band {}{}", t.tile.block_n, t.tile.stages, t.tile.cluster, t.tile.buffers, t.band,
                     t.long_batch > 0 ? fmt::format(", long {}", t.long_batch) : "");
}

void run_grouped(const GroupedProblem& problem, const GemmTuning& tuning, int device, cudaStream_t stream) {
  const GroupedProblem& p = problem;
  const bool is_tn = p.form == GemmForm::kTN;
  if (p.groups == 0 || p.n == 0 || (is_tn ? p.m == 0 : p.rows == 0)) return;
  const GemmKernel& kernel = find_kernel(p.form, p.output, p.activation.epilogue, tuning.tile);
  const GroupedLaunch launch = launch_of(kernel);
  const int clusters = resident_clusters(launch, device);
  const std::int64_t n_tiles = div_up(p.n, tuning.tile.block_n);
  const auto map = [](const char* name, const void* data, std::int64_t planes, std::int64_t rows, std::int64_t columns, int box_rows) {
    return make_tensor_map(name, DType::kBF16, data, planes, rows, columns, box_rows);
  };
  GroupedParams params{};
  const std::int64_t a_rows = p.a_list != nullptr ? p.a_rows : p.rows;
  params.a = is_tn ? map("a", p.a, 0, a_rows, p.m, kBlockK / 2) : map("a", p.a, 0, a_rows, p.k, kBlockM / 2);
  const auto weights = [&](std::int64_t rows, std::int64_t columns, int box_rows) {
    const std::int64_t stride = p.b_row_stride > 0 ? p.b_row_stride : columns, plane = p.b_plane > 0 ? p.b_plane : rows * columns;
    return make_strided_tensor_map("b", DType::kBF16, p.b, p.groups, rows, columns, stride, plane, box_rows);
  };
  params.b = p.form == GemmForm::kNT   ? weights(p.n, p.k, tuning.tile.block_n / 2)
             : p.form == GemmForm::kNN ? weights(p.k, p.n, kBlockK / 2)
                                       : map("b", p.b, 1, p.b_list != nullptr ? p.b_rows : p.rows, p.n, kBlockK / 2);
  const std::int64_t whole_m = p.whole_m > 0 ? p.whole_m : p.m, whole_n = p.whole_n > 0 ? p.whole_n : p.n;
  params.d_stride = whole_n, params.d_plane = whole_m * whole_n;
  params.d = make_strided_tensor_map("d", p.output == GemmOutput::kBf16 ? DType::kBF16 : DType::kF32, p.d, is_tn ? p.groups : 1, is_tn ? p.m : p.rows, p.n,
                                     whole_n, is_tn ? whole_m * whole_n : p.rows * p.n, gemm_limits::kBufferRows);
  std::size_t part_floats = 0;
  if (p.activation.epilogue != GemmEpilogue::kPlain) part_floats = fill_activation(params, p);
  params.offsets = p.offsets, params.groups = static_cast<int>(p.groups), params.rows = static_cast<int>(p.rows);
  params.m = static_cast<int>(p.m), params.n = static_cast<int>(p.n), params.k = static_cast<int>(p.k);
  params.band = tuning.band, params.a_list = p.a_list, params.a_data = p.a, params.a_rows = static_cast<int>(p.a_rows), params.d_data = p.d,
  params.b_list = p.b_list, params.b_data = p.b, params.b_rows = static_cast<int>(p.b_rows), params.bias = p.bias, params.status = p.status;
  std::int64_t units = 0;
  std::size_t split_units = 0;
  params.num_passes = 1, params.slices_per_cluster = 1, params.min_slice_blocks = std::numeric_limits<int>::max() / 4;
  if (is_tn) {
    const std::int64_t tiles = units_of_tiles(div_up(whole_m, kBlockM), div_up(whole_n, tuning.tile.block_n), tuning.tile.cluster);
    params.slice_tiles = static_cast<int>(tiles);
    // One group of many tiles fills the GPU by itself.
    if (tuning.slices_per_cluster > 0 && tiles < tuning.slices_per_cluster * clusters && p.rows >= 2 * kBlockK * tuning.min_slice_blocks) {
      params.slices_per_cluster = tuning.slices_per_cluster, params.min_slice_blocks = std::max(tuning.min_slice_blocks, 8);
      params.max_split_units = gemm_limits::max_split_units(clusters, tuning.slices_per_cluster);
      split_units = static_cast<std::size_t>(params.max_split_units);
      params.num_passes = static_cast<int>(std::clamp<std::int64_t>(1024 / p.groups, 2, 12));
    }
    params.long_batch = params.max_split_units == 0 && p.groups > 1 ? tuning.long_batch : 0;
    units = std::min<std::int64_t>(p.groups * tiles + params.max_split_units, clusters);
  } else {
    units = std::min<std::int64_t>((p.rows / kBlockM + p.groups) * n_tiles, clusters);
  }
  const std::size_t split_tiles = split_units * static_cast<std::size_t>(tuning.tile.cluster);
  const GroupedScratch& scratch = grouped_scratch(device, stream, part_floats > 0 ? 1 : split_tiles,
                                                  part_floats > 0 ? part_floats : static_cast<std::size_t>(kBlockM * tuning.tile.block_n));
  params.ticket = scratch.ticket.as<std::uint32_t>(), params.arrivals = scratch.arrivals.as<std::uint32_t>(), params.partials = scratch.partials.as<float>();
  if (part_floats > 0) params.weight_parts = scratch.partials.as<float>();
  launch_grouped(launch, static_cast<int>(units), tuning.overlap, stream, &params);
  if (part_floats > 0) launch_weight_sum({params.weight_parts, p.offsets + p.groups, p.rows, div_up(p.n, 64), p.activation.d_weight}, stream);
}

std::string refuse_for_speed(const GroupedProblem& p) {
  if (p.activation.epilogue != GemmEpilogue::kActivationGradient) return {};
  return "the gradient's epilogue is not hidden behind the next tile: the two calls are as fast or faster";
}

GemmTuning choose_tuning(const GroupedProblem& p, int num_sms) {
  // What a full wave of each tile costs, beside its width; measured (docs/perf/grouped-gemm.md).
  struct Choice {
    GemmTile tile;
    double cost;
  };
  static constexpr Choice kWithActivation[] = {{{256, 4, 2, 2}, 1.0}, {{128, 6, 2, 2}, 1.1}}, kWithGradient[] = {{{256, 3, 2, 4}, 1.0}, {{128, 5, 2, 4}, 1.0}};
  static constexpr Choice kWithSums[] = {{{256, 3, 2, 4}, 1.0}, {{128, 5, 2, 4}, 1.1}};  // wgrad that adds to D
  static constexpr Choice kPlain[] = {
      {{256, 4, 2, 2}, 1.0}, {{192, 4, 2, 3}, 1.05}, {{128, 6, 2, 2}, 1.1}, {{256, 4, 1, 2}, 1.06}, {{128, 6, 1, 2}, 1.14},
  };
  GemmTuning best;
  double best_cost = 0;
  const std::int64_t mean_rows = div_up(p.rows, std::max<std::int64_t>(p.groups, 1));
  const bool fetches = p.form == GemmForm::kTN && p.output == GemmOutput::kAddF32 && mean_rows <= gemm_limits::kFetchedRows;
  const std::span<const Choice> choices = fetches                                              ? std::span<const Choice>(kWithSums)
                                          : p.activation.epilogue == GemmEpilogue::kPlain      ? std::span<const Choice>(kPlain)
                                          : p.activation.epilogue == GemmEpilogue::kActivation ? std::span<const Choice>(kWithActivation)
                                                                                               : std::span<const Choice>(kWithGradient);
  for (const Choice& choice : choices) {
    // Short groups leave the longer epilogue of wide tiles bare.
    if (p.activation.epilogue == GemmEpilogue::kActivationGradient && choice.tile.block_n != (mean_rows < 512 ? 128 : 256)) continue;
    // wgrad is bound by the operands' way to the tensor cores: narrow tiles only where the result is narrow, or where D's values take the time (measured).
    if (p.form == GemmForm::kTN &&
        (choice.tile.block_n != (p.n <= 128 || (fetches && p.n >= p.m) ? 128 : 256) || (choice.tile.block_n == 256 && choice.tile.cluster == 1)))
      continue;
    const std::int64_t mean = p.form == GemmForm::kTN ? p.m : div_up(p.rows, std::max<std::int64_t>(p.groups, 1));
    const std::int64_t units = p.groups * units_of_tiles(div_up(mean, kBlockM), div_up(p.n, choice.tile.block_n), choice.tile.cluster);
    const double cost = static_cast<double>(div_up(units, num_sms / choice.tile.cluster) * choice.tile.block_n) * choice.cost;
    if (best_cost == 0 || cost < best_cost) best.tile = choice.tile, best_cost = cost;
  }
  // Reductions are bound by the L2's adds: beside them the tensor cores have time for long groups (measured; stored results and fetched values: slower).
  if (p.form == GemmForm::kTN && p.output == GemmOutput::kAddF32 && !fetches) best.long_batch = 16;
  return best;
}

}  // namespace waybill::cuda
