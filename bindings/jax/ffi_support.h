// SPDX-License-Identifier: Apache-2.0
// Short forms between XLA's FFI and the C ABI: buffers as wb_tensor, statuses as ffi::Error, configs as bytes.
#pragma once

#include <cstring>
#include <string>

#include "waybill/waybill.h"
#include "xla/ffi/api/ffi.h"

namespace waybill::jax {

namespace ffi = xla::ffi;

inline ffi::ErrorCode code_of(wb_status status) {
  switch (status) {
    case WB_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case WB_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case WB_OUT_OF_MEMORY:
      return ffi::ErrorCode::kResourceExhausted;
    case WB_TIMEOUT:
      return ffi::ErrorCode::kDeadlineExceeded;
    case WB_PEER_FAILED:
      return ffi::ErrorCode::kAborted;
    default:
      return ffi::ErrorCode::kInternal;
  }
}

inline ffi::Error to_error(wb_status status) {
  if (status == WB_OK) return ffi::Error::Success();
  return ffi::Error(code_of(status), std::string("waybill: ") + wb_last_error());
}

#define WB_FFI_TRY(call)                                                                                \
  do {                                                                                                  \
    if (const wb_status wb_ffi_status = (call); wb_ffi_status != WB_OK) return to_error(wb_ffi_status); \
  } while (false)

inline ffi::Error refuse(const std::string& text) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, "waybill: " + text); }

inline std::int32_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return WB_F32;
    case ffi::BF16:
      return WB_BF16;
    case ffi::F16:
      return WB_F16;
    case ffi::S16:
      return WB_I16;
    case ffi::S32:
      return WB_I32;
    case ffi::U8:
    case ffi::PRED:
      return WB_U8;
    case ffi::F8E4M3FN:
      return WB_F8E4M3;
    case ffi::F8E5M2:
      return WB_F8E5M2;
    default:
      return -1;  // refused by the library, with the tensor's name
  }
}

// Where a call's arrays are, and the stream it queues on: the CPU and this thread, or a CUDA device.
class Place {
 public:
  Place() = default;
  Place(std::int32_t device, void* native) : is_cuda_(true), stream_{sizeof(wb_stream), WB_CUDA_DEVICE, device, native, nullptr} {}
  std::int32_t device_type() const { return stream_.device_type; }
  std::int32_t device_index() const { return stream_.device_index; }
  const wb_stream* stream() const { return is_cuda_ ? &stream_ : nullptr; }

 private:
  bool is_cuda_ = false;
  wb_stream stream_{};
};

// Arrays of XLA are contiguous. Works for ffi::AnyBuffer and for typed buffers.
template <class Buffer>
wb_tensor to_tensor(const Buffer& buffer, const Place& at = {}) {
  wb_tensor tensor{};
  tensor.device_type = at.device_type();
  tensor.device_index = at.device_index();
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype_of(buffer.element_type());
  for (const std::int64_t size : buffer.dimensions()) {
    if (tensor.rank < 4) tensor.shape[tensor.rank] = size;
    ++tensor.rank;
  }
  return tensor;
}

template <class T, class Buffer>
T* data_of(const Buffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

using Bytes = ffi::Span<const std::uint8_t>;

// A config struct that Python filled in (waybill.RouterConfig.struct() and its like).
template <class T>
bool read_config(const Bytes& bytes, T& config) {
  if (bytes.size() != sizeof(T)) return false;
  std::memcpy(&config, bytes.begin(), sizeof(T));
  return true;
}

template <class Ids, class Weights>
wb_route to_route(std::int64_t E, const Ids& ids, const Weights& weights, std::int32_t* counts = nullptr, const Place& at = {}) {
  const wb_tensor shape = to_tensor(ids);
  wb_route route{};
  route.device_type = at.device_type();
  route.device_index = at.device_index();
  route.struct_size = sizeof(route);
  route.T = shape.shape[0];
  route.K = shape.shape[1];
  route.E = E;
  route.id_dtype = shape.dtype;
  route.ids = shape.data;
  route.weights = data_of<float>(weights);
  route.counts = counts;
  return route;
}

}  // namespace waybill::jax
