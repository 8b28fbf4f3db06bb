// SPDX-License-Identifier: Apache-2.0
// What a forward leaves, in memory of the caller's: plan, the step's own memory, and the rows where the step keeps them.
#include "core/cuda/cuda_error.h"
#include "exchange/cuda/exchange_shape.h"
#include "moe/cuda/device_moe_impl.h"

namespace waybill::cuda {
namespace {

struct SavedParts {
  std::size_t step, rows, bytes;  // the plan lies at 0; rows: none where step == bytes
};

SavedParts saved_parts(const MoeConfig& config, const RankGroup& group) {
  constexpr std::size_t kAlignment = 256;
  const auto aligned = [](std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  const ExchangeConfig exchange = device_exchange_config(config);
  SavedParts parts{};
  parts.step = aligned(exchange_handle_bytes(exchange, group));
  parts.rows = parts.step + aligned(step_layout(config, group.P, {}).bytes);
  parts.bytes = parts.rows;
  if (config.recompute <= Recompute::kActivation && !is_home(config, group))
    parts.bytes += aligned(row_window_bytes(exchange, group.P, static_cast<std::size_t>(config.row_width()) * 2));
  return parts;
}

void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes > 0) WB_TRY_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

std::size_t DeviceMoeLayer::saved_bytes(const MoeConfig& config, int P, int nodes) {
  DeviceMoeOptions options;
  options.nodes = nodes;
  check_device_moe(config, P, options);
  WB_CHECK(!device_map_room(config, {}).enabled, "saved_bytes: steps on the dense-map path are not saved");
  return saved_parts(config, {P, nodes}).bytes;
}

void DeviceMoeLayer::save(const DeviceMoeStep& step, void* to, cudaStream_t stream) const {
  WB_CHECK(step.saved_ != nullptr && step.saved_->layer == impl_.get() && step.saved_->ready,
           "save: a step of this layer that a training forward filled is needed");
  WB_CHECK(!impl_->options.exact_sizes && !impl_->options.resend_rows,
           "save: the layer was made with exact_sizes or resend_rows, whose steps it does not hold");
  WB_CHECK(!impl_->exchange->plans_maps(), "save: the layer has room for dense maps, whose steps are not saved");
  const DeviceMoeStep::Saved& saved = *step.saved_;
  const DeviceGuard guard(impl_->where.index);
  const SavedParts parts = saved_parts(impl_->config, {impl_->P, impl_->options.nodes});
  auto* bytes = static_cast<unsigned char*>(to);
  impl_->exchange->save(saved.handle, bytes, stream);
  copy(bytes + parts.step, saved.memory[0].data(), impl_->step_parts.bytes, stream);
  const TensorView rows = impl_->rows(saved.rows_window, 0);
  if (parts.rows < parts.bytes) copy(bytes + parts.rows, rows.data, static_cast<std::size_t>(rows.size()) * 2, stream);
}

void DeviceMoeLayer::restore(DeviceMoeStep& step, const void* from, const TensorView& x, const DeviceMoeForward& options, cudaStream_t stream) {
  WB_CHECK(step.saved_ != nullptr && step.saved_->layer == impl_.get(), "restore: a step of this layer is needed");
  WB_CHECK(x.rank == 2 && x.shape[0] <= impl_->config.T_max, "restore: x must be [T, H] with T in [0, T_max = {}], got {}", impl_->config.T_max, x.describe());
  DeviceMoeStep::Saved& saved = *step.saved_;
  const DeviceGuard guard(impl_->where.index);
  const SavedParts parts = saved_parts(impl_->config, {impl_->P, impl_->options.nodes});
  const auto* bytes = static_cast<const unsigned char*>(from);
  impl_->exchange->restore(saved.handle, bytes, x.shape[0], stream);
  copy(saved.memory[0].data(), bytes + parts.step, impl_->step_parts.bytes, stream);
  const TensorView rows = impl_->rows(saved.rows_window, 0);
  if (parts.rows < parts.bytes) copy(rows.data, bytes + parts.rows, static_cast<std::size_t>(rows.size()) * 2, stream);
  const TensorView inputs[] = {x};
  impl_->set_totals(Impl::Forward{{}, inputs, {}, saved, options, stream});
  saved.seed = {options.rounding_seed, options.rounding_seed_device}, saved.weights_version = 0;
  saved.padding_masks.assign(options.padding_masks.begin(), options.padding_masks.end());
  impl_->set_routes(saved, 0, x.shape[0]);
  saved.ready = true;
}

}  // namespace waybill::cuda
