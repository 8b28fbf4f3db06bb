// SPDX-License-Identifier: Apache-2.0
#include "ops/router/cuda/gate_gemm.h"

#include "core/cuda/cuda_error.h"
#include "core/cuda/dense_matmul.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream_map.h"
#include "ops/router/cuda/gate_split.h"

namespace waybill::cuda {
namespace {

// Room for the two halves of d_logits, one a (device, stream): calls on a stream run in order.
std::byte* split_room(std::size_t bytes, int device, cudaStream_t stream) {
  static StreamMap<DeviceBuffer> all;
  DeviceBuffer& room = all.at(device, stream);
  if (room.bytes() < bytes) room = DeviceBuffer(bytes, device);
  return room.as<std::byte>();
}

void check(const GateShape& s) {
  WB_CHECK(s.dtype == DType::kBF16 || s.dtype == DType::kF32, "the gate takes bf16 or f32, got {}", to_string(s.dtype));
  WB_CHECK(s.T >= 0 && s.H >= 1 && s.E >= 1, "the gate needs T >= 0, H >= 1, E >= 1, got T = {}, H = {}, E = {}", s.T, s.H, s.E);
}

}  // namespace

void gate_forward(const GateShape& s, const void* x, const void* weight, float* logits, int device, cudaStream_t stream) {
  check(s);
  dense_matmul({.M = s.T, .N = s.E, .C = s.H, .transpose_b = true, .dtype = s.dtype}, x, weight, logits, device, stream);
}

void gate_backward(const GateShape& s, const void* x, const void* weight, const float* d_logits, float* d_x, float* d_weight, bool accumulate, int device,
                   cudaStream_t stream) {
  check(s);
  const DeviceGuard guard(device);
  const void* terms[2] = {d_logits, nullptr};
  if (s.dtype == DType::kBF16 && s.T > 0) {
    const std::size_t bytes = (static_cast<std::size_t>(s.T * s.E) * 2 + 255) / 256 * 256;
    std::byte* room = split_room(2 * bytes, device, stream);
    launch_gate_split(d_logits, room, room + bytes, static_cast<std::size_t>(s.T * s.E), stream);
    check_launch("gate_split");
    terms[0] = room, terms[1] = room + bytes;
  }
  for (int i = 0; i < 2; ++i) {
    if (i == 1 && terms[i] == nullptr) break;
    if (d_x != nullptr) dense_matmul({.M = s.T, .N = s.H, .C = s.E, .accumulate = i > 0, .dtype = s.dtype}, terms[i], weight, d_x, device, stream);
    if (d_weight != nullptr) {
      dense_matmul({.M = s.E, .N = s.H, .C = s.T, .transpose_a = true, .accumulate = i > 0 || accumulate, .dtype = s.dtype}, terms[i], x, d_weight, device,
                   stream);
    }
  }
}

}  // namespace waybill::cuda
