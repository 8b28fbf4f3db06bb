// SPDX-License-Identifier: Apache-2.0
// Activations quantised: on the CPU one op after the other, which is the reference; on a GPU fused, or one after the other in the caller's memory.
#include "waybill/quantize_activated.h"

#include "core/implementation.h"
#include "ops/quantize/device_backend.h"

namespace waybill {
namespace {

using Call = detail::QuantizeActivatedCall;

bool is_gradient(const ActivatedRows& x) { return static_cast<bool>(x.da); }

// [S, columns] of h's type on h's device: what quantize() would be given.
TensorView values_of(const ActivatedRows& x) {
  check_activation_config(x.activation);
  WB_CHECK(x.h.rank == 2 && (x.h.dtype == DType::kF32 || x.h.dtype == DType::kBF16), "quantize_activated: h must be f32 or bf16 [S, columns], got {}",
           x.h.describe());
  const std::int64_t inputs = activation_input_width(x.activation, 1), S = x.h.shape[0], F = x.h.shape[1] / inputs;
  WB_CHECK(x.h.shape[1] == inputs * F, "quantize_activated: h must hold gate and up, 2F columns, got {}", x.h.describe());
  TensorView values = x.h;
  values.shape[1] = is_gradient(x) ? x.h.shape[1] : F, values.stride[0] = values.shape[1], values.stride[1] = 1;
  for (const auto& [name, view] : {std::pair("weight", &x.weight), std::pair("d_weight", &x.d_weight)}) {
    WB_CHECK(!*view || (view->rank == 1 && view->shape[0] == S && view->dtype == DType::kF32 && view->is_contiguous() && view->device == x.h.device),
             "quantize_activated: {} must be contiguous f32 [{}] on {}, got {}", name, S, to_string(x.h.device), view->describe());
  }
  WB_CHECK(x.h.shape[1] <= 1 || x.h.stride[1] == 1, "quantize_activated: the columns of h must be adjacent, got stride {}", x.h.stride[1]);
  WB_CHECK(S <= 1 || x.h.stride[0] >= x.h.shape[1], "quantize_activated: row stride {} of h is less than its {} columns", x.h.stride[0], x.h.shape[1]);
  WB_CHECK(!x.d_weight || is_gradient(x), "quantize_activated: d_weight is written beside the gradient only, da is not given");
  if (!is_gradient(x)) return values;
  WB_CHECK(
      x.da.rank == 2 && x.da.shape[0] == S && x.da.shape[1] == F && x.da.dtype == x.h.dtype && x.da.device == x.h.device && (F <= 1 || x.da.stride[1] == 1),
      "quantize_activated: da must be {} [{}, {}] with adjacent columns on {}, got {}", to_string(x.h.dtype), S, F, to_string(x.h.device), x.da.describe());
  WB_CHECK(S <= 1 || x.da.stride[0] >= F, "quantize_activated: row stride {} of da is less than its {} columns", x.da.stride[0], F);
  WB_CHECK(x.da.data != nullptr || x.da.size() == 0, "quantize_activated: da has no memory: {}", x.da.describe());
  return values;
}

float* floats(const TensorView& view) { return static_cast<float*>(view ? view.data : nullptr); }

// The two ops. wide: room for the values.
void run_unfused(const Call& call, const TensorView& wide) {
  const ActivatedRows& x = call.x;
  const std::int32_t* num_rows = call.offsets ? static_cast<const std::int32_t*>(call.offsets.data) + call.offsets.shape[0] - 1 : nullptr;
  if (is_gradient(x)) {
    activation_backward(x.activation, x.h, floats(x.weight), x.da, wide, floats(x.d_weight), call.stream, num_rows);
  } else {
    activation_forward(x.activation, x.h, floats(x.weight), wide, call.stream, num_rows);
  }
  if (call.columns == nullptr) return quantize(*call.config, wide, call.offsets, *call.out, call.stream, call.status);
  quantize_both(*call.config, *call.columns, wide, call.offsets, *call.out, *call.columns_out, call.stream, call.status);
}

std::string refuse_fused(const Call& call) {
  if (detail::g_quantize_device_backend == nullptr) return "no CUDA backend is linked";
  return detail::g_quantize_device_backend->refuse_activated(call);
}
void run_fused(const Call& call) { detail::g_quantize_device_backend->run_activated(call); }

std::string refuse_wide(const Call& call) {
  const TensorView& wide = call.x.wide;
  if (!wide) return "no room for the values (`wide`) was given";
  const bool fits = wide.rank == 2 && wide.shape[0] == call.values.shape[0] && wide.shape[1] == call.values.shape[1] && wide.dtype == call.values.dtype &&
                    wide.device == call.values.device;
  return fits ? std::string() : "`wide` must be like " + call.values.describe() + ", got " + wide.describe();
}
void run_wide(const Call& call) { run_unfused(call, call.x.wide); }

void run(const Call& call) {
  static constexpr Implementation<Call> kList[] = {{"cuda", refuse_fused, run_fused}, {"cuda_unfused", refuse_wide, run_wide}};
  WB_CHECK(call.stream.device == call.values.device, "quantize_activated: the stream is on {}, the tensors are on {}", to_string(call.stream.device),
           to_string(call.values.device));
  if (call.values.device.type != DeviceType::kCpu) return select_implementation("quantize_activated", kList, call).run(call);
  Tensor wide = Tensor::zeros(call.values.dtype, {call.values.shape[0], call.values.shape[1]});
  run_unfused(call, wide);
}

}  // namespace

void quantize_activated(const QuantConfig& config, const ActivatedRows& x, const TensorView& offsets, const QuantizedView& out, Stream stream,
                        StatusWord* status) {
  const TensorView values = values_of(x);
  detail::check_quantize(config, values, offsets, out);
  run({&config, &out, nullptr, nullptr, x, values, offsets, stream, status});
}

void quantize_both_activated(const QuantConfig& rows, const QuantConfig& columns, const ActivatedRows& x, const TensorView& offsets,
                             const QuantizedView& rows_out, const QuantizedView& columns_out, Stream stream, StatusWord* status) {
  const TensorView values = values_of(x);
  detail::check_quantize_both(rows, columns);
  detail::check_quantize(rows, values, offsets, rows_out), detail::check_quantize(columns, values, offsets, columns_out);
  run({&rows, &rows_out, &columns, &columns_out, x, values, offsets, stream, status});
}

}  // namespace waybill
