// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <vector>

#include "core/cuda/cuda_error.h"
#include "core/cuda/device_buffer.h"
#include "waybill/tensor.h"

namespace waybill::cuda {

// A tensor on a GPU that is filled from and read as floats.
struct DeviceTensor {
  DeviceBuffer memory;
  TensorView view;
  DeviceTensor() = default;
  DeviceTensor(DType dtype, std::initializer_list<std::int64_t> shape, int device) {
    view = TensorView(nullptr, dtype, shape, Device{DeviceType::kCuda, device});
    memory = DeviceBuffer(static_cast<std::size_t>(view.size()) * size_bytes(dtype) + 16, device);
    view.data = memory.data();
  }
  void set(const std::vector<float>& values) const {
    std::vector<bf16> rounded(values.begin(), values.end());
    const void* from = view.dtype == DType::kF32 ? static_cast<const void*>(values.data()) : static_cast<const void*>(rounded.data());
    WB_TRY_CUDA(cudaMemcpy(view.data, from, values.size() * size_bytes(view.dtype), cudaMemcpyHostToDevice));
    WB_TRY_CUDA(cudaStreamSynchronize(cudaStreamLegacy));  // a small copy returns before it is done, and other streams do not wait for it
  }
  std::vector<float> get() const { return get(view.shape[0]); }
  std::vector<float> get(std::int64_t rows) const { return read(this->rows(rows)); }
  static std::vector<float> read(const TensorView& view) {
    const auto n = static_cast<std::size_t>(view.size());
    std::vector<float> values(n);
    if (view.dtype == DType::kF32) {
      WB_TRY_CUDA(cudaMemcpy(values.data(), view.data, n * 4, cudaMemcpyDeviceToHost));
      return values;
    }
    std::vector<bf16> raw(n);
    WB_TRY_CUDA(cudaMemcpy(raw.data(), view.data, n * 2, cudaMemcpyDeviceToHost));
    return std::vector<float>(raw.begin(), raw.end());
  }
  TensorView rows(std::int64_t count) const {
    TensorView part = view;
    part.shape[0] = count;
    return part;
  }
};

}  // namespace waybill::cuda
