// SPDX-License-Identifier: Apache-2.0
#include "model/cuda/device_parameters.h"

#include <algorithm>

#include "core/cuda/cuda_error.h"
#include "ops/model/cuda/model_kernels.h"

namespace waybill::cuda {
namespace {

constexpr std::int64_t kAlignment = 64;  // elements between the starts of parameters: 128 bytes of bf16

int layer_P(const ModelConfig& config, const Parameter& p) { return config.layers[static_cast<std::size_t>(p.layer)].P; }

template <class T>
DeviceBuffer upload(const std::vector<T>& values, int device) {
  DeviceBuffer buffer(std::max<std::size_t>(values.size() * sizeof(T), 1), device);
  const DeviceGuard guard(device);
  if (!values.empty()) WB_TRY_CUDA(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamLegacy));  // a small copy returns before it is done, and the model's stream does not wait for it
  return buffer;
}

}  // namespace

DeviceParameters::DeviceParameters(const ModelConfig& config, const model::ParameterList& list, const DeviceShare& share) : share_(share) {
  lay_out(config, list);
  const auto floats = [&](std::int64_t count) { return DeviceBuffer(static_cast<std::size_t>(count) * sizeof(float), share_.device); };
  values_ = floats(num_values_), grads_ = floats(num_trained_), m_ = floats(num_trained_), v_ = floats(num_trained_);
  copies_ = DeviceBuffer(static_cast<std::size_t>(num_trained_) * 2, share_.device);
  make_chunks(config, list);
}

void DeviceParameters::lay_out(const ModelConfig& config, const model::ParameterList& list) {
  places_.resize(list.parameters.size());
  std::int64_t next = 0;
  const auto place = [&](bool is_expert, bool is_trained) {
    for (std::size_t i = 0; i < list.parameters.size(); ++i) {
      const Parameter& p = list.parameters[i];
      if (p.is_expert != is_expert || p.trainable != is_trained) continue;
      Place& to = places_[i];
      const std::int64_t experts = p.is_expert ? p.num_experts : 1, each = p.value.size() / experts;
      to.num_units = is_trained ? experts : 0, to.first_unit = all_units_, to.own_end = experts;
      const int P = is_expert ? layer_P(config, p) : 1;
      if (is_expert) to.own_begin = experts / P * share_.first_slice(P), to.own_end = to.own_begin + experts / P * share_.group_ranks(P);
      to.offset = next, to.size = each * (to.own_end - to.own_begin), to.host_offset = each * to.own_begin;
      all_units_ += to.num_units;
      const std::int64_t begin = next;
      next += (to.size + kAlignment - 1) / kAlignment * kAlignment;
      if (!is_expert) continue;
      if (expert_ranges_.empty() || expert_ranges_.back().P != P) expert_ranges_.push_back({P, begin, begin});
      expert_ranges_.back().end = next;
    }
  };
  place(false, true);
  num_replicated_ = next;
  place(true, true);
  num_trained_ = next;
  place(false, false);
  num_values_ = next;
}

void DeviceParameters::make_chunks(const ModelConfig& config, const model::ParameterList& list) {
  std::vector<OptimizerChunk> chunks;
  std::vector<std::int64_t> unit_begin{0};
  std::vector<std::int32_t> units;
  std::vector<std::uint8_t> owner(static_cast<std::size_t>(all_units_), static_cast<std::uint8_t>(share_.index));
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& p = places_[i];
    const bool decays = list.parameters[i].decay;
    for (std::int64_t u = 0; u < p.num_units; ++u) {
      // Of several replicas the first: ranks 0 to P - 1, which lie over the GPUs in order and in equal numbers.
      if (list.parameters[i].is_expert) {
        const std::int64_t rank = u / (p.num_units / layer_P(config, list.parameters[i]));
        owner[static_cast<std::size_t>(p.first_unit + u)] = static_cast<std::uint8_t>(rank / share_.num_ranks);
      }
      if (u < p.own_begin || u >= p.own_end) continue;
      const std::int64_t each = p.size / (p.own_end - p.own_begin), first = p.offset + (u - p.own_begin) * each;
      for (std::int64_t begin = 0; begin < each; begin += kOptimizerChunk) {
        chunks.push_back({first + begin, static_cast<std::int32_t>(std::min<std::int64_t>(kOptimizerChunk, each - begin)),
                          static_cast<std::int32_t>(p.first_unit + u), decays ? 1 : 0, 0});
      }
      units.push_back(static_cast<std::int32_t>(p.first_unit + u)), unit_begin.push_back(static_cast<std::int64_t>(chunks.size()));
    }
  }
  num_chunks_ = static_cast<std::int64_t>(chunks.size()), num_units_ = static_cast<std::int64_t>(units.size());
  chunks_ = cuda::upload(chunks, share_.device), unit_begin_ = cuda::upload(unit_begin, share_.device), units_ = cuda::upload(units, share_.device);
  owner_ = cuda::upload(owner, share_.device);
  chunk_squares_ = DeviceBuffer(chunks.size() * sizeof(double), share_.device);
  squares_ = DeviceBuffer(static_cast<std::size_t>(all_units_) * sizeof(double), share_.device);
}

void DeviceParameters::upload(const model::ParameterList& list, std::span<const OptimizerState> states, cudaStream_t stream) {
  const DeviceGuard guard(share_.device);
  for (const DeviceBuffer* buffer : {&values_, &grads_, &m_, &v_}) buffer->fill(0, stream);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& p = places_[i];
    const auto copy_in = [&](const Tensor& from, const DeviceBuffer& to) {
      WB_TRY_CUDA(cudaMemcpyAsync(to.as<float>() + p.offset, from.as<float>() + p.host_offset, static_cast<std::size_t>(p.size) * sizeof(float),
                                  cudaMemcpyHostToDevice, stream));
    };
    copy_in(list.parameters[i].value, values_);
    if (!list.parameters[i].trainable) continue;
    copy_in(states[i].m, m_), copy_in(states[i].v, v_);
  }
  launch_to_bf16(values_.as<float>(), copies_.data(), num_trained_, stream);
  check_launch("to_bf16");
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

void DeviceParameters::copy_out(std::size_t parameter, const DeviceBuffer& from, const Tensor& to, cudaStream_t stream) const {
  const Place& p = places_[parameter];
  WB_TRY_CUDA(cudaMemcpyAsync(to.as<float>() + p.host_offset, from.as<float>() + p.offset, static_cast<std::size_t>(p.size) * sizeof(float),
                              cudaMemcpyDeviceToHost, stream));
}

void DeviceParameters::download(const model::ParameterList& list, std::span<const OptimizerState> states, cudaStream_t stream) const {
  const DeviceGuard guard(share_.device);
  for (std::size_t i = 0; i < places_.size(); ++i) {
    copy_out(i, values_, list.parameters[i].value, stream);
    if (!list.parameters[i].trainable) continue;
    copy_out(i, m_, states[i].m, stream), copy_out(i, v_, states[i].v, stream);
  }
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

void DeviceParameters::download_gradients(const model::ParameterList& list, cudaStream_t stream) const {
  const DeviceGuard guard(share_.device);
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (list.parameters[i].trainable) copy_out(i, grads_, list.parameters[i].grad, stream);
  WB_TRY_CUDA(cudaStreamSynchronize(stream));
}

SumSquares DeviceParameters::sum_squares() const {
  return {chunks_.as<OptimizerChunk>(), num_chunks_, grads_.as<float>(),   chunk_squares_.as<double>(), unit_begin_.as<std::int64_t>(),
          units_.as<std::int32_t>(),    num_units_,  squares_.as<double>()};
}

AdamW DeviceParameters::adamw(const OptimizerConfig& config, const UpdateState* state) const {
  return {chunks_.as<OptimizerChunk>(),
          num_chunks_,
          values_.as<float>(),
          m_.as<float>(),
          v_.as<float>(),
          grads_.as<float>(),
          copies_.data(),
          config.beta1,
          config.beta2,
          config.epsilon,
          state};
}

}  // namespace waybill::cuda
