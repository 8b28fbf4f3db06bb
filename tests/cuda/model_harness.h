// SPDX-License-Identifier: Apache-2.0
// Host tensors on the GPU and back, and every kernel run twice: eagerly, then captured into poisoned memory.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/graph.h"
#include "cuda/needs_gpu.h"
#include "ops/model/op_test_util.h"

namespace waybill::cuda::testing {

// A copy of host values, with zeros behind them: copies of the whole buffer read no byte that nobody wrote (initcheck).
template <class T>
DeviceBuffer upload(const T* values, std::int64_t count) {
  DeviceBuffer buffer(static_cast<std::size_t>(count) * sizeof(T) + 16);
  buffer.fill(0);
  buffer.upload(values, static_cast<std::size_t>(count) * sizeof(T));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  return buffer;
}
inline DeviceBuffer upload(const Tensor& t) { return upload(t.as<float>(), t.size()); }
template <class T>
DeviceBuffer upload(const std::vector<T>& v) {
  return upload(v.data(), static_cast<std::int64_t>(v.size()));
}
template <class T>
std::vector<T> download(const DeviceBuffer& buffer, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  buffer.download(values.data(), values.size() * sizeof(T));
  WB_TRY_CUDA(cudaDeviceSynchronize());
  return values;
}
inline void download(const DeviceBuffer& buffer, Tensor& to) {
  const std::vector<float> values = download<float>(buffer, to.size());
  if (!values.empty()) std::memcpy(to.as<float>(), values.data(), values.size() * sizeof(float));
}

inline float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Something that is queued on a stream and writes `outputs`, which `reset` brings to their state before: run eagerly, then captured and replayed. The bytes
// must be equal.
inline void expect_equal_on_replay(const std::function<void(cudaStream_t)>& queue, const std::vector<const DeviceBuffer*>& outputs,
                                   const std::function<void(cudaStream_t)>& reset) {
  const CudaStream stream;
  const auto bytes_of = [&](const DeviceBuffer& buffer) {
    std::vector<std::byte> bytes(buffer.bytes());
    buffer.download(bytes.data(), bytes.size(), stream);
    stream.synchronize();
    return bytes;
  };
  reset(stream);
  queue(stream);
  std::vector<std::vector<std::byte>> eager;
  for (const DeviceBuffer* buffer : outputs) eager.push_back(bytes_of(*buffer));
  const GraphExec graph = GraphExec::capture(stream, queue);
  reset(stream);
  graph.launch(stream);
  for (std::size_t i = 0; i < outputs.size(); ++i) EXPECT_EQ(bytes_of(*outputs[i]), eager[i]) << "output " << i;
}
inline void expect_equal_on_replay(const std::function<void(cudaStream_t)>& queue, const std::vector<const DeviceBuffer*>& outputs) {
  expect_equal_on_replay(queue, outputs, [&](cudaStream_t stream) {
    for (const DeviceBuffer* buffer : outputs) buffer->fill(0xcd, stream);
  });
}

}  // namespace waybill::cuda::testing
