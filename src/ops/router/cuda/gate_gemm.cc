// SPDX-License-Identifier: Apache-2.0
#include "ops/router/cuda/gate_gemm.h"

#include "core/cuda/cuda_error.h"
#include "core/cuda/dense_matmul.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/work_room.h"
#include "ops/router/cuda/gate_split.h"

namespace waybill::cuda {
namespace {

// Room for d_logits in two terms and what follows from them, behind the workspace of the matmuls.
std::byte* split_room(std::size_t bytes, int device, cudaStream_t stream) {
  ScratchBuffer& room = work_room(device, stream);
  room.reserve(kDenseWorkspaceBytes + bytes, /*zero=*/false, device, stream);
  return room.as<std::byte>() + kDenseWorkspaceBytes;
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

namespace {

// bf16 operands: both terms of d_logits in one matmul each, so that x is read and d_x written once.
void backward_of_terms(const GateShape& s, const void* x, const void* weight, const float* d_logits, void* d_x, DType d_x_dtype, float* d_weight,
                       bool accumulate, int device, cudaStream_t stream) {
  const auto aligned = [](std::int64_t bytes) { return (static_cast<std::size_t>(bytes) + 255) / 256 * 256; };
  const std::size_t terms_bytes = aligned(s.T * 2 * s.E * 2), twice_bytes = aligned(2 * s.E * s.H * 2), sums_bytes = aligned(2 * s.E * s.H * 4);
  std::byte* terms = split_room(terms_bytes + twice_bytes + sums_bytes, device, stream);
  launch_gate_split(d_logits, terms, s.T, s.E, stream);
  check_launch("gate_split");
  if (d_x != nullptr) {
    std::byte* twice = terms + terms_bytes;  // [2E, H]
    const auto bytes = static_cast<std::size_t>(s.E * s.H) * 2;
    for (std::size_t i = 0; i < 2; ++i) WB_TRY_CUDA(cudaMemcpyAsync(twice + i * bytes, weight, bytes, cudaMemcpyDeviceToDevice, stream));
    dense_matmul({.M = s.T, .N = s.H, .C = 2 * s.E, .dtype = s.dtype, .out = d_x_dtype}, terms, twice, d_x, device, stream);
  }
  if (d_weight != nullptr) {
    auto* sums = reinterpret_cast<float*>(terms + terms_bytes + twice_bytes);  // [2E, H]
    dense_matmul({.M = 2 * s.E, .N = s.H, .C = s.T, .transpose_a = true, .dtype = s.dtype}, terms, x, sums, device, stream);
    launch_gate_add(sums, d_weight, static_cast<std::size_t>(s.E * s.H), accumulate, stream);
    check_launch("gate_add");
  }
}

}  // namespace

void gate_backward(const GateShape& s, const void* x, const void* weight, const float* d_logits, void* d_x, float* d_weight, bool accumulate, int device,
                   cudaStream_t stream, DType d_x_dtype) {
  check(s);
  const DeviceGuard guard(device);
  if (s.dtype == DType::kBF16 && s.T > 0) return backward_of_terms(s, x, weight, d_logits, d_x, d_x_dtype, d_weight, accumulate, device, stream);
  if (d_x != nullptr) dense_matmul({.M = s.T, .N = s.H, .C = s.E, .dtype = s.dtype, .out = d_x_dtype}, d_logits, weight, d_x, device, stream);
  if (d_weight != nullptr) {
    dense_matmul({.M = s.E, .N = s.H, .C = s.T, .transpose_a = true, .accumulate = accumulate, .dtype = s.dtype}, d_logits, x, d_weight, device, stream);
  }
}

}  // namespace waybill::cuda
