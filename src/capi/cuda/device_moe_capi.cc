// SPDX-License-Identifier: Apache-2.0
// The MoE layer on GPUs: one rank of one process, whose steps live in arrays of the caller's.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "capi/cuda/in_flight.h"
#include "capi/cuda/process_memory.h"
#include "capi/moe_convert.h"
#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/scratch_buffer.h"
#include "moe/cuda/device_moe.h"
#include "moe/cuda/round_rows.h"
#include "moe/cuda/step_results.h"

using namespace waybill;
using namespace waybill::capi;

namespace {

std::size_t most_arena_bytes(const MoeConfig& config, int P) {
  return most_bytes(config, P, [&](int nodes) {
    cuda::DeviceMoeOptions options;
    options.nodes = nodes;
    return cuda::DeviceMoeLayer::arena_bytes(config, P, options);
  });
}
std::size_t most_saved_bytes(const MoeConfig& config, int P) {
  return most_bytes(config, P, [&](int nodes) { return cuda::DeviceMoeLayer::saved_bytes(config, P, nodes); });
}

cuda::DeviceMoeOptions layer_options(ProcessMemory& memory) {
  cuda::DeviceMoeOptions options;
  options.nodes = memory.num_nodes(), options.rail = memory.rail();
  options.exchange = tuning_beside(memory.ranks_on_device());
  return options;
}

}  // namespace

struct wb_device_moe {
  wb_device_moe(const MoeConfig& given, int device, std::unique_ptr<ProcessMemory> windows)
      : config(given),
        memory(std::move(windows)),
        layer(
            config, memory->ranks(), device, [this](const std::string& name, std::size_t bytes) { return memory->window(name, bytes); },
            layer_options(*memory)),
        step(layer.make_step()),
        where{DeviceType::kCuda, device},
        saved_bytes(static_cast<std::int64_t>(most_saved_bytes(config, memory->size()))) {
    memory->everybody_is_ready();
  }
  std::mutex calls;  // a call at a time: each sets the step up on the host before it queues its kernels
  MoeConfig config;
  std::unique_ptr<ProcessMemory> memory;
  cuda::DeviceMoeLayer layer;
  cuda::DeviceMoeStep step;
  Device where;
  std::int64_t saved_bytes;
  cuda::ScratchBuffer gate_gradient;  // f32 [E, H], before it is rounded; empty until a gradient of the gate is wanted in bf16
};

namespace {

// Counts over all ranks are wanted also where no loss needs them.
MoeConfig device_config(const wb_moe_config* given, int P) {
  MoeConfig config = to_moe_config(given);
  WB_CHECK(config.T_max > 0, "the MoE layer on GPUs needs T_max, the most tokens of a call, got {}", config.T_max);
  if (P > 1 && config.bias_update_rate == 0) config.bias_update_rate = std::numeric_limits<float>::min();
  return config;
}

TensorView device_view(const wb_tensor& tensor, const char* name) { return to_view(tensor, name, Memory::kAny); }

TensorView checked(const wb_tensor& tensor, DType dtype, std::initializer_list<std::int64_t> shape, Device where, const char* name) {
  const TensorView view = device_view(tensor, name);
  if (!view) return view;
  const TensorView expected(nullptr, dtype, shape, where);
  WB_CHECK(view.rank == expected.rank && std::equal(shape.begin(), shape.end(), view.shape.begin()) && view.dtype == dtype && view.device == where &&
               view.is_contiguous(),
           "{} must be {}, got {}", name, expected.describe(), view.describe());
  return view;
}

// The views that DeviceMoeForward points at.
struct ForwardOptions {
  TensorView mask[1], replay[1];
  cuda::DeviceMoeForward options;

  ForwardOptions(const wb_moe_forward_options* from, const wb_device_moe& layer, std::int64_t T) {
    const wb_moe_forward_options given = from == nullptr ? default_forward_options() : read_struct(from, "options", default_forward_options());
    options.rounding_seed = given.rounding_seed, options.rounding_seed_device = given.rounding_seed_device;
    options.training = given.training != 0, options.token_offset = given.token_offset;
    options.loss_tokens = given.loss_tokens, options.loss_sequences = given.loss_sequences;
    options.valid_tokens = static_cast<double>(T) * layer.memory->size();
    mask[0] = checked(given.padding_mask, DType::kU8, {T}, layer.where, "options.padding_mask");
    if (mask[0]) options.padding_masks = mask;
    if (mask[0] && layer.config.sequence_coefficient != 0 && options.loss_sequences == 0) {
      options.loss_sequences = options.valid_tokens / static_cast<double>(layer.config.sequence_length);
    }
    if (given.replay == nullptr) return;
    const RouteView route = to_route(given.replay, "options.replay", Memory::kAny);
    WB_CHECK(route.device == layer.where && route.T == T && route.K == layer.config.K, "options.replay holds [{}, {}] on {}, needed is [{}, {}] on {}", route.T,
             route.K, to_string(route.device), T, layer.config.K, to_string(layer.where));
    replay[0] = TensorView(route.ids, route.id_dtype, {T, route.K}, route.device);
    options.replay_ids = replay;
  }
};

cudaStream_t native(const wb_stream* stream, Device where) { return static_cast<cudaStream_t>(stream_on(stream, where, "the layer").native); }

void copy_out(const TensorView& to, const void* from, cudaStream_t stream) {
  if (to && to.size() > 0)
    WB_TRY_CUDA(cudaMemcpyAsync(to.data, from, static_cast<std::size_t>(to.size()) * size_bytes(to.dtype), cudaMemcpyDeviceToDevice, stream));
}

struct OutputViews {
  TensorView out, ids, weights, counts, losses, status, saved;

  OutputViews(const wb_device_moe_outputs* outputs, const wb_device_moe& layer, std::int64_t T) {
    const wb_device_moe_outputs given = read_struct(outputs, "outputs");
    const MoeConfig& c = layer.config;
    const Device at = layer.where;
    out = to_view(&given.out, "outputs.out", Memory::kAny);
    ids = checked(given.ids, route_id_dtype(c.E), {T, c.K}, at, "outputs.ids"), weights = checked(given.weights, DType::kF32, {T, c.K}, at, "outputs.weights");
    counts = checked(given.counts, DType::kI32, {c.E}, at, "outputs.counts"), losses = checked(given.losses, DType::kF32, {4}, at, "outputs.losses");
    status = checked(given.status, DType::kI32, {6}, at, "outputs.status");
    saved = checked(given.saved, DType::kU8, {layer.saved_bytes}, at, "outputs.saved");
  }
};

std::int64_t tokens_of(const TensorView& x) { return x.rank == 2 ? x.shape[0] : 0; }  // another rank is refused by the layer

}  // namespace

wb_status wb_device_moe_create(const wb_moe_config* config, int32_t device, const wb_process_group* group, wb_device_moe** layer) noexcept {
  return guarded([&] {
    wb_device_moe*& target = required(layer, "layer");
    const wb_process_group ranks = checked_group(group, device);
    const cuda::DeviceGuard guard(device);
    const MoeConfig given = device_config(config, ranks.size);
    target = new wb_device_moe(
        given, device,
        make_process_memory(device, ranks.size > 1 ? &ranks : nullptr, most_arena_bytes(given, ranks.size), given.hierarchy != Hierarchy::kFlat));
  });
}

wb_status wb_device_moe_create_local(const wb_moe_config* config, int32_t P, const int32_t* devices, wb_device_moe** layers) noexcept {
  return guarded([&] {
    const MoeConfig given = device_config(config, P);
    make_local_ranks(
        P, devices, layers, [&](int ranks) { return most_arena_bytes(given, ranks); },
        [&](int device, std::unique_ptr<ProcessMemory> memory) { return std::make_unique<wb_device_moe>(given, device, std::move(memory)); });
  });
}

void wb_device_moe_destroy(wb_device_moe* layer) noexcept { delete layer; }

wb_status wb_device_moe_saved_bytes(const wb_moe_config* config, int32_t P, int64_t* bytes) noexcept {
  return guarded([&] { required(bytes, "bytes") = static_cast<int64_t>(most_saved_bytes(device_config(config, P), P)); });
}

wb_status wb_device_moe_forward(wb_device_moe* handle, const wb_moe_tensors* parameters, const wb_tensor* x, const wb_moe_forward_options* options,
                                const wb_device_moe_outputs* outputs, const wb_stream* stream) noexcept {
  return guarded([&] {
    wb_device_moe& own = required(handle, "layer");
    own.memory->check("forward");
    const std::lock_guard lock(own.calls);
    const TensorView inputs[] = {to_view(x, "x", Memory::kAny)};
    const std::int64_t T = tokens_of(inputs[0]);
    const ForwardOptions given(options, own, T);
    const OutputViews to(outputs, own, T);
    WB_CHECK(!given.options.training || to.saved, "outputs.saved is not given (rank 0), a training forward needs it");
    const MoeTensors weights[] = {to_moe_tensors(parameters, "parameters", Memory::kAny)};
    const TensorView outs[] = {to.out};
    const cudaStream_t queue = native(stream, own.where);
    own.memory->meet(queue);
    order_behind_transfers(own.where.index, queue);
    const cuda::RelaxedCapture relaxed;  // a stream's first call makes the matmuls' workspace, also while it is captured
    own.layer.forward(weights, inputs, outs, own.step, given.options, queue);
    const cuda::DeviceGuard guard(own.where.index);
    const cuda::DeviceRoute route = own.step.route(0);
    copy_out(to.ids, route.ids, queue), copy_out(to.weights, route.weights, queue);
    const std::int32_t* totals = own.step.total_counts(0);
    cuda::launch_step_results({&own.step.report(0), totals != nullptr ? totals : own.step.counts(0), static_cast<std::int32_t>(own.config.E),
                               static_cast<std::int32_t>(own.layer.budget().slots), own.layer.budget().rows, static_cast<std::int32_t*>(to.counts.data),
                               static_cast<float*>(to.losses.data), static_cast<std::int32_t*>(to.status.data)},
                              queue);
    cuda::check_launch("moe_step_results");
    // An evaluation computes no losses; the report has those of the last training forward.
    if (!given.options.training && to.losses) WB_TRY_CUDA(cudaMemsetAsync(to.losses.data, 0, 4 * sizeof(float), queue));
    if (given.options.training) own.layer.save(own.step, to.saved.data, queue);
  });
}

wb_status wb_device_moe_backward(wb_device_moe* handle, const wb_moe_tensors* parameters, const wb_moe_tensors* gradients, const wb_tensor* x,
                                 const wb_tensor* d_out, const wb_tensor* dx, const wb_moe_forward_options* options, const wb_tensor* saved,
                                 const float* loss_weights, const wb_stream* stream) noexcept {
  return guarded([&] {
    wb_device_moe& own = required(handle, "layer");
    own.memory->check("backward");
    const std::lock_guard lock(own.calls);
    const TensorView inputs[] = {to_view(x, "x", Memory::kAny)}, d_outs[] = {to_view(d_out, "d_out", Memory::kAny)}, dxs[] = {to_view(dx, "dx", Memory::kAny)};
    const ForwardOptions given(options, own, tokens_of(inputs[0]));
    const TensorView from = checked(required(saved, "saved"), DType::kU8, {own.saved_bytes}, own.where, "saved");
    WB_CHECK(static_cast<bool>(from), "saved is not given (rank 0)");
    const MoeTensors weights[] = {to_moe_tensors(parameters, "parameters", Memory::kAny)};
    MoeTensors sums[] = {to_moe_tensors(gradients, "gradients", Memory::kAny)};
    const TensorView gate = sums[0].gate;
    const bool rounds = gate && gate.dtype == DType::kBF16;
    const cudaStream_t queue = native(stream, own.where);
    if (rounds) {
      (void)checked(required(gradients, "gradients").gate, DType::kBF16, {own.config.E, own.config.H}, own.where, "gradient gate");
      own.gate_gradient.reserve(static_cast<std::size_t>(own.config.E * own.config.H) * sizeof(float), /*zero=*/false, own.where.index, queue);
      sums[0].gate = TensorView(own.gate_gradient.data(), DType::kF32, {own.config.E, own.config.H}, own.where);
    }
    own.memory->meet(queue);
    order_behind_transfers(own.where.index, queue);
    const cuda::RelaxedCapture relaxed;
    own.layer.restore(own.step, from.data, inputs[0], given.options, queue);
    cuda::DeviceMoeBackward backward;
    backward.loss_weights = loss_weights;
    own.layer.backward(weights, sums, inputs, d_outs, dxs, own.step, backward, queue);
    if (!rounds) return;
    const cuda::DeviceGuard guard(own.where.index);
    cuda::launch_round_rows(own.gate_gradient.as<float>(), gate.data, gate.size(), true, queue);
    cuda::check_launch("moe_round_rows");
  });
}

wb_status wb_device_moe_get_status(wb_device_moe* handle, wb_step_status* status, const wb_stream* stream) noexcept {
  return guarded([&] {
    wb_device_moe& own = required(handle, "layer");
    write_struct(status, from_status(own.layer.status(0, native(stream, own.where))), "status");
    own.memory->check("status");
    if (const std::string error = own.memory->first_error(); !error.empty()) WB_FAIL(ErrorCode::kPeerFailed, "{}", error);
  });
}
