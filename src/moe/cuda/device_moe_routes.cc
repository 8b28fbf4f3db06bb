// SPDX-License-Identifier: Apache-2.0
// Between the router's routes and those that travel: the cut to capacity and the slices of F.
#include "core/cuda/cuda_error.h"
#include "moe/cuda/device_moe_impl.h"
#include "moe/cuda/sent_routes.h"

namespace waybill::cuda {

void DeviceMoeLayer::Impl::set_routes(Saved& saved, std::size_t i, std::int64_t T) const {
  saved.sent[i] = saved.routes[i] = DeviceRoute{saved.at<void>(i, step_parts.ids), saved.at<float>(i, step_parts.weights), T};
  if (!changes_routes(config)) return;
  saved.sent[i].ids = saved.at<void>(i, step_parts.sent_ids), saved.sent[i].weights = saved.at<float>(i, step_parts.sent_weights);
}

void DeviceMoeLayer::Impl::prepare_routes(const Forward& f) {
  if (!changes_routes(config)) return;
  const int t = config.expert_tensor_parallel, id_bytes = static_cast<int>(size_bytes(route_id_dtype(config.E)));
  for (std::size_t i = 0; i < count(); ++i) {
    const std::int64_t T = f.saved.routes[i].T;
    const void* ids = f.saved.routes[i].ids;
    const float* weights = f.saved.routes[i].weights;
    void* sent_ids = f.saved.at<void>(i, step_parts.sent_ids);
    auto* sent_weights = f.saved.at<float>(i, step_parts.sent_weights);
    if (config.capacity_factor > 0) {
      KeepRoutes args{};
      args.ids = ids, args.weights = weights, args.id_bytes = id_bytes;
      args.mask = f.saved.padding_masks.empty() ? nullptr : f.saved.padding_masks[i].as<std::uint8_t>();
      args.T = T, args.K = config.K, args.E = config.E, args.factor = config.capacity_factor;
      args.kept_ids = t > 1 ? scratch_at<void>(i, scratch_parts.kept_ids) : sent_ids;
      args.kept_weights = t > 1 ? scratch_at<float>(i, scratch_parts.kept_weights) : sent_weights;
      args.dropped = scratch_at<std::int32_t>(i, scratch_parts.dropped), args.places = scratch_at<std::int32_t>(i, scratch_parts.keep_places);
      WB_TRY_CUDA(cudaMemsetAsync(args.dropped, 0, sizeof(std::int32_t), f.stream));
      launch_keep_routes(args, f.stream);
      check_launch("moe_keep_routes");
      ids = args.kept_ids, weights = args.kept_weights;
    }
    if (t == 1) continue;
    launch_expand_routes({ids, weights, T * config.K, t, sent_ids, sent_weights, id_bytes, static_cast<int>(size_bytes(route_id_dtype(config.E * t)))},
                         f.stream);
    check_launch("moe_expand_routes");
  }
}

void DeviceMoeLayer::Impl::plan(const Forward& f) {
  if (!takes_map(f.saved)) prepare_routes(f);
  if (f.saved.reasons != kDenseMapNone) return plan_map(f);
  exchange->plan(f.saved.handle, f.saved.sent, f.stream);
}

// d_slot_weight goes home to the routes, d_weights [T, K]; 0 where a route was dropped.
void DeviceMoeLayer::Impl::return_weights(const Backward& b) {
  const int t = config.expert_tensor_parallel;
  std::vector<const float*> values;
  std::vector<float*> d_weights;
  for (std::size_t i = 0; i < count(); ++i) {
    values.push_back(scratch_at<float>(i, scratch_parts.d_slot_weight));
    d_weights.push_back(scratch_at<float>(i, t > 1 ? scratch_parts.d_expanded : scratch_parts.d_weights));
  }
  if (b.saved.reasons == kDenseMapNone) {
    exchange->return_slot_values(b.saved.handle, b.saved.sent, values, d_weights, b.stream);
  } else {
    std::vector<float*> d_map;
    std::vector<const std::uint8_t*> cells;
    for (std::size_t i = 0; i < count(); ++i) {
      cells.push_back(b.saved.at<std::uint8_t>(i, step_parts.cells));
      d_map.push_back(takes_map(b.saved) ? b.options.d_dense_maps[i].as<float>() : scratch_at<float>(i, scratch_parts.d_map));
    }
    exchange->return_map_values(b.saved.handle, cells, values, d_map, b.stream);
    if (takes_map(b.saved)) return;
    const std::vector<const float*> from(d_map.begin(), d_map.end());
    exchange->return_map_routes(b.saved.sent, from, d_weights, b.stream);
  }
  for (std::size_t i = 0; i < count() && t > 1; ++i) {
    launch_sum_slices(d_weights[i], b.saved.routes[i].T * config.K, t, scratch_at<float>(i, scratch_parts.d_weights), b.stream);
    check_launch("moe_sum_slices");
  }
}

}  // namespace waybill::cuda
