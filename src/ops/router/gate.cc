// SPDX-License-Identifier: Apache-2.0
// The gate matmul's checks, its host form (sums in double; the MoE layer on the CPU has a matmul of its own) and the way to the device.
#include "waybill/gate.h"

#include "ops/router/device_backend.h"
#include "waybill/thread_pool.h"

namespace waybill {
namespace {

using router_impl::GateCall;

void check_matrix(const TensorView& view, const char* name, DType dtype, std::int64_t rows, std::int64_t columns, Device device) {
  WB_CHECK(view.rank == 2 && view.shape[0] == rows && view.shape[1] == columns && view.dtype == dtype && view.is_contiguous() && view.device == device,
           "{} must be a contiguous {} [{}, {}] on {}, got {}", name, to_string(dtype), rows, columns, to_string(device), view.describe());
  WB_CHECK(view.data != nullptr || rows * columns == 0, "{} [{}, {}] has no memory", name, rows, columns);
}

// [T, E, H] of the operands.
GateCall check_operands(const TensorView& x, const TensorView& weight, const TensorView& logits, const char* logits_name, Stream stream) {
  WB_CHECK(x.rank == 2 && weight.rank == 2 && x.shape[1] == weight.shape[1] && x.shape[1] >= 1 && weight.shape[0] >= 1,
           "the gate needs x [T, H] and weight [E, H], got {} and {}", x.describe(), weight.describe());
  WB_CHECK(x.dtype == DType::kF32 || x.dtype == DType::kBF16, "the gate takes bf16 or f32, got {}", to_string(x.dtype));
  const GateCall call{x, weight, logits, {}, {}, false, stream};
  check_matrix(x, "x", x.dtype, call.T(), call.H(), x.device);
  check_matrix(weight, "weight", x.dtype, call.E(), call.H(), x.device);
  check_matrix(logits, logits_name, DType::kF32, call.T(), call.E(), x.device);
  return call;
}

const router_impl::DeviceBackend* backend_for(const TensorView& x) {
  if (x.device.type == DeviceType::kCpu) return nullptr;
  if (router_impl::g_device_backend == nullptr) WB_FAIL(ErrorCode::kUnsupported, "the gate: x is on {}, and no CUDA backend is linked", to_string(x.device));
  return router_impl::g_device_backend;
}

// Element [row, column] of x or weight.
double at(const TensorView& view, std::int64_t row, std::int64_t column) {
  const std::int64_t i = row * view.shape[1] + column;
  return view.dtype == DType::kF32 ? static_cast<const float*>(view.data)[i] : static_cast<float>(static_cast<const bf16*>(view.data)[i]);
}

template <class Sum>
void fill_rows(Stream stream, const TensorView& out, bool accumulate, const Sum& sum) {
  auto* values = static_cast<float*>(out.data);
  const std::int64_t columns = out.shape[1];
  const auto rows = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * columns; i < end * columns; ++i) {
      const double value = sum(i / columns, i % columns);
      values[i] = static_cast<float>(accumulate ? static_cast<double>(values[i]) + value : value);
    }
  };
  parallel_for(stream.pool, out.shape[0], 1, rows);
}

}  // namespace

void gate_forward(const TensorView& x, const TensorView& weight, const TensorView& logits, Stream stream) {
  const GateCall call = check_operands(x, weight, logits, "logits", stream);
  if (const auto* backend = backend_for(x); backend != nullptr) return backend->gate_forward(call);
  fill_rows(stream, logits, false, [&](std::int64_t t, std::int64_t e) {
    double sum = 0;
    for (std::int64_t h = 0; h < call.H(); ++h) sum += at(x, t, h) * at(weight, e, h);
    return sum;
  });
}

void gate_backward(const TensorView& x, const TensorView& weight, const TensorView& d_logits, const TensorView& d_x, const TensorView& d_weight,
                   bool accumulate, Stream stream) {
  GateCall call = check_operands(x, weight, d_logits, "d_logits", stream);
  if (d_x) check_matrix(d_x, "d_x", DType::kF32, call.T(), call.H(), x.device);
  if (d_weight) check_matrix(d_weight, "d_weight", DType::kF32, call.E(), call.H(), x.device);
  call.d_x = d_x, call.d_weight = d_weight, call.accumulate = accumulate;
  if (const auto* backend = backend_for(x); backend != nullptr) return backend->gate_backward(call);
  const auto* g = static_cast<const float*>(d_logits.data);
  if (d_x) {
    fill_rows(stream, d_x, false, [&](std::int64_t t, std::int64_t h) {
      double sum = 0;
      for (std::int64_t e = 0; e < call.E(); ++e) sum += static_cast<double>(g[t * call.E() + e]) * at(weight, e, h);
      return sum;
    });
  }
  if (d_weight) {
    fill_rows(stream, d_weight, accumulate, [&](std::int64_t e, std::int64_t h) {
      double sum = 0;
      for (std::int64_t t = 0; t < call.T(); ++t) sum += static_cast<double>(g[t * call.E() + e]) * at(x, t, h);
      return sum;
    });
  }
}

}  // namespace waybill
