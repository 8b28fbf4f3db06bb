// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "bench/negative/cuda/unordered_wgrad.h"
#include "core/cuda/tensor_map.h"
#include "ops/gemm/cuda/grouped_launch.h"
#include "ops/gemm/cuda/grouped_sm90.cuh"

namespace waybill::cuda {
namespace {

// As the library's widest tile that adds to D; a type of its own, for meet_slices() below.
struct UnorderedConfig : GroupedConfig<GemmForm::kTN, GemmOutput::kAddF32, 256, 4, 2, 2> {};

}  // namespace

// Every slice stores what it has.
template <>
__device__ __forceinline__ bool meet_slices<UnorderedConfig>(float (&)[UnorderedConfig::kBlockN / 2], const GroupedParams&, const Unit&, int, int, int*) {
  return true;
}

void launch_unordered_wgrad(const UnorderedWgrad& w, int device, cudaStream_t stream) {
  constexpr GemmTile kTile{256, 4, 2, 2};
  const auto kernel = grouped_gemm_sm90<UnorderedConfig>;
  const GroupedLaunch launch{reinterpret_cast<const void*>(kernel), kTile.cluster, static_cast<std::size_t>(gemm_limits::shared_bytes(kTile)), kTile.block_n};
  const int clusters = resident_clusters(launch, device);
  GroupedParams p{};
  p.a = make_tensor_map("a", DType::kBF16, w.a, 0, w.rows, w.m, gemm_limits::kBlockK / 2);
  p.b = make_tensor_map("b", DType::kBF16, w.b, 1, w.rows, w.n, gemm_limits::kBlockK / 2);
  p.d = make_strided_tensor_map("d", DType::kF32, w.d, w.groups, w.m, w.n, w.n, w.m * w.n, gemm_limits::kBufferRows);
  p.offsets = w.offsets, p.groups = static_cast<int>(w.groups), p.rows = static_cast<int>(w.rows);
  p.m = static_cast<int>(w.m), p.n = static_cast<int>(w.n), p.band = 8;
  p.a_data = w.a, p.b_data = w.b, p.d_data = w.d, p.d_stride = w.n, p.d_plane = w.m * w.n;
  constexpr int kNever = std::numeric_limits<int>::max() / 4;
  p.slices_per_cluster = 1, p.slice_tiles = 0, p.min_slice_blocks = w.blocks_per_slice > 0 ? w.blocks_per_slice : kNever;
  p.max_split_units = kNever;  // no partial tiles: no limit
  p.num_passes = w.blocks_per_slice > 0 ? static_cast<int>(std::clamp<std::int64_t>(1024 / w.groups, 2, 12)) : 1;
  const GroupedScratch& scratch = grouped_scratch(device, stream, 1, 1);
  p.ticket = scratch.ticket.as<std::uint32_t>(), p.arrivals = scratch.arrivals.as<std::uint32_t>(), p.partials = scratch.partials.as<float>();
  launch_grouped(launch, clusters, /*overlap=*/false, stream, &p);
}

}  // namespace waybill::cuda
