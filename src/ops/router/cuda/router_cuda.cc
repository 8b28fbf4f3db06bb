// SPDX-License-Identifier: Apache-2.0
#include "ops/router/cuda/router_cuda.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/scratch_buffer.h"
#include "core/cuda/stream_map.h"
#include "ops/router/cuda/gate_gemm.h"
#include "ops/router/cuda/router_params.h"
#include "ops/router/cuda/tuning.h"
#include "ops/router/device_backend.h"

namespace waybill::cuda {

using router_impl::BackwardCall;
using router_impl::ForwardCall;
using router_impl::LossesCall;

const DeviceLimits& device_limits(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceLimits> cache;
  const std::lock_guard lock(mutex);
  const auto found = cache.find(device);
  if (found != cache.end()) return found->second;
  DeviceLimits limits{};
  limits.device = device;
  WB_TRY_CUDA(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device));
  WB_TRY_CUDA(cudaDeviceGetAttribute(&limits.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  WB_TRY_CUDA(cudaDeviceGetAttribute(&limits.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  WB_TRY_CUDA(cudaDeviceGetAttribute(&limits.compute_major, cudaDevAttrComputeCapabilityMajor, device));
  return cache.emplace(device, limits).first->second;
}

namespace {

// What the launchers see: a forced portable path is that of a GPU without sm_90's instructions.
DeviceLimits limits_for(int device, bool portable) {
  DeviceLimits limits = device_limits(device);
  if (portable) limits.compute_major = std::min(limits.compute_major, 8);
  return limits;
}

// Scratch of one (device, stream): calls on one stream run in order, so they may share it. The counting part is zero between launches.
struct Scratch {
  static constexpr std::size_t kExperts = router_tuning::kMaxExperts;
  struct Fixed {
    std::uint32_t counts[kExperts + 4];
    std::int32_t aux_counts[kExperts];
    std::uint32_t forward_ticket, reached, loss_ticket, sums_ready, sums_readers, unused;
    std::int32_t valid_tokens, padding;
    double losses[4];
    double partials[3 * 2048];
  };
  ScratchBuffer fixed, sequences, sums;
  Fixed* at() const { return fixed.as<Fixed>(); }
};

// Room for the partial score sums of `partials` CTAs.
RouterSumParams sum_scratch(Scratch& scratch, const RouterRows& rows, int partials, int device, cudaStream_t stream) {
  const std::size_t squares = static_cast<std::size_t>(partials + 1) / 2 * 2 * sizeof(double),
                    bytes = squares + static_cast<std::size_t>(partials) * rows.E * sizeof(float);
  scratch.sums.reserve(bytes, false, device, stream);
  RouterSumParams p{};
  p.rows = rows;
  p.square_partials = scratch.sums.as<double>();
  p.sum_partials = reinterpret_cast<float*>(scratch.sums.as<std::byte>() + squares);
  if (router_tuning::policy().early_sums) p.ready = &scratch.at()->sums_ready, p.readers = &scratch.at()->sums_readers;
  return p;
}

Scratch& scratch_of(int device, cudaStream_t stream) {
  static StreamMap<Scratch> all;
  Scratch& scratch = all.at(device, stream);
  scratch.fixed.reserve(sizeof(Scratch::Fixed), true, device, stream);
  return scratch;
}

LogitType logit_type(DType dtype) { return dtype == DType::kF32 ? LogitType::kF32 : (dtype == DType::kBF16 ? LogitType::kBF16 : LogitType::kF16); }

RouterRows rows_of(const RouterConfig& config, const RouterInputs& inputs) {
  RouterRows rows{};
  rows.logits = inputs.logits.data;
  rows.row_stride = inputs.logits.stride[0];
  rows.bias = static_cast<const float*>(inputs.expert_bias.data);
  rows.mask = static_cast<const std::uint8_t*>(inputs.expert_mask.data);
  rows.padding = static_cast<const std::uint8_t*>(inputs.padding_mask.data);
  rows.T = inputs.logits.shape[0];
  rows.E = static_cast<int>(config.E), rows.K = static_cast<int>(config.K);
  rows.score = static_cast<int>(config.score);
  rows.renormalise = config.renormalise ? 1 : 0;
  rows.scale = config.scaling_factor, rows.epsilon = config.normalise_epsilon;
  return rows;
}

// Empty where the warp kernel takes the rows; they differ in speed, not in results.
std::string refuse_warp(const RouterConfig& config, const RouterInputs& inputs) {
  const int tier = router_tuning::vector_tier(static_cast<int>(config.E));
  const auto size = static_cast<std::int64_t>(size_bytes(inputs.logits.dtype));
  if (config.E % 4 != 0 || inputs.logits.stride[0] % 4 != 0 ||
      reinterpret_cast<std::uintptr_t>(inputs.logits.data) % static_cast<std::uintptr_t>(4 * size) != 0) {
    return "rows are not aligned to 4 logits";
  }
  // Beyond this K the narrowed rows would pass kMaxCandidates; up to 128 experts all of them fit.
  const std::int64_t groups = 32 * std::min(tier, 4);
  if (config.K > router_tuning::kMaxWarpK || (config.E > router_tuning::kMaxCandidates && 5 * config.K > 3 * groups))
    return "K is too large for the warp kernel";
  const bool has_bias = inputs.expert_bias || inputs.expert_mask;
  const bool is_exact = router_impl::uses_groups(config) || (has_bias && config.score == ScoreFunction::kSqrtSoftplus);
  if (is_exact && tier > router_tuning::kMaxGroupedVectors) return "grouped rows of more than 1,024 experts";
  if (tier > router_tuning::kMaxGroupedVectors &&
      (config.E * size % 16 != 0 || inputs.logits.stride[0] * size % 16 != 0 || reinterpret_cast<std::uintptr_t>(inputs.logits.data) % 16 != 0 ||
       device_limits(inputs.logits.device.index).compute_major < 9)) {
    return "long rows are staged by 16-byte bulk copies (sm_90)";
  }
  if (router_impl::uses_groups(config)) {
    const std::int64_t size_of_group = config.E / config.num_groups, lanes = size_of_group / 4;
    if (config.num_groups > router_tuning::kMaxFastGroups || size_of_group % 4 != 0 || lanes > 32 || (lanes & (lanes - 1)) != 0 ||
        router_impl::keys_per_group_score(config) > 2) {
      return "groups are not 4, 8, 16, ... 128 experts scored by 1 or 2";
    }
  }
  return {};
}

void check_device_pointer(const void* pointer, const char* name, int device) {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
  if (error != cudaSuccess) (void)cudaGetLastError();
  const bool usable = error == cudaSuccess && (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged);
  WB_CHECK(usable && attributes.device == device, "{} must be memory of cuda:{}, got {} {}", name, device,
           usable ? "memory of device" : "host memory or an unknown pointer", usable ? attributes.device : -1);
}

// Memory of the device, aligned to elements of `size` bytes. Optional memory may be null.
void check_memory(const void* data, std::size_t size, const char* name, int device) {
  WB_CHECK(reinterpret_cast<std::uintptr_t>(data) % size == 0, "{} must be aligned to its elements of {} bytes, got address {}", name, size, fmt::ptr(data));
  check_device_pointer(data, name, device);
}
void check_optional(const void* data, std::size_t size, const char* name, int device) {
  if (data != nullptr) check_memory(data, size, name, device);
}
// What forward, losses and backward read and write.
void check_memory(const RouterInputs& inputs, const RouteView& route, int device) {
  check_optional(inputs.expert_bias.data, 4, "expert_bias", device);
  check_optional(inputs.expert_mask.data, 1, "expert_mask", device);
  check_optional(route.counts, 4, "counts", device);
  if (route.T == 0) return;
  check_memory(inputs.logits.data, size_bytes(inputs.logits.dtype), "logits", device);
  check_optional(inputs.padding_mask.data, 1, "padding_mask", device);
  check_optional(inputs.replay_ids.data, inputs.replay_ids ? size_bytes(inputs.replay_ids.dtype) : 1, "replay_ids", device);
  check_optional(inputs.weight_factors.data, 4, "weight_factors", device);
  check_memory(route.ids, size_bytes(route.id_dtype), "ids", device);
  check_memory(route.weights, 4, "weights", device);
}

void launch_warp(LogitType type, const RouterForwardParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  using Launch = void (*)(const RouterForwardParams&, const DeviceLimits&, cudaStream_t);
  static constexpr Launch kLaunch[3][2] = {{launch_router_forward_warp_short_f32, launch_router_forward_warp_long_f32},
                                           {launch_router_forward_warp_short_bf16, launch_router_forward_warp_long_bf16},
                                           {launch_router_forward_warp_short_f16, launch_router_forward_warp_long_f16}};
  using LaunchQuads = bool (*)(const RouterForwardParams&, const DeviceLimits&, cudaStream_t);
  static constexpr LaunchQuads kQuads[3] = {launch_router_forward_quad_f32, launch_router_forward_quad_bf16, launch_router_forward_quad_f16};
  if (router_tuning::policy().quads && kQuads[static_cast<int>(type)](p, limits, stream)) return;
  kLaunch[static_cast<int>(type)][p.rows.E > 512 ? 1 : 0](p, limits, stream);
}

// Score sums of all rows by a kernel of their own.
void sum_scores(LogitType type, RouterSumParams s, const DeviceLimits& limits, cudaStream_t stream) {
  const std::int64_t T = s.rows.T;
  do {
    s.num_rows = std::min(T - s.first_row, kScoreSumRows);
    s.num_partials = launch_router_score_sums(type, s, limits, stream);
    s.accumulate = s.first_row > 0 ? 1 : 0;
    launch_router_reduce_sums(s, limits, stream);
    s.first_row += s.num_rows;
  } while (s.first_row < T);
}

void count_only(RouterForwardParams p, std::int32_t* counts, LogitType type, const DeviceLimits& limits, bool use_warp, cudaStream_t stream) {
  p.ids = nullptr, p.weights = nullptr, p.factors = nullptr, p.rows.bias = nullptr, p.replay_ids = nullptr, p.forced = 0;
  p.num_groups = p.num_kept = 1, p.sum_partials = nullptr;
  p.counts = counts, p.offsets = nullptr, p.aligned_offsets = nullptr, p.status = nullptr;
  if (use_warp) {
    launch_warp(type, p, limits, stream);
  } else {
    launch_router_forward_block(type, p, limits, stream);
  }
}

}  // namespace

std::string refuse_router(const RouterConfig& config, const RouterInputs& inputs) {
  if (inputs.logits.device.type != DeviceType::kCuda) return "takes CUDA memory, got " + to_string(inputs.logits.device);
  if (config.E > router_tuning::kMaxExperts) return fmt::format("takes up to {} experts, got E = {}", router_tuning::kMaxExperts, config.E);
  const DeviceLimits& limits = device_limits(inputs.logits.device.index);
  if (limits.compute_major < 8) return fmt::format("needs compute capability 8.0, cuda:{} has {}.x", limits.device, limits.compute_major);
  return {};
}

std::string refuse_router_forward(const ForwardCall& call, bool portable) {
  std::string reason = refuse_router(call.config, call.inputs);
  if (reason.empty() && !portable && !call.inputs.replay_ids && call.config.forced_balance == ForcedBalance::kOff)
    reason = refuse_warp(call.config, call.inputs);
  return reason;
}

void router_forward(const ForwardCall& call, bool portable) {
  const int device = call.inputs.logits.device.index;
  const DeviceLimits limits = limits_for(device, portable);
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  const DeviceGuard guard(device);
  const RouterOutputs& out = call.outputs;
  check_memory(call.inputs, out.route, device);
  check_optional(out.counts_unbiased, 4, "counts_unbiased", device), check_optional(out.offsets, 4, "offsets", device);
  check_optional(out.aligned_offsets, 4, "aligned_offsets", device), check_optional(out.status, 8, "the status word", device);
  check_optional(out.weight_factors, 4, "weight_factors", device), check_optional(out.score_sums, 8, "score_sums", device);
  WB_CHECK(out.route.T < (std::int64_t{1} << 30), "the CUDA router takes fewer than 2^30 tokens a call, got T = {}", out.route.T);
  RouterForwardParams p{};
  p.rows = rows_of(call.config, call.inputs);
  p.num_groups = static_cast<int>(call.config.num_groups), p.num_kept = static_cast<int>(call.config.num_kept_groups);
  p.group_best = static_cast<int>(router_impl::keys_per_group_score(call.config));
  p.ids = out.route.ids, p.id_bytes = static_cast<int>(size_bytes(out.route.id_dtype));
  p.weights = out.route.weights, p.factors = out.weight_factors;
  p.replay_ids = call.inputs.replay_ids.data;
  p.replay_bytes = call.inputs.replay_ids ? static_cast<int>(size_bytes(call.inputs.replay_ids.dtype)) : 0;
  p.forced = call.config.forced_balance != ForcedBalance::kOff ? 1 : 0;
  p.token_offset = call.inputs.token_offset;
  p.counts = out.route.counts, p.offsets = out.offsets, p.aligned_offsets = out.aligned_offsets;
  p.alignment = static_cast<int>(call.config.offset_alignment);
  p.status = out.status, p.early_counts = router_tuning::policy().early_counts ? 1 : 0;
  Scratch::Fixed* scratch = scratch_of(device, stream).at();
  const RouterCountScratch by_ticket{scratch->counts, &scratch->forward_ticket, nullptr},
      by_sum{scratch->counts, &scratch->forward_ticket, router_tuning::counts_by_sum(static_cast<int>(call.config.E)) ? &scratch->reached : nullptr};
  const bool use_block = portable || p.forced != 0 || p.replay_ids != nullptr;
  if (p.counts != nullptr || p.offsets != nullptr || p.aligned_offsets != nullptr) p.scratch = use_block ? by_ticket : by_sum;
  const LogitType type = logit_type(call.inputs.logits.dtype);
  if (p.factors != nullptr && use_block && p.rows.T > 0) WB_TRY_CUDA(cudaMemsetAsync(p.factors, 0, static_cast<std::size_t>(p.rows.T) * sizeof(float), stream));
  RouterSumParams sums{};
  if (out.score_sums != nullptr) {
    sums = sum_scratch(scratch_of(device, stream), p.rows, std::max(limits.num_sms, kScoreSumCtas), device, stream);
    sums.sums = out.score_sums, p.sum_partials = sums.sum_partials, p.square_partials = sums.square_partials, p.sums_ready = sums.ready;
    if (!use_block && type == LogitType::kF32 && router_tuning::policy().sums_in_forward) sums.num_partials = launch_router_forward_sums(p, limits, stream);
  }
  if (sums.num_partials > 0) {
    launch_router_reduce_sums(sums, limits, stream);
  } else if (p.forced != 0 || p.replay_ids != nullptr) {
    launch_router_forced(type, p, limits, stream);
  } else if (portable) {
    launch_router_forward_block(type, p, limits, stream);
  } else {
    launch_warp(type, p, limits, stream);
  }
  if (out.score_sums != nullptr && sums.num_partials == 0) sums.ready = nullptr, sum_scores(type, sums, limits, stream);
  check_launch("router_forward");
  if (out.counts_unbiased != nullptr) {
    RouterConfig plain = call.config;
    plain.num_groups = plain.num_kept_groups = 1;
    RouterInputs inputs = call.inputs;
    inputs.expert_bias = {};
    const bool use_warp = !portable && refuse_warp(plain, inputs).empty();
    p.scratch = use_warp ? by_sum : by_ticket;
    count_only(p, out.counts_unbiased, type, limits, use_warp, stream);
    check_launch("router_forward (unbiased counts)");
  }
}

namespace {

void require(const RouterConfig& config, const RouterInputs& inputs) {
  const std::string refusal = refuse_router(config, inputs);
  if (!refusal.empty()) WB_FAIL(ErrorCode::kUnsupported, "the CUDA router {}", refusal);
}

// Factors and scratch of a losses or backward call; queues the counting that it needs.
RouterLossParams prepare_losses(const RouterConfig& config, const RouterLossConfig& losses, const RouterInputs& inputs, const RouteView& route,
                                const RouterLossInputs& given, const float* loss_weights, const DeviceLimits& limits, cudaStream_t stream) {
  Scratch& scratch = scratch_of(limits.device, stream);
  Scratch::Fixed* fixed = scratch.at();
  RouterLossParams p{};
  p.rows = rows_of(config, inputs);
  p.ids = route.ids, p.id_bytes = static_cast<int>(size_bytes(route.id_dtype));
  p.aux_coefficient = losses.aux_coefficient, p.sequence_coefficient = losses.sequence_coefficient, p.z_coefficient = losses.z_coefficient;
  p.sequence_length = losses.sequence_coefficient != 0 ? losses.sequence_length : 0;
  p.aux_counts = given.aux_counts;
  p.loss_weights = loss_weights;
  p.aux_tokens = given.aux_tokens, p.loss_tokens = given.loss_tokens, p.num_sequences = given.num_sequences;
  p.row_partials = fixed->partials, p.ticket = &fixed->loss_ticket;
  if (p.rows.T == 0) p.sequence_length = 0, p.sequence_coefficient = 0;
  const bool has_aux = losses.aux_coefficient != 0;
  p.score_sums = losses.sequence_coefficient == 0 ? given.score_sums : nullptr;
  const bool counts_tokens =
      p.rows.padding != nullptr && ((has_aux && (given.aux_tokens == 0 || given.loss_tokens == 0)) || (losses.z_coefficient != 0 && given.loss_tokens == 0));
  const bool counts_aux = has_aux && given.aux_counts == nullptr;
  if (p.sequence_length > 0) {
    const std::int64_t B = p.rows.T / p.sequence_length;
    const std::size_t bytes = static_cast<std::size_t>(B * (config.E + 1)) * sizeof(std::int32_t);
    scratch.sequences.reserve(bytes, false, limits.device, stream);
    p.sequence_counts = scratch.sequences.as<std::int32_t>();
    p.sequence_valid = p.sequence_counts + B * config.E;
    WB_TRY_CUDA(cudaMemsetAsync(p.sequence_counts, 0, bytes, stream));
  }
  if (counts_aux) {
    WB_TRY_CUDA(cudaMemsetAsync(fixed->aux_counts, 0, static_cast<std::size_t>(config.E) * sizeof(std::int32_t), stream));
    p.aux_counts = fixed->aux_counts;
  }
  if (counts_tokens) {
    WB_TRY_CUDA(cudaMemsetAsync(&fixed->valid_tokens, 0, sizeof(std::int32_t), stream));
    p.valid_tokens = &fixed->valid_tokens;
  }
  if (counts_aux || counts_tokens || p.sequence_length > 0) {
    launch_router_loss_prepare(p, counts_aux ? fixed->aux_counts : nullptr, limits, stream);
    check_launch("router_loss_prepare");
  }
  return p;
}

}  // namespace

void router_losses_device(const LossesCall& call, double* out, bool portable) {
  require(call.config, call.inputs);
  const int device = call.inputs.logits.device.index;
  check_memory(out, 8, "the memory for losses", device);
  check_memory(call.inputs, call.route, device);
  check_optional(call.loss_inputs.aux_counts, 4, "aux_counts", device), check_optional(call.loss_inputs.score_sums, 8, "score_sums", device);
  check_optional(call.loss_weights, 4, "loss_weights", device);
  const DeviceLimits limits = limits_for(device, portable);
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  const DeviceGuard guard(device);
  RouterLossParams p = prepare_losses(call.config, call.losses, call.inputs, call.route, call.loss_inputs, call.loss_weights, limits, stream);
  p.out = out, p.out_f32 = call.values_f32;
  if (p.score_sums != nullptr) {
    launch_router_losses_from_sums(p, limits, stream);
    return check_launch("router_losses_from_sums");
  }
  launch_router_losses(logit_type(call.inputs.logits.dtype), p, limits, stream);
  check_launch("router_losses");
}

RouterLosses router_losses(const LossesCall& call, bool portable) {
  if (call.values != nullptr) {
    router_losses_device(call, call.values, portable);
    return {};
  }
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  if (call.values_f32 != nullptr) {
    check_memory(call.values_f32, 4, "the memory for losses", call.inputs.logits.device.index);
    const DeviceGuard guard(call.inputs.logits.device.index);
    router_losses_device(call, scratch_of(call.inputs.logits.device.index, stream).at()->losses, portable);
    return {};
  }
  double* out = scratch_of(call.inputs.logits.device.index, stream).at()->losses;
  router_losses_device(call, out, portable);
  RouterLosses values;
  double host[3];
  WB_TRY_CUDA(cudaMemcpyAsync(host, out, sizeof(host), cudaMemcpyDeviceToHost, stream));
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
  values.aux = host[0], values.sequence = host[1], values.z = host[2];
  return values;
}

void router_backward(const BackwardCall& call, bool portable) {
  require(call.config, call.inputs);
  const int device = call.inputs.logits.device.index;
  const DeviceLimits limits = limits_for(device, portable);
  const auto stream = static_cast<cudaStream_t>(call.stream.native);
  if (call.route.T == 0) return;
  const DeviceGuard guard(device);
  check_memory(call.inputs, call.route, device);
  check_memory(call.d_logits.data, 4, "d_logits", device), check_optional(call.d_weights, 4, "d_weights", device);
  check_optional(call.loss_inputs.aux_counts, 4, "aux_counts", device), check_optional(call.loss_weights, 4, "loss_weights", device);
  RouterBackwardParams p{};
  p.loss = prepare_losses(call.config, call.losses, call.inputs, call.route, call.loss_inputs, call.loss_weights, limits, stream);
  p.weights = call.route.weights, p.d_weights = call.d_weights, p.loss_scale = call.loss_scale;
  p.factors = static_cast<const float*>(call.inputs.weight_factors.data);
  p.d_logits = static_cast<float*>(call.d_logits.data), p.d_stride = call.d_logits.stride[0];
  launch_router_backward(logit_type(call.inputs.logits.dtype), p, limits, stream);
  check_launch("router_backward");
}

namespace {

GateShape gate_shape(const router_impl::GateCall& call) {
  for (const TensorView* view : {&call.x, &call.weight, &call.logits}) {
    WB_CHECK(call.T() == 0 || reinterpret_cast<std::uintptr_t>(view->data) % 16 == 0, "the gate's operands must be aligned to 16 bytes, got {}",
             view->describe());
  }
  return {call.T(), call.H(), call.E(), call.x.dtype};
}
void gate_forward_call(const router_impl::GateCall& call) {
  if (call.T() > 0) check_device_pointer(call.x.data, "x", call.x.device.index);
  gate_forward(gate_shape(call), call.x.data, call.weight.data, static_cast<float*>(call.logits.data), call.x.device.index,
               static_cast<cudaStream_t>(call.stream.native));
}
void gate_backward_call(const router_impl::GateCall& call) {
  if (call.T() > 0) check_device_pointer(call.x.data, "x", call.x.device.index);
  gate_backward(gate_shape(call), call.x.data, call.weight.data, static_cast<const float*>(call.logits.data), static_cast<float*>(call.d_x.data),
                static_cast<float*>(call.d_weight.data), call.accumulate, call.x.device.index, static_cast<cudaStream_t>(call.stream.native));
}

constexpr router_impl::DeviceBackend kBackend = {refuse_router_forward, router_forward, router_losses, router_backward, gate_forward_call, gate_backward_call};

}  // namespace

void register_router() { router_impl::g_device_backend = &kBackend; }

}  // namespace waybill::cuda
