// SPDX-License-Identifier: Apache-2.0
// Dispatch, combine and the receiver's local steps.
#include "handles.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

wb_exchange_config default_exchange_config() {
  const ExchangeConfig defaults;
  wb_exchange_config config{};
  config.alignment = defaults.alignment;
  config.receive_factor = defaults.receive_factor;
  config.mode = static_cast<std::int32_t>(defaults.mode);
  config.combine_wire = static_cast<std::int32_t>(defaults.combine_wire);
  config.hierarchy = static_cast<std::int32_t>(defaults.hierarchy);
  return config;
}

}  // namespace

ExchangeConfig capi::to_exchange_config(const wb_exchange_config* config) {
  const wb_exchange_config given = read_struct(config, "config", default_exchange_config());
  ExchangeConfig result;
  result.H = given.H;
  result.E = given.E;
  result.K = given.K;
  result.T_max = given.T_max;
  result.mode = checked_enum(given.mode, ExchangeMode::kCaptured, "mode");
  result.receive_factor = given.receive_factor;
  result.combine_wire = checked_enum(given.combine_wire, CombineWire::kBF16, "combine_wire");
  result.alignment = given.alignment;
  result.debug_checks = given.debug_checks != 0;
  result.hierarchy = checked_enum(given.hierarchy, Hierarchy::kAuto, "hierarchy");
  return result;
}

wb_status wb_exchange_config_init(wb_exchange_config* config, uint64_t struct_size) noexcept {
  return guarded([&] { init_struct(config, struct_size, default_exchange_config(), "config"); });
}

wb_status wb_exchange_create(const wb_exchange_config* config, wb_fabric* fabric, wb_exchange** exchange) noexcept {
  return guarded([&] {
    wb_exchange*& target = required(exchange, "exchange");
    target = new wb_exchange(to_exchange_config(config), *required(fabric, "fabric").fabric);
  });
}

void wb_exchange_destroy(wb_exchange* exchange) noexcept { delete exchange; }

wb_status wb_exchange_plan(wb_exchange* exchange, const wb_route* route, wb_dispatch** dispatch) noexcept {
  return guarded([&] {
    wb_dispatch*& target = required(dispatch, "dispatch");
    auto created = std::make_unique<wb_dispatch>();
    created->handle = required(exchange, "exchange").exchange.plan(to_route(route, "route"));
    target = created.release();
  });
}

void wb_dispatch_destroy(wb_dispatch* dispatch) noexcept { delete dispatch; }

wb_status wb_dispatch_get_info(const wb_dispatch* dispatch, wb_dispatch_info* info) noexcept {
  return guarded([&] {
    const DispatchHandle& handle = required(dispatch, "dispatch").handle;
    const ReceiveLayout& layout = handle.layout;
    wb_dispatch_info result{};
    result.R = layout.R();
    result.S = layout.S();
    result.S_padded = layout.S_padded();
    result.L = layout.L;
    result.row_offsets = layout.row_offsets.data();
    result.expert_offsets = layout.expert_offsets.data();
    result.expert_counts = layout.expert_counts.data();
    result.slot_row = layout.slot_row.data();
    result.slot_weight = layout.slot_weight.data();
    result.valid = handle.valid ? 1 : 0;
    write_struct(info, result, "info");
  });
}

wb_status wb_exchange_dispatch(wb_exchange* exchange, wb_dispatch* dispatch, const wb_tensor* x, wb_tensor* rows) noexcept {
  return guarded([&] {
    wb_tensor& result = required(rows, "rows");
    wb_dispatch& batch = required(dispatch, "dispatch");
    required(exchange, "exchange").exchange.dispatch(batch.handle, to_view(x, "x"), batch.rows);
    result = from_view(batch.rows.view());
  });
}

wb_status wb_exchange_combine(wb_exchange* exchange, const wb_dispatch* dispatch, const wb_tensor* z, const wb_tensor* out) noexcept {
  return guarded([&] { required(exchange, "exchange").exchange.combine(required(dispatch, "dispatch").handle, to_view(z, "z"), to_view(out, "out")); });
}

wb_status wb_exchange_return_slot_values(wb_exchange* exchange, const wb_dispatch* dispatch, const float* slot_values, float* d_weights) noexcept {
  return guarded([&] {
    const DispatchHandle& handle = required(dispatch, "dispatch").handle;
    WB_CHECK(slot_values != nullptr || handle.layout.S_padded() == 0, "slot_values is null with {} slots", handle.layout.S_padded());
    WB_CHECK(d_weights != nullptr || handle.plan.T == 0, "d_weights is null with T = {}", handle.plan.T);
    required(exchange, "exchange").exchange.return_slot_values(handle, slot_values, d_weights);
  });
}

wb_status wb_permute(const wb_dispatch* dispatch, const wb_tensor* rows, const wb_tensor* y, const wb_stream* stream) noexcept {
  return guarded([&] { permute(required(dispatch, "dispatch").handle.layout, to_view(rows, "rows"), to_view(y, "y"), to_stream(stream)); });
}

wb_status wb_unpermute_reduce(const wb_dispatch* dispatch, const wb_tensor* y, int32_t weighted, const wb_tensor* z, const wb_stream* stream) noexcept {
  return guarded([&] { unpermute_reduce(required(dispatch, "dispatch").handle.layout, to_view(y, "y"), weighted != 0, to_view(z, "z"), to_stream(stream)); });
}

wb_status wb_unpermute_reduce_backward(const wb_dispatch* dispatch, const wb_tensor* y, int32_t weighted, const wb_tensor* dz, const wb_tensor* dy,
                                       float* d_weight, const wb_stream* stream) noexcept {
  return guarded([&] {
    unpermute_reduce_backward(required(dispatch, "dispatch").handle.layout, y == nullptr ? TensorView{} : to_view(*y, "y"), weighted != 0, to_view(dz, "dz"),
                              to_view(dy, "dy"), d_weight, to_stream(stream));
  });
}

wb_status wb_exchange_get_bytes(const wb_exchange* exchange, wb_exchange_bytes* bytes) noexcept {
  return guarded([&] {
    const ExchangeBytes& sent = required(exchange, "exchange").exchange.bytes();
    wb_exchange_bytes result{};
    result.payload = sent.payload;
    result.combined = sent.combined;
    result.ids = sent.ids;
    result.weights = sent.weights;
    result.counts = sent.counts;
    result.rows = sent.rows;
    result.dense_route_map = sent.dense_route_map;
    result.compact_route = sent.compact_route;
    result.dense_probability_row = sent.dense_probability_row;
    result.local_probability_slice = sent.local_probability_slice;
    write_struct(bytes, result, "bytes");
  });
}

wb_status wb_exchange_get_status(wb_exchange* exchange, wb_step_status* status) noexcept {
  return guarded([&] { write_struct(status, from_status(required(exchange, "exchange").exchange.status()), "status"); });
}
