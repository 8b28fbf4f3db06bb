// SPDX-License-Identifier: Apache-2.0
// What the layer takes. Everything is checked before anything is queued.
#include <algorithm>
#include <initializer_list>

#include "core/cuda/cuda_error.h"
#include "exchange/cuda/exchange_shape.h"
#include "moe/cuda/device_moe_impl.h"

namespace waybill::cuda {
namespace {

void refuse_if(bool wanted, const char* what) {
  if (wanted) WB_FAIL(ErrorCode::kUnsupported, "the MoE layer on GPUs does not do {}", what);
}

using Types = std::initializer_list<DType>;
constexpr Types kWeight = {DType::kBF16};
constexpr Types kEither = {DType::kBF16, DType::kF32};
constexpr Types kSingle = {DType::kF32};

void check_view(const TensorView& view, std::initializer_list<std::int64_t> shape, Types types, Device device, const char* what, const char* name, int rank) {
  const TensorView expected(nullptr, *types.begin(), shape, device);
  WB_CHECK(view, "{} {} of rank {} is missing: expected {}", what, name, rank, expected.describe());
  const bool same = view.rank == expected.rank && std::equal(view.shape.begin(), view.shape.begin() + view.rank, expected.shape.begin()) &&
                    std::find(types.begin(), types.end(), view.dtype) != types.end() && view.device == device && view.is_contiguous();
  WB_CHECK(same, "{} {} of rank {}: expected contiguous {}{}, got {}", what, name, rank, expected.describe(), types.size() > 1 ? " or f32" : "",
           view.describe());
  WB_CHECK(view.size() == 0 || (view.data != nullptr && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0),
           "{} {} of rank {} needs memory aligned to 16 bytes, got address {}", what, name, rank, fmt::ptr(view.data));
}

struct Checker {
  const MoeConfig& c;
  std::int64_t L;
  Device device;
  void dense(const MoeTensors& t, Types types, const char* what, int rank) const {
    if (c.shared_F > 0) check_view(t.shared_w1, {c.shared_inner_width(), c.H}, types, device, what, "shared_w1", rank);
    if (c.shared_F > 0) check_view(t.shared_w2, {c.H, c.shared_F}, types, device, what, "shared_w2", rank);
    if (c.latent > 0) check_view(t.latent_down, {c.latent, c.H}, types, device, what, "latent_down", rank);
    if (c.latent > 0) check_view(t.latent_up, {c.H, c.latent}, types, device, what, "latent_up", rank);
  }
  void biases(const MoeTensors& t, const char* what, int rank) const {
    if (!c.expert_bias) return;
    check_view(t.b1, {L, c.inner_width()}, kSingle, device, what, "b1", rank);
    check_view(t.b2, {L, c.row_width()}, kSingle, device, what, "b2", rank);
  }
  void parameters(const MoeTensors& t, int rank) const {
    check_view(t.gate, {c.E, c.H}, kWeight, device, "parameter", "gate", rank);
    if (t.router_bias) check_view(t.router_bias, {c.E}, kSingle, device, "parameter", "router_bias", rank);
    check_view(t.w1, {L, c.inner_width(), c.row_width()}, kWeight, device, "parameter", "w1", rank);
    check_view(t.w2, {L, c.row_width(), c.local_F()}, kWeight, device, "parameter", "w2", rank);
    biases(t, "parameter", rank);
    dense(t, kWeight, "parameter", rank);
  }
  void gradients(const MoeTensors& t, int rank) const {
    check_view(t.gate, {c.E, c.H}, kSingle, device, "gradient", "gate", rank);
    check_view(t.w1, {L, c.inner_width(), c.row_width()}, kEither, device, "gradient", "w1", rank);
    check_view(t.w2, {L, c.row_width(), c.local_F()}, kEither, device, "gradient", "w2", rank);
    biases(t, "gradient", rank);
    dense(t, kEither, "gradient", rank);
  }
  void rows(const TensorView& view, std::int64_t T, Types types, const char* name, int rank) const {
    check_view(view, {T, c.H}, types, device, "tensor", name, rank);
  }
};

}  // namespace

void check_device_moe(const MoeConfig& config, int P, const DeviceMoeOptions& given) {
  validate(config, P);
  refuse_if(given.nodes > 1 && config.expert_tensor_parallel > 1, "slices of F (expert_tensor_parallel) between nodes");
  refuse_if(given.nodes > 1 && (given.dense_map || device_dense_reasons(config, given) != kDenseMapNone), "the dense-map path between nodes");
  const RankGroup group{P, given.nodes};
  check_device_config(windows_config(device_exchange_config(config), group), group.per_node(), device_map_room(config, given));
  check_device_recipe(config, P);
  refuse_if(given.exact_sizes && config.recipe.is_blocked(), "exact sizes under recipes of blocks");
  WB_CHECK(given.policy.combine_sms >= 0, "policy.combine_sms must not be negative, got {}", given.policy.combine_sms);
  WB_CHECK(given.column_blocks >= 0, "column_blocks must not be negative, got {}", given.column_blocks);
  refuse_if(given.column_blocks > 1 && config.recipe.is_blocked(), "column_blocks under recipes of blocks");
  refuse_if(given.column_blocks > 1 && config.expert_bias, "column_blocks with expert biases");
  const std::uint32_t reasons = device_dense_reasons(config, given);
  if (reasons != kDenseMapNone && !config.allow_dense_map) {
    WB_FAIL(ErrorCode::kUnsupported, "compact routes are not legal and allow_dense_map is off: {}", describe_dense_map(reasons));
  }
  WB_CHECK(config.H % 8 == 0 && config.local_F() % 8 == 0 && config.latent % 8 == 0 && config.shared_F % 8 == 0,
           "the MoE layer on GPUs takes H, F / expert_tensor_parallel, latent and shared_F in multiples of 8, got H = {}, F = {}, expert_tensor_parallel = {}, "
           "latent = {}, shared_F = {}",
           config.H, config.F, config.expert_tensor_parallel, config.latent, config.shared_F);
  WB_CHECK(!given.exact_sizes || (config.mode == ExchangeMode::kEager && config.receive_factor == 0),
           "exact sizes belong to eager mode at the worst-case budget, got mode {} and receive_factor {}",
           config.mode == ExchangeMode::kEager ? "eager" : "captured", config.receive_factor);
  WB_CHECK(given.num_steps >= 1, "a layer needs at least one step, got num_steps = {}", given.num_steps);
}

void DeviceMoeLayer::Impl::check_forward(const Forward& f) const {
  const auto n = count();
  WB_CHECK(f.parameters.size() == n && f.x.size() == n && f.out.size() == n, "forward: {} ranks of this launch, got {} parameters, {} x, {} out", n,
           f.parameters.size(), f.x.size(), f.out.size());
  const auto optional = [&](std::span<const TensorView> tensors, const char* name) {
    WB_CHECK(tensors.empty() || tensors.size() == n, "forward: {} ranks of this launch, got {} {}", n, tensors.size(), name);
  };
  optional(f.options.padding_masks, "padding masks"), optional(f.options.replay_ids, "replayed ids");
  optional(f.options.accumulated_counts, "accumulated counts"), optional(f.options.dense_maps, "dense maps");
  if (!f.options.dense_maps.empty()) {
    WB_CHECK(exchange->plans_maps(), "forward: a dense map needs room: make the layer with DeviceMoeOptions::dense_map");
    WB_CHECK(f.options.replay_ids.empty() && config.capacity_factor == 0 && config.expert_tensor_parallel == 1,
             "a dense map excludes replayed routes ({}), capacity_factor ({}) and expert_tensor_parallel ({})", f.options.replay_ids.empty() ? "none" : "given",
             config.capacity_factor, config.expert_tensor_parallel);
  }
  WB_CHECK(!f.options.weights_unchanged || !recipe || weights_version > 0, "forward: weights_unchanged, but no forward of this layer has quantised them yet");
  WB_CHECK(f.saved.layer == this, "forward: the step was made by another layer");
  if (options.exact_sizes) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    WB_TRY_CUDA(cudaStreamIsCapturing(f.stream, &capture));
    WB_CHECK(capture == cudaStreamCaptureStatusNone, "exact sizes wait for the plan on the host and cannot be captured; captured mode has budgets instead");
  }
  const Checker check{config, L, where};
  for (std::size_t i = 0; i < n; ++i) {
    const int rank = ranks.rank[i];
    check.parameters(f.parameters[i], rank);
    const std::int64_t T = f.x[i].rank == 2 ? f.x[i].shape[0] : -1;
    WB_CHECK(T >= 0 && T <= config.T_max, "x of rank {} must be [T, H] with T in [0, T_max = {}], got {}", rank, config.T_max, f.x[i].describe());
    check.rows(f.x[i], T, kWeight, "x", rank);
    if (!f.options.dense_maps.empty()) check_view(f.options.dense_maps[i], {T, config.E}, kSingle, where, "tensor", "dense_map", rank);
    check.rows(f.out[i], T, kEither, "out", rank);
    WB_CHECK(f.out[i].dtype == f.out[0].dtype, "out must have one type on all ranks of the launch, got {} and {}", to_string(f.out[0].dtype),
             to_string(f.out[i].dtype));
  }
}

void DeviceMoeLayer::Impl::check_backward(const Backward& b) const {
  const auto n = count();
  WB_CHECK(b.parameters.size() == n && b.gradients.size() == n && b.x.size() == n && b.d_out.size() == n && b.dx.size() == n,
           "backward: {} ranks of this launch, got {} parameters, {} gradients, {} x, {} d_out, {} dx", n, b.parameters.size(), b.gradients.size(), b.x.size(),
           b.d_out.size(), b.dx.size());
  WB_CHECK(b.saved.layer == this && b.saved.ready, "backward needs a step that a training forward filled and no backward has used yet");
  WB_CHECK(!b.saved.awaits_losses, "backward: the step's forward left its losses to add_losses(), which has not been called");
  const Checker check{config, L, where};
  const bool mapped = (b.saved.reasons & kDenseMapCallerMap) != 0;
  WB_CHECK(b.options.d_dense_maps.size() == (mapped ? n : 0), "backward: {} gradients of dense maps for a forward that was given {}",
           b.options.d_dense_maps.size(), mapped ? n : 0);
  for (std::size_t i = 0; i < n; ++i) {
    const int rank = ranks.rank[i];
    if (mapped) check_view(b.options.d_dense_maps[i], {b.saved.routes[i].T, config.E}, kSingle, where, "tensor", "d_dense_map", rank);
    const std::int64_t T = b.saved.routes[i].T;
    check.parameters(b.parameters[i], rank), check.gradients(b.gradients[i], rank);
    check.rows(b.x[i], T, kWeight, "x", rank), check.rows(b.d_out[i], T, kWeight, "d_out", rank), check.rows(b.dx[i], T, kEither, "dx", rank);
  }
}

}  // namespace waybill::cuda
