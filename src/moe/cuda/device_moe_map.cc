// SPDX-License-Identifier: Apache-2.0
// The dense-map path: taken, logged and counted where compact routes are not legal (DenseMapReason). Behind the plan all steps are the same.
#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/cuda/reduce_counts.h"
#include "moe/cuda/sent_routes.h"
#include "waybill/log.h"

namespace waybill::cuda {

// Known on the host before anything of the batch is queued, but for what replayed routes hold.
std::uint32_t DeviceMoeLayer::Impl::dense_reasons(const Forward& f) {
  std::uint32_t reasons = device_dense_reasons(config, options);
  if (!f.options.dense_maps.empty()) reasons |= kDenseMapCallerMap;
  if (!f.options.replay_ids.empty() && looks_for_duplicates(config, options) && has_duplicate_ids(f)) reasons |= kDenseMapDuplicateIds;
  if (reasons == kDenseMapNone) return reasons;
  const std::string text = describe_dense_map(reasons);
  if (!config.allow_dense_map) WB_FAIL(ErrorCode::kUnsupported, "compact routes are not legal and allow_dense_map is off: {}", text);
  warn_once("moe.dense_map:" + text, "MoE layer takes the dense-map path, which is slow: " + text);
  if (f.options.training) ++dense_forwards;
  return reasons;
}

// Every rank looks at its own rows; the sum over the ranks is what all of them go by. While a graph is captured nothing can be asked: routes with
// duplicates then set kStatusDuplicateId.
bool DeviceMoeLayer::Impl::has_duplicate_ids(const Forward& f) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  WB_TRY_CUDA(cudaStreamIsCapturing(f.stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return false;
  ReduceCountsArgs args{};
  args.ranks = ranks, args.window = windows.votes, args.n = 1, args.E = 1, args.first = 1;
  for (std::size_t i = 0; i < count(); ++i) {
    const TensorView& ids = f.options.replay_ids[i];
    auto* found = scratch_at<std::int32_t>(i, scratch_parts.dropped) + 2;
    WB_TRY_CUDA(cudaMemsetAsync(found, 0, sizeof(std::int32_t), f.stream));
    launch_find_duplicates(ids.data, static_cast<int>(size_bytes(ids.dtype)), f.saved.routes[i].T, config.K, found, f.stream);
    check_launch("moe_find_duplicates");
    args.rank[i] = {found, nullptr, found, nullptr};
  }
  launch_reduce_counts(args, f.stream);
  check_launch("moe_reduce_counts");
  std::int32_t votes = 0;
  WB_TRY_CUDA(cudaMemcpyAsync(&votes, args.rank[0].totals, sizeof(votes), cudaMemcpyDeviceToHost, f.stream));
  WB_TRY_CUDA(cudaStreamSynchronize(f.stream));
  return votes != 0;
}

// The caller's map stands in for gate and router: the step holds its counts and no ids.
void DeviceMoeLayer::Impl::take_map(const Forward& f) {
  mark(Phase::kRouter, f.stream);
  for (std::size_t i = 0; i < count(); ++i) {
    const std::int64_t T = f.saved.routes[i].T;
    const auto routes = static_cast<std::size_t>(T * config.K);
    WB_TRY_CUDA(cudaMemsetAsync(f.saved.at<void>(i, step_parts.ids), 0xff, routes * size_bytes(route_id_dtype(config.E)), f.stream));
    WB_TRY_CUDA(cudaMemsetAsync(f.saved.at<void>(i, step_parts.weights), 0, routes * sizeof(float), f.stream));
    auto* counts = num_totals(config) > 0 ? scratch_at<std::int32_t>(i, scratch_parts.own_counts) : f.saved.at<std::int32_t>(i, step_parts.counts);
    WB_TRY_CUDA(cudaMemsetAsync(counts, 0, static_cast<std::size_t>(std::max(num_totals(config), config.E)) * sizeof(std::int32_t), f.stream));
    launch_map_counts(f.options.dense_maps[i].as<float>(), T, config.E, counts, f.stream);
    check_launch("moe_map_counts");
  }
  if (num_totals(config) > 0) reduce_counts(f);
}

void DeviceMoeLayer::Impl::plan_map(const Forward& f) {
  std::vector<DeviceMap> maps;
  for (std::size_t i = 0; i < count(); ++i) {
    DeviceMap map;
    map.T = f.saved.sent[i].T;
    if (takes_map(f.saved)) {
      map.cells = f.options.dense_maps[i].as<float>();
    } else {
      map.route = f.saved.sent[i];
    }
    if (config.pad_to_capacity) map.capacity = scratch_at<std::int32_t>(i, scratch_parts.dropped) + 1;
    maps.push_back(map);
  }
  exchange->plan_map(f.saved.handle, maps, f.stream);
  for (std::size_t i = 0; i < count() && f.options.training; ++i) {  // the next forward's map takes the window
    const auto bytes = static_cast<std::size_t>(f.saved.routes[i].T * exchange->config().E);
    WB_TRY_CUDA(cudaMemcpyAsync(f.saved.at<void>(i, step_parts.cells), exchange->map_cells(static_cast<int>(i)), bytes, cudaMemcpyDeviceToDevice, f.stream));
  }
}

}  // namespace waybill::cuda
