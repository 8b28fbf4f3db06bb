// SPDX-License-Identifier: Apache-2.0
// The router's checks and its ordered lists of implementations.
#include <cmath>
#include <cstring>
#include <limits>

#include "core/implementation.h"
#include "ops/router/device_backend.h"
#include "ops/router/router_impl.h"
#include "waybill/log.h"
#include "waybill/router_weighted.h"

namespace waybill {

void validate(const RouterConfig& c) {
  WB_CHECK(c.E >= 1 && c.E <= std::numeric_limits<std::int32_t>::max(), "a router needs 1 to 2^31 - 1 experts, got E = {}", c.E);
  WB_CHECK(c.K >= 1 && c.K <= c.E, "experts per token must be in [1, E]: K = {}, E = {}", c.K, c.E);
  WB_CHECK(c.num_groups >= 1 && c.E % c.num_groups == 0, "the number of groups must divide the experts: G = {} does not divide E = {}", c.num_groups, c.E);
  WB_CHECK(c.num_kept_groups >= 1 && c.num_kept_groups <= c.num_groups, "kept groups must be in [1, G]: kept_groups = {}, G = {}", c.num_kept_groups,
           c.num_groups);
  WB_CHECK(c.num_kept_groups * (c.E / c.num_groups) >= c.K,
           "the kept groups must hold K experts: kept_groups*E/G = {} < K = {} (kept_groups = {}, E = {}, G = {})", c.num_kept_groups * (c.E / c.num_groups),
           c.K, c.num_kept_groups, c.E, c.num_groups);
  WB_CHECK(router_impl::keys_per_group_score(c) >= 1, "the group score K/kept_groups must hold an expert: K = {}, kept_groups = {} give {}", c.K,
           c.num_kept_groups, c.K / c.num_kept_groups);
  WB_CHECK(std::isfinite(c.scaling_factor) && c.scaling_factor > 0, "scaling_factor must be finite and positive, got {}", c.scaling_factor);
  WB_CHECK(std::isfinite(c.normalise_epsilon) && c.normalise_epsilon >= 0, "normalise_epsilon must be finite and not negative, got {}", c.normalise_epsilon);
  WB_CHECK(c.normalise_epsilon == 0 || (c.renormalise && !router_impl::is_softmax(c.score)),
           "normalise_epsilon = {} needs a renormalised sigmoid or sqrt-softplus score", c.normalise_epsilon);
  WB_CHECK(c.offset_alignment >= 1, "offset_alignment must be at least 1, got {}", c.offset_alignment);
}

namespace {

using namespace router_impl;

void check_vector(const TensorView& view, const char* name, DType dtype, std::int64_t size, Device device) {
  if (!view) return;
  WB_CHECK(view.rank == 1 && view.shape[0] == size && view.dtype == dtype && view.is_contiguous() && view.device == device,
           "{} must be a contiguous {} [{}] on {}, got {}", name, to_string(dtype), size, to_string(device), view.describe());
}

void check_common(const RouterConfig& config, const RouterInputs& inputs, const RouteView& route) {
  validate(config);
  const TensorView& logits = inputs.logits;
  WB_CHECK(logits.rank == 2 && logits.shape[1] == config.E, "logits must be [T, E = {}], got {}", config.E, logits.describe());
  WB_CHECK(logits.dtype == DType::kF32 || logits.dtype == DType::kBF16 || logits.dtype == DType::kF16, "logits must be f32, bf16 or f16, got {}",
           logits.describe());
  WB_CHECK(config.E == 1 || logits.stride[1] == 1, "the columns of logits must be dense, got stride {}", logits.stride[1]);
  WB_CHECK(logits.shape[0] <= 1 || logits.stride[0] >= config.E, "the rows of logits overlap: stride {} < E = {}", logits.stride[0], config.E);
  const std::int64_t T = logits.shape[0];
  WB_CHECK(T == 0 || logits.data != nullptr, "logits of {} rows have no memory", T);
  WB_CHECK(route.T == T && route.K == config.K && route.E == config.E, "the route is [T = {}, K = {}] of E = {}, the router has T = {}, K = {}, E = {}",
           route.T, route.K, route.E, T, config.K, config.E);
  WB_CHECK(route.id_dtype == DType::kI32 || (route.id_dtype == DType::kI16 && config.E <= kMaxExpertsInt16), "ids of {} experts cannot be {}", config.E,
           to_string(route.id_dtype));
  WB_CHECK(T == 0 || (route.ids != nullptr && route.weights != nullptr), "a route of {} rows needs memory for ids and weights", T);
  WB_CHECK(route.device == logits.device, "logits are on {}, the route is on {}", to_string(logits.device), to_string(route.device));
  check_vector(inputs.expert_bias, "expert_bias", DType::kF32, config.E, logits.device);
  check_vector(inputs.expert_mask, "expert_mask", DType::kU8, config.E, logits.device);
  check_vector(inputs.padding_mask, "padding_mask", DType::kU8, T, logits.device);
  check_vector(inputs.weight_factors, "weight_factors", DType::kF32, T, logits.device);
  if (inputs.replay_ids) {
    const TensorView& replay = inputs.replay_ids;
    WB_CHECK(replay.rank == 2 && replay.shape[0] == T && replay.shape[1] == config.K && replay.is_contiguous() && replay.device == logits.device &&
                 (replay.dtype == DType::kI16 || replay.dtype == DType::kI32),
             "replay_ids must be contiguous i16 or i32 [T = {}, K = {}] on {}, got {}", T, config.K, to_string(logits.device), replay.describe());
    WB_CHECK(config.forced_balance == ForcedBalance::kOff, "replay_ids and forced_balance exclude each other");
  }
  WB_CHECK(inputs.token_offset >= 0, "token_offset must not be negative, got {}", inputs.token_offset);
}

void check_losses(const RouterLossConfig& losses, const RouterLossInputs& given, std::int64_t T) {
  WB_CHECK(std::isfinite(losses.aux_coefficient) && std::isfinite(losses.sequence_coefficient) && std::isfinite(losses.z_coefficient),
           "loss coefficients must be finite: aux {}, sequence {}, z {}", losses.aux_coefficient, losses.sequence_coefficient, losses.z_coefficient);
  if (losses.sequence_coefficient != 0) {
    WB_CHECK(losses.sequence_length >= 1 && T % losses.sequence_length == 0, "the sequence loss needs whole sequences: T = {}, sequence_length = {}", T,
             losses.sequence_length);
  }
  WB_CHECK(given.aux_tokens >= 0 && given.loss_tokens >= 0 && given.num_sequences >= 0,
           "token and sequence totals must not be negative: aux_tokens {}, loss_tokens {}, num_sequences {}", given.aux_tokens, given.loss_tokens,
           given.num_sequences);
}

template <class Call>
std::string refuse_host(const Call& call) {
  const Device device = call.inputs.logits.device;
  return device.type == DeviceType::kCpu ? std::string() : "takes host memory, got " + to_string(device);
}
template <class Call>
std::string refuse_device(const Call& call) {
  const Device device = call.inputs.logits.device;
  if (device.type != DeviceType::kCuda) return "takes CUDA memory, got " + to_string(device);
  return g_device_backend != nullptr ? std::string() : "no CUDA backend is linked";
}
template <bool kPortable>
std::string refuse_device_forward(const ForwardCall& call) {
  std::string reason = refuse_device(call);
  return reason.empty() ? g_device_backend->refuse_forward(call, kPortable) : reason;
}
template <bool kPortable>
void forward_device(const ForwardCall& call) {
  g_device_backend->forward(call, kPortable);
}
template <bool kPortable>
RouterLosses losses_device(const LossesCall& call) {
  return g_device_backend->losses(call, kPortable);
}
template <bool kPortable>
void backward_device(const BackwardCall& call) {
  g_device_backend->backward(call, kPortable);
}

void check_gradient(const RouterConfig& config, const RouterInputs& inputs, const RouteView& route, const TensorView& d_logits) {
  WB_CHECK(d_logits.rank == 2 && d_logits.shape[0] == route.T && d_logits.shape[1] == config.E && d_logits.dtype == DType::kF32 &&
               d_logits.device == inputs.logits.device && (config.E == 1 || d_logits.stride[1] == 1) && (route.T <= 1 || d_logits.stride[0] >= config.E),
           "d_logits must be f32 [T = {}, E = {}] with dense columns on {}, got {}", route.T, config.E, to_string(inputs.logits.device), d_logits.describe());
  WB_CHECK(route.T == 0 || d_logits.data != nullptr, "d_logits of {} rows have no memory", route.T);
}

constexpr Implementation<ForwardCall> kForward[] = {
    {"cuda", refuse_device_forward<false>, forward_device<false>},
    {"cuda_portable", refuse_device_forward<true>, forward_device<true>},
    {"fast", refuse_host<ForwardCall>, forward_fast},
    {"ref", refuse_host<ForwardCall>, forward_ref},
};
constexpr Implementation<LossesCall, RouterLosses> kLosses[] = {
    {"cuda", refuse_device<LossesCall>, losses_device<false>},
    {"cuda_portable", refuse_device<LossesCall>, losses_device<true>},
    {"fast", refuse_host<LossesCall>, losses_fast},
    {"ref", refuse_host<LossesCall>, losses_ref},
};
constexpr Implementation<BackwardCall> kBackward[] = {
    {"cuda", refuse_device<BackwardCall>, backward_device<false>},
    {"cuda_portable", refuse_device<BackwardCall>, backward_device<true>},
    {"fast", refuse_host<BackwardCall>, backward_fast},
    {"ref", refuse_host<BackwardCall>, backward_ref},
};

}  // namespace

void router_forward(const RouterConfig& config, const RouterInputs& inputs, const RouterOutputs& outputs, Stream stream) {
  check_common(config, inputs, outputs.route);
  const std::int64_t T = outputs.route.T;
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  WB_CHECK(T <= kMax / config.K, "T * K = {} * {} routes do not fit the int32 counts", T, config.K);
  WB_CHECK(outputs.aligned_offsets == nullptr || config.offset_alignment - 1 <= (kMax - T * config.K) / config.E,
           "{} routes of {} experts aligned to {} do not fit int32 offsets", T * config.K, config.E, config.offset_alignment);
  if (config.K == 1 && is_renormalised(config)) {
    warn_once("router.renormalised_k1",
              "K = 1 with renormalised weights: every weight is 1, so the task loss cannot train the router; set renormalise = false (and a score over all "
              "experts) to give it a gradient");
  }
  const ForwardCall call{config, inputs, outputs, stream};
  select_implementation("router", kForward, call).run(call);
}

RouterLosses router_losses(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                           const RouterLossInputs& loss_inputs, Stream stream) {
  check_common(config, inputs, route);
  check_losses(losses, loss_inputs, route.T);
  const LossesCall call{config, losses, inputs, route, loss_inputs, stream};
  return select_implementation("router", kLosses, call).run(call);
}

void router_losses_into(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                        const RouterLossInputs& loss_inputs, double* values, Stream stream) {
  WB_CHECK(values != nullptr, "the losses need memory for 3 values");
  check_common(config, inputs, route);
  check_losses(losses, loss_inputs, route.T);
  const bool on_host = inputs.logits.device.type == DeviceType::kCpu;
  const LossesCall call{config, losses, inputs, route, loss_inputs, stream, on_host ? nullptr : values};
  const RouterLosses result = select_implementation("router", kLosses, call).run(call);
  if (on_host) values[0] = result.aux, values[1] = result.sequence, values[2] = result.z;
}

void router_backward(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route, const float* d_weights,
                     const RouterLossInputs& loss_inputs, float loss_scale, const TensorView& d_logits, Stream stream) {
  check_common(config, inputs, route);
  check_losses(losses, loss_inputs, route.T);
  check_gradient(config, inputs, route, d_logits);
  WB_CHECK(std::isfinite(loss_scale), "loss_scale must be finite, got {}", loss_scale);
  const BackwardCall call{config, losses, inputs, route, d_weights, loss_inputs, loss_scale, d_logits, stream};
  select_implementation("router", kBackward, call).run(call);
}

namespace {

bool is_on_host(const RouterInputs& inputs) { return inputs.logits.device.type == DeviceType::kCpu; }

// Of a call on the CPU: the coefficients times the weights.
RouterLossConfig weighted(RouterLossConfig losses, const float* weights) {
  if (weights != nullptr) losses.aux_coefficient *= weights[0], losses.sequence_coefficient *= weights[1], losses.z_coefficient *= weights[2];
  return losses;
}

}  // namespace

void router_losses_weighted(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                            const RouterLossInputs& loss_inputs, const float* loss_weights, float* values, Stream stream) {
  WB_CHECK(values != nullptr, "the losses need memory for 3 values");
  if (is_on_host(inputs)) {
    const RouterLosses result = router_losses(config, weighted(losses, loss_weights), inputs, route, loss_inputs, stream);
    values[0] = static_cast<float>(result.aux), values[1] = static_cast<float>(result.sequence), values[2] = static_cast<float>(result.z);
    return;
  }
  check_common(config, inputs, route);
  check_losses(losses, loss_inputs, route.T);
  const LossesCall call{config, losses, inputs, route, loss_inputs, stream, nullptr, loss_weights, values};
  (void)select_implementation("router", kLosses, call).run(call);
}

void router_backward_weighted(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                              const float* d_weights, const RouterLossInputs& loss_inputs, const float* loss_weights, const TensorView& d_logits,
                              Stream stream) {
  if (is_on_host(inputs)) return router_backward(config, weighted(losses, loss_weights), inputs, route, d_weights, loss_inputs, 1.0f, d_logits, stream);
  check_common(config, inputs, route);
  check_losses(losses, loss_inputs, route.T);
  check_gradient(config, inputs, route, d_logits);
  const BackwardCall call{config, losses, inputs, route, d_weights, loss_inputs, 1.0f, d_logits, stream, loss_weights};
  select_implementation("router", kBackward, call).run(call);
}

namespace router_impl {

const DeviceBackend* g_device_backend = nullptr;

std::int64_t count_valid_tokens(const RouterInputs& inputs, std::int64_t begin, std::int64_t end) {
  std::int64_t valid = 0;
  for (std::int64_t t = begin; t < end; ++t) valid += !is_padding(inputs, t);
  return valid;
}

void write_counts(const ForwardCall& call) {
  const RouterOutputs& outputs = call.outputs;
  if (outputs.route.counts == nullptr && outputs.offsets == nullptr && outputs.aligned_offsets == nullptr) return;
  const RouteView& route = outputs.route;
  Tensor scratch;
  std::int32_t* counts = route.counts;
  if (counts == nullptr) {
    scratch.resize(DType::kI32, {route.E});
    counts = scratch.as<std::int32_t>();
  }
  std::memset(counts, 0, static_cast<std::size_t>(route.E) * sizeof(std::int32_t));
  for (std::int64_t t = 0; t < route.T; ++t) {
    for (std::int64_t k = 0; k < route.K; ++k) {
      const std::int32_t id = route.id(t, k);
      if (id >= 0) ++counts[id];
    }
  }
  const auto scan = [&](std::int32_t* offsets, std::int64_t alignment) {
    std::int64_t next = 0;
    for (std::int64_t e = 0; e < route.E; ++e) {
      offsets[e] = static_cast<std::int32_t>(next);
      next += (counts[e] + alignment - 1) / alignment * alignment;
    }
    offsets[route.E] = static_cast<std::int32_t>(next);
  };
  if (outputs.offsets != nullptr) scan(outputs.offsets, 1);
  if (outputs.aligned_offsets != nullptr) scan(outputs.aligned_offsets, call.config.offset_alignment);
}

}  // namespace router_impl
}  // namespace waybill
