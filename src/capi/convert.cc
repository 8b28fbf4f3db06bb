// SPDX-License-Identifier: Apache-2.0
#include "convert.h"

#include <algorithm>

#include "ops/router/device_backend.h"

namespace waybill::capi {

// Before anything is read: what a caller calls device memory must not be taken for memory of the host.
Device to_device(std::int32_t type, std::int32_t index, const char* name, Memory memory) {
  const DeviceType device = checked_enum(type, DeviceType::kCuda, name);
  if (device != DeviceType::kCpu && (memory == Memory::kHost || router_impl::g_device_backend == nullptr)) {
    if (memory == Memory::kHost && router_impl::g_device_backend != nullptr) {
      WB_FAIL(ErrorCode::kUnsupported, "{}: device_type is {} (CUDA, device {}), this function takes memory of the CPU ({})", name, type, index,
              static_cast<int>(WB_CPU));
    }
    WB_FAIL(ErrorCode::kUnsupported, "{}: device_type is {} (CUDA, device {}), this library computes on the CPU ({})", name, type, index,
            static_cast<int>(WB_CPU));
  }
  WB_CHECK(index >= 0, "{}: device_index is {}", name, index);
  return Device{device, index};
}

TensorView to_view(const wb_tensor& tensor, const char* name, Memory memory) {
  if (tensor.rank == 0) return {};
  WB_CHECK(tensor.rank > 0 && tensor.rank <= TensorView::kMaxRank, "{}.rank is {}, allowed are 0 to {}", name, tensor.rank, TensorView::kMaxRank);
  TensorView view;
  view.data = tensor.data;
  view.dtype = checked_enum(tensor.dtype, DType::kF8E5M2, name);
  view.rank = tensor.rank;
  view.device = to_device(tensor.device_type, tensor.device_index, name, memory);
  bool has_stride = false;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    WB_CHECK(tensor.shape[axis] >= 0, "{}.shape[{}] is {}", name, axis, tensor.shape[axis]);
    has_stride = has_stride || tensor.stride[axis] != 0;
  }
  std::int64_t contiguous = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    const auto i = static_cast<std::size_t>(axis);
    view.shape[i] = tensor.shape[axis];
    view.stride[i] = has_stride ? tensor.stride[axis] : contiguous;
    WB_CHECK(!__builtin_mul_overflow(contiguous, std::max<std::int64_t>(tensor.shape[axis], 1), &contiguous), "{}: the shape has more than 2^63 elements",
             name);
  }
  WB_CHECK(view.data != nullptr || view.size() == 0, "{}.data is null", name);
  return view;
}

TensorView to_view(const wb_tensor* tensor, const char* name, Memory memory) {
  const TensorView view = to_view(required(tensor, name), name, memory);
  WB_CHECK(static_cast<bool>(view), "{} is not given (rank 0)", name);
  return view;
}

wb_tensor from_view(const TensorView& view) {
  wb_tensor tensor{};
  tensor.data = view.data;
  tensor.dtype = static_cast<std::int32_t>(view.dtype);
  tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
  tensor.device_type = static_cast<std::int32_t>(view.device.type);
  tensor.device_index = view.device.index;
  return tensor;
}

Stream to_stream(const wb_stream* stream, Memory memory) {
  if (stream == nullptr) return {};
  const wb_stream given = read_struct(stream, "stream");
  return Stream{to_device(given.device_type, given.device_index, "stream", memory), given.native, given.pool == nullptr ? nullptr : &given.pool->pool};
}

Stream stream_on(const wb_stream* stream, Device device, const char* name) {
  Stream given = to_stream(stream, Memory::kAny);
  if (stream == nullptr) given.device = device;
  WB_CHECK(given.device == device, "stream is on {}, {} on {}", to_string(given.device), name, to_string(device));
  return given;
}

RouteView to_route(const wb_route* route, const char* name, Memory memory) {
  const wb_route given = read_struct(route, name);
  WB_CHECK(given.T >= 0 && given.K >= 1 && given.E >= 1, "{}: T = {}, K = {}, E = {}; T >= 0, K >= 1 and E >= 1 are needed", name, given.T, given.K, given.E);
  WB_CHECK(given.id_dtype == WB_I16 || given.id_dtype == WB_I32, "{}.id_dtype is {}, allowed are {} (int16) and {} (int32)", name, given.id_dtype,
           static_cast<int>(WB_I16), static_cast<int>(WB_I32));
  WB_CHECK(given.id_dtype == WB_I32 || given.E <= kMaxExpertsInt16, "{}: E = {} needs int32 ids", name, given.E);
  WB_CHECK(given.T == 0 || (given.ids != nullptr && given.weights != nullptr), "{}: ids or weights is null with T = {}", name, given.T);
  RouteView view;
  view.T = given.T;
  view.K = given.K;
  view.E = given.E;
  view.id_dtype = static_cast<DType>(given.id_dtype);
  view.ids = given.ids;
  view.weights = given.weights;
  view.counts = given.counts;
  view.device = to_device(given.device_type, given.device_index, name, memory);
  return view;
}

wb_route from_route(const RouteView& route) {
  wb_route result{};
  result.struct_size = sizeof(result);
  result.T = route.T;
  result.K = route.K;
  result.E = route.E;
  result.id_dtype = static_cast<std::int32_t>(route.id_dtype);
  result.device_type = static_cast<std::int32_t>(route.device.type);
  result.device_index = route.device.index;
  result.ids = route.ids;
  result.weights = route.weights;
  result.counts = route.counts;
  return result;
}

wb_router_config default_router_config() {
  const RouterConfig defaults;
  wb_router_config config{};
  config.num_groups = defaults.num_groups;
  config.num_kept_groups = defaults.num_kept_groups;
  config.offset_alignment = defaults.offset_alignment;
  config.score = static_cast<std::int32_t>(defaults.score);
  config.group_score = static_cast<std::int32_t>(defaults.group_score);
  config.renormalise = defaults.renormalise ? 1 : 0;
  config.scaling_factor = defaults.scaling_factor;
  return config;
}

RouterSetup to_router_setup(const wb_router_config* config, const char* name) {
  const wb_router_config given = read_struct(config, name, default_router_config());
  RouterSetup setup;
  setup.config.E = given.E;
  setup.config.K = given.K;
  setup.config.score = checked_enum(given.score, ScoreFunction::kSqrtSoftplus, "score");
  setup.config.renormalise = given.renormalise != 0;
  setup.config.scaling_factor = given.scaling_factor;
  setup.config.num_groups = given.num_groups;
  setup.config.num_kept_groups = given.num_kept_groups;
  setup.config.group_score = checked_enum(given.group_score, GroupScore::kTopKPerGroup, "group_score");
  setup.config.normalise_epsilon = given.normalise_epsilon;
  setup.config.forced_balance = checked_enum(given.forced_balance, ForcedBalance::kRoundRobin, "forced_balance");
  setup.config.offset_alignment = given.offset_alignment;
  setup.losses.aux_coefficient = given.aux_coefficient;
  setup.losses.sequence_coefficient = given.sequence_coefficient;
  setup.losses.z_coefficient = given.z_coefficient;
  setup.losses.sequence_length = given.sequence_length;
  validate(setup.config);
  return setup;
}

wb_step_status from_status(const StatusWord& status) {
  wb_step_status result{};
  result.struct_size = sizeof(result);
  result.flags = status.flags;
  result.slot_demand = status.slot_demand;
  result.slot_capacity = status.slot_capacity;
  result.row_demand = status.row_demand;
  result.row_capacity = status.row_capacity;
  result.num_bad_ids = status.num_bad_ids;
  result.num_nonfinite_rows = status.num_nonfinite_rows;
  result.num_short_rows = status.num_short_rows;
  return result;
}

void add_status(const StatusWord& from, wb_step_status* to) {
  wb_step_status sum = read_struct(to, "status");
  sum.flags |= from.flags;
  sum.slot_demand = std::max(sum.slot_demand, from.slot_demand);
  sum.slot_capacity = std::max(sum.slot_capacity, from.slot_capacity);
  sum.row_demand = std::max(sum.row_demand, from.row_demand);
  sum.row_capacity = std::max(sum.row_capacity, from.row_capacity);
  sum.num_bad_ids += from.num_bad_ids;
  sum.num_nonfinite_rows += from.num_nonfinite_rows;
  sum.num_short_rows += from.num_short_rows;
  write_struct(to, sum, "status");
}

}  // namespace waybill::capi
