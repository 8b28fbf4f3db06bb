// SPDX-License-Identifier: Apache-2.0
// The layer's memory as tensors.
#include "moe/cuda/device_moe_impl.h"

namespace waybill::cuda {

TensorView DeviceMoeLayer::Impl::logits(const Saved& saved, std::size_t i) const {
  void* data = step_parts.logits != kNoPart ? saved.at<void>(i, step_parts.logits) : scratch_at<void>(i, scratch_parts.logits);
  return TensorView(data, DType::kF32, {saved.routes[i].T, config.E}, where);
}
TensorView DeviceMoeLayer::Impl::h(const Saved& saved, std::size_t i) const {
  void* data = options.exact_sizes       ? slot_owner(saved, i, keeps_h()).h.data()
               : step_parts.h != kNoPart ? saved.at<void>(i, step_parts.h)
                                         : scratch_at<void>(i, scratch_parts.h);
  return TensorView(data, DType::kBF16, {slots(saved, i), config.inner_width()}, where);
}
TensorView DeviceMoeLayer::Impl::a(const Saved& saved, std::size_t i) const {
  void* data = options.exact_sizes       ? slot_owner(saved, i, keeps_a()).a.data()
               : step_parts.a != kNoPart ? saved.at<void>(i, step_parts.a)
                                         : scratch_at<void>(i, scratch_parts.a);
  return TensorView(data, DType::kBF16, {slots(saved, i), config.local_F()}, where);
}
TensorView DeviceMoeLayer::Impl::y(const Saved& saved, std::size_t i) const {
  void* data = options.exact_sizes ? slot_memory[i].y.data() : scratch_at<void>(i, scratch_parts.y);
  return TensorView(data, DType::kBF16, {slots(saved, i), y_columns(config, options)}, where);
}
TensorView DeviceMoeLayer::Impl::copied_x(const Saved& saved, std::size_t i) const {
  TensorView x = y(saved, i);
  if (copies_whole_x(config, options)) x.data = options.exact_sizes ? slot_memory[i].x.data() : scratch_at<void>(i, scratch_parts.x);
  return x;
}

TensorView DeviceMoeLayer::Impl::shared_h(const Saved& saved, std::size_t i) const {
  void* data = step_parts.shared_h != kNoPart ? saved.at<void>(i, step_parts.shared_h) : scratch_at<void>(i, scratch_parts.shared_h);
  return TensorView(data, DType::kBF16, {saved.routes[i].T, config.shared_inner_width()}, where);
}
TensorView DeviceMoeLayer::Impl::shared_a(const Saved& saved, std::size_t i) const {
  void* data = step_parts.shared_a != kNoPart ? saved.at<void>(i, step_parts.shared_a) : scratch_at<void>(i, scratch_parts.shared_a);
  return TensorView(data, DType::kBF16, {saved.routes[i].T, config.shared_F}, where);
}
TensorView DeviceMoeLayer::Impl::dense_offsets(const Saved& saved, std::size_t i) const {
  return TensorView(saved.at<std::int32_t>(i, step_parts.dense_offsets), DType::kI32, {2}, where);
}
TensorView DeviceMoeLayer::Impl::forward_base(const Saved& saved, std::size_t i) const {
  return TensorView(y(saved, i).data, config.latent > 0 ? DType::kF32 : exchange->wire(), {saved.routes[i].T, config.H}, where);
}
TensorView DeviceMoeLayer::Impl::backward_base(const Saved& saved, std::size_t i) const {
  void* data = scratch_parts.base == kNoPart ? a(saved, i).data : scratch_at<void>(i, scratch_parts.base);
  return TensorView(data, config.latent > 0 || config.shared_F > 0 ? DType::kF32 : exchange->wire(), {saved.routes[i].T, config.H}, where);
}
float* DeviceMoeLayer::Impl::d_logits(const Saved& saved, std::size_t i) const {
  return static_cast<float*>(combines_beside(config, options) || blocks_at_home() ? y(saved, i).data : h(saved, i).data);
}
TensorView DeviceMoeLayer::Impl::latent_out(const Saved& saved, std::size_t i) const {
  return TensorView(saved.at<void>(i, step_parts.latent_out), DType::kBF16, {saved.routes[i].T, config.latent}, where);
}
TensorView DeviceMoeLayer::Impl::latent_gradient(const Saved& saved, std::size_t i) const {
  return TensorView(scratch_at<void>(i, scratch_parts.latent_gradient), DType::kBF16, {saved.routes[i].T, config.latent}, where);
}

TensorView DeviceMoeLayer::Impl::rows(std::uint64_t window, std::size_t i) const {
  return TensorView(ranks.table.base[ranks.rank[i]] + window, DType::kBF16, {R, config.row_width()}, where);
}

// Without tokens there are no slots, and nothing is read; kernels want an address all the same.
TensorView DeviceMoeLayer::Impl::listed(const TensorView& own) const {
  return own.shape[0] > 0 ? own : TensorView(scratch[0].data(), DType::kBF16, {1, config.row_width()}, where);
}
TensorView DeviceMoeLayer::Impl::listed_x(const Saved& saved, std::size_t i) const { return home() ? listed(saved.x[i]) : rows(saved.rows_window, i); }
TensorView DeviceMoeLayer::Impl::listed_d_out(const Saved& saved, std::size_t i) const { return home() ? listed(saved.d_out[i]) : rows(windows.gradients, i); }

TensorView DeviceMoeLayer::Impl::offsets(const Saved& saved, std::size_t i) const {
  return TensorView(const_cast<std::int32_t*>(exchange->expert_offsets(saved.handle, static_cast<int>(i))), DType::kI32, {L + 1}, where);
}
TensorView DeviceMoeLayer::Impl::slot_rows(const Saved& saved, std::size_t i) const {
  return TensorView(const_cast<std::int32_t*>(exchange->slot_rows(saved.handle, static_cast<int>(i))), DType::kI32, {slots(saved, i)}, where);
}
TensorView DeviceMoeLayer::Impl::slot_weights(const Saved& saved, std::size_t i) const {
  return TensorView(const_cast<float*>(exchange->slot_weights(saved.handle, static_cast<int>(i))), DType::kF32, {slots(saved, i)}, where);
}

RouteView DeviceMoeLayer::Impl::route(const Saved& saved, std::size_t i) const {
  RouteView view;
  view.T = saved.routes[i].T, view.K = config.K, view.E = config.E, view.id_dtype = route_id_dtype(config.E), view.device = where;
  view.ids = saved.at<void>(i, step_parts.ids), view.weights = saved.at<float>(i, step_parts.weights),
  view.counts = saved.at<std::int32_t>(i, step_parts.counts);
  return view;
}

RouterInputs DeviceMoeLayer::Impl::router_inputs(const MoeTensors& parameters, const Saved& saved, std::size_t i) const {
  RouterInputs inputs;
  inputs.logits = logits(saved, i);
  inputs.expert_bias = parameters.router_bias;
  if (!saved.padding_masks.empty()) inputs.padding_mask = saved.padding_masks[i];
  return inputs;
}

std::vector<DeviceRows> DeviceMoeLayer::Impl::device_rows(std::span<const TensorView> tensors) const {
  std::vector<DeviceRows> all;
  for (const TensorView& t : tensors) all.push_back({t.data, 0});
  return all;
}
std::vector<DeviceRows> DeviceMoeLayer::Impl::y_rows(const Saved& saved) const {
  std::vector<DeviceRows> all;
  for (std::size_t i = 0; i < count(); ++i) all.push_back({y(saved, i).data, 0});
  return all;
}
std::vector<DeviceRows> DeviceMoeLayer::Impl::copied_x_rows(const Saved& saved) const {
  std::vector<DeviceRows> all;
  for (std::size_t i = 0; i < count(); ++i) all.push_back({copied_x(saved, i).data, 0});
  return all;
}
std::vector<DeviceRows> DeviceMoeLayer::Impl::window_rows(std::uint64_t window) const {
  std::vector<DeviceRows> all;
  for (std::size_t i = 0; i < count(); ++i) all.push_back({rows(window, i).data, 0});
  return all;
}

}  // namespace waybill::cuda
