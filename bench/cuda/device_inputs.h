// SPDX-License-Identifier: Apache-2.0
// Inputs of benchmarks on the first GPU.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "waybill/tensor.h"

namespace waybill::cuda {

inline constexpr Device kGpu{DeviceType::kCuda, 0};

inline TensorView device_view(const DeviceBuffer& buffer, DType dtype, std::initializer_list<std::int64_t> shape) {
  TensorView view(buffer.data(), dtype, shape);
  view.device = kGpu;
  return view;
}

inline DeviceBuffer upload(const std::vector<std::int32_t>& values) {
  DeviceBuffer buffer(values.size() * 4);
  buffer.upload(values.data(), buffer.bytes());
  return buffer;
}

}  // namespace waybill::cuda
