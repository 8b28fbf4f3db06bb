// SPDX-License-Identifier: Apache-2.0
#include "waybill/activation.h"

#include <algorithm>
#include <cmath>

#include "ops/activation/activation_kernels.h"
#include "ops/activation/activation_ref.h"
#include "ops/activation/device_backend.h"

namespace waybill {
namespace {

void check_matrix(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns, Device device) {
  WB_CHECK(view.rank == 2 && view.shape[0] == rows && view.shape[1] == columns, "activation: {} must be [{}, {}], got {}", name, rows, columns,
           view.describe());
  WB_CHECK(view.dtype == DType::kF32 || view.dtype == DType::kBF16, "activation: {} must be f32 or bf16, got {}", name, view.describe());
  WB_CHECK(view.device == device, "activation: {} is not on {}: {}", name, device.type == DeviceType::kCpu ? "the cpu" : to_string(device), view.describe());
  WB_CHECK(columns <= 1 || view.stride[1] == 1, "activation: the columns of {} must be adjacent, got stride {}", name, view.stride[1]);
  WB_CHECK(rows <= 1 || view.stride[0] >= columns, "activation: row stride {} of {} is less than its {} columns", view.stride[0], name, columns);
  WB_CHECK(view.data != nullptr || view.size() == 0, "activation: {} has no memory: {}", name, view.describe());
}

const detail::ActivationDeviceBackend& device_backend(const Stream& stream) {
  if (detail::g_activation_device_backend == nullptr) {
    WB_FAIL(ErrorCode::kUnsupported, "activation: the tensors are on {}, but no CUDA backend is linked", to_string(stream.device));
  }
  return *detail::g_activation_device_backend;
}

std::int64_t existing_rows(std::int64_t rows, const std::int32_t* num_rows) {
  if (num_rows == nullptr) return rows;
  WB_CHECK(*num_rows >= 0 && *num_rows <= rows, "activation: *num_rows must be in [0, {}], got {}", rows, *num_rows);
  return *num_rows;
}

constexpr std::int64_t kRun = 512;            // columns worked on at a time, so that buffers stay in the first-level cache
constexpr std::int64_t kTaskColumns = 16384;  // elements a task should hold

std::int64_t rows_per_task(std::int64_t F) { return std::max<std::int64_t>(kTaskColumns / std::max<std::int64_t>(F, 1), 1); }

// Columns of one row as fp32: the tensor itself, or `buffer` after widening.
const float* load_run(const TensorView& view, std::int64_t row, std::int64_t column, std::int64_t count, float* buffer) {
  const std::int64_t index = row * view.stride[0] + column;
  if (view.dtype == DType::kF32) return static_cast<const float*>(view.data) + index;
  const bf16* in = static_cast<const bf16*>(view.data) + index;
  for (std::int64_t i = 0; i < count; ++i) buffer[i] = static_cast<float>(in[i]);
  return buffer;
}

// Where a run is computed: the tensor itself, or `buffer`, which store_run() then rounds into the tensor.
float* output_run(const TensorView& view, std::int64_t row, std::int64_t column, float* buffer) {
  return view.dtype == DType::kF32 ? static_cast<float*>(view.data) + row * view.stride[0] + column : buffer;
}
void store_run(const TensorView& view, std::int64_t row, std::int64_t column, std::int64_t count, const float* run) {
  if (view.dtype == DType::kF32) return;
  bf16* out = static_cast<bf16*>(view.data) + row * view.stride[0] + column;
  for (std::int64_t i = 0; i < count; ++i) out[i].bits = bf16::from_float(run[i]);
}

// Sum of products of one row: column f goes to lane f mod 16, lanes are added in pairs. The order depends on F only.
class RowSum {
 public:
  void add(const float* product, std::int64_t count) {  // count is a multiple of 16 except in the last run
    for (std::int64_t f = 0; f < count; f += kLanes) {
      const std::int64_t width = std::min(kLanes, count - f);
      for (std::int64_t lane = 0; lane < width; ++lane) lanes_[lane] += product[f + lane];
    }
  }
  float total() {
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::int64_t lane = 0; lane < half; ++lane) lanes_[lane] += lanes_[lane + half];
    }
    return lanes_[0];
  }

 private:
  static constexpr std::int64_t kLanes = 16;
  static_assert(kRun % kLanes == 0);
  float lanes_[kLanes] = {};
};

bool is_gated(const ActivationConfig& config) { return config.kind != Activation::kReluSquared; }

void forward_row(const ActivationConfig& config, const detail::ActivationKernels& kernels, const TensorView& h, float weight, const TensorView& a,
                 std::int64_t s) {
  const std::int64_t F = a.shape[1];
  float gate[kRun], up[kRun], out[kRun];
  for (std::int64_t f = 0; f < F; f += kRun) {
    const std::int64_t count = std::min(kRun, F - f);
    const detail::ActivationRun run{load_run(h, s, f, count, gate), is_gated(config) ? load_run(h, s, F + f, count, up) : nullptr, weight, count};
    kernels.forward(config, run, output_run(a, s, f, out));
    store_run(a, s, f, count, out);
  }
}

float backward_row(const ActivationConfig& config, const detail::ActivationKernels& kernels, const TensorView& h, float weight, const TensorView& da,
                   const TensorView& dh, std::int64_t s) {
  const std::int64_t F = da.shape[1];
  float gate[kRun], up[kRun], d[kRun], d_gate[kRun], d_up[kRun], product[kRun];
  RowSum sum;
  for (std::int64_t f = 0; f < F; f += kRun) {
    const std::int64_t count = std::min(kRun, F - f);
    const detail::ActivationRun run{load_run(h, s, f, count, gate), is_gated(config) ? load_run(h, s, F + f, count, up) : nullptr, weight, count};
    kernels.backward(config, run, load_run(da, s, f, count, d), output_run(dh, s, f, d_gate), is_gated(config) ? output_run(dh, s, F + f, d_up) : nullptr,
                     product);
    store_run(dh, s, f, count, d_gate);
    if (is_gated(config)) store_run(dh, s, F + f, count, d_up);
    sum.add(product, count);
  }
  return sum.total();
}

}  // namespace

std::int64_t activation_input_width(const ActivationConfig& config, std::int64_t F) { return config.kind == Activation::kReluSquared ? F : 2 * F; }

namespace detail {

const ActivationDeviceBackend* g_activation_device_backend = nullptr;

}  // namespace detail

void check_activation_config(const ActivationConfig& config) {
  const int kind = static_cast<int>(config.kind);
  WB_CHECK(kind >= 0 && kind <= static_cast<int>(Activation::kReluSquared), "activation: unknown kind {}", kind);
  if (config.kind != Activation::kClampedSwiGLU) return;
  WB_CHECK(config.limit > 0, "activation: the clamp limit must be > 0, got {}", config.limit);
  WB_CHECK(std::isfinite(config.alpha), "activation: alpha must be finite, got {}", config.alpha);
}

void activation_forward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& a, Stream stream,
                        const std::int32_t* num_rows) {
  check_activation_config(config);
  WB_CHECK(a.rank == 2, "activation: a must be [S, F], got {}", a.describe());
  check_matrix("a", a, a.shape[0], a.shape[1], stream.device);
  check_matrix("h", h, a.shape[0], activation_input_width(config, a.shape[1]), stream.device);
  if (stream.device.type != DeviceType::kCpu) return device_backend(stream).forward({config, h, a, weight, num_rows, stream, {}, nullptr});
  const std::int64_t rows = existing_rows(a.shape[0], num_rows);
  const detail::ActivationKernels* kernels = detail::selected_activation_kernels();
  if (kernels == nullptr) return activation_forward_ref(config, h.rows(0, rows), weight, a.rows(0, rows));
  parallel_for(stream.pool, rows, rows_per_task(a.shape[1]), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t s = begin; s < end; ++s) forward_row(config, *kernels, h, weight == nullptr ? 1.0f : weight[s], a, s);
  });
}

void activation_backward(const ActivationConfig& config, const TensorView& h, const float* weight, const TensorView& da, const TensorView& dh, float* d_weight,
                         Stream stream, const std::int32_t* num_rows) {
  check_activation_config(config);
  WB_CHECK(da.rank == 2, "activation: da must be [S, F], got {}", da.describe());
  check_matrix("da", da, da.shape[0], da.shape[1], stream.device);
  const std::int64_t width = activation_input_width(config, da.shape[1]);
  check_matrix("h", h, da.shape[0], width, stream.device);
  check_matrix("dh", dh, da.shape[0], width, stream.device);
  if (stream.device.type != DeviceType::kCpu) return device_backend(stream).backward({config, h, da, weight, num_rows, stream, dh, d_weight});
  const std::int64_t rows = existing_rows(da.shape[0], num_rows);
  const detail::ActivationKernels* kernels = detail::selected_activation_kernels();
  if (kernels == nullptr) return activation_backward_ref(config, h.rows(0, rows), weight, da.rows(0, rows), dh.rows(0, rows), d_weight);
  parallel_for(stream.pool, rows, rows_per_task(da.shape[1]), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t s = begin; s < end; ++s) {
      const float sum = backward_row(config, *kernels, h, weight == nullptr ? 1.0f : weight[s], da, dh, s);
      if (d_weight != nullptr) d_weight[s] = sum;
    }
  });
}

}  // namespace waybill
