// SPDX-License-Identifier: Apache-2.0
#include "ops/model/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/model/simd.h"

namespace waybill {
namespace {

constexpr std::int64_t kChunkRows = 64;  // rows of one partial sum of d_weight: fixes the order of the sum

WB_SIMD_INLINE void forward_rows_body(const float* x, const float* weight, float epsilon, float* y, float* rstd, std::int64_t rows, std::int64_t width) {
  using namespace simd;
  const std::int64_t full = width / kLanes * kLanes, tail = width - full;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* xr = x + r * width;
    float* yr = y + r * width;
    Floats squares{};
    for (std::int64_t i = 0; i < full; i += kLanes) {
      const Floats v = load(xr + i);
      squares += v * v;
    }
    if (tail > 0) {
      const Floats v = load_part(xr + full, tail);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
    if (rstd != nullptr) rstd[r] = scale;
    for (std::int64_t i = 0; i < full; i += kLanes) store(yr + i, load(xr + i) * scale * load(weight + i));
    for (std::int64_t i = full; i < width; ++i) yr[i] = xr[i] * scale * weight[i];
  }
}
WB_SIMD_KERNEL(forward_rows, (const float* x, const float* weight, float epsilon, float* y, float* rstd, std::int64_t rows, std::int64_t width),
               (x, weight, epsilon, y, rstd, rows, width))

WB_SIMD_INLINE void backward_rows_body(const float* x, const float* weight, const float* rstd, const float* dy, float* dx, bool accumulate, float* d_weight,
                                       std::int64_t rows, std::int64_t width) {
  using namespace simd;
  const std::int64_t full = width / kLanes * kLanes, tail = width - full;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* xr = x + r * width;
    const float* dyr = dy + r * width;
    float* dxr = dx + r * width;
    const float scale = rstd[r];
    Floats dots{};
    for (std::int64_t i = 0; i < full; i += kLanes) dots += load(dyr + i) * load(weight + i) * (load(xr + i) * scale);
    if (tail > 0) dots += load_part(dyr + full, tail) * load_part(weight + full, tail) * (load_part(xr + full, tail) * scale);
    const float mean = sum(dots) / static_cast<float>(width);
    for (std::int64_t i = 0; i < full; i += kLanes) {
      const Floats g = load(dyr + i), xhat = load(xr + i) * scale;
      Floats d = (g * load(weight + i) - xhat * mean) * scale;
      if (accumulate) d += load(dxr + i);
      store(d_weight + i, load(d_weight + i) + g * xhat);
      store(dxr + i, d);
    }
    for (std::int64_t i = full; i < width; ++i) {
      const float g = dyr[i], xhat = xr[i] * scale;
      const float d = (g * weight[i] - xhat * mean) * scale;
      d_weight[i] += g * xhat;
      dxr[i] = accumulate ? d + dxr[i] : d;
    }
  }
}
WB_SIMD_KERNEL(backward_rows,
               (const float* x, const float* weight, const float* rstd, const float* dy, float* dx, bool accumulate, float* d_weight, std::int64_t rows,
                std::int64_t width),
               (x, weight, rstd, dy, dx, accumulate, d_weight, rows, width))

void check_rows(const TensorView& x, const TensorView& weight, const TensorView& other, const char* name) {
  WB_CHECK(x.rank == 2 && x.is_contiguous() && other.rank == 2 && other.is_contiguous() && other.shape == x.shape,
           "rms_norm: x {} and {} {} must be contiguous and of one shape", x.describe(), name, other.describe());
  WB_CHECK(weight.rank == 1 && weight.shape[0] == x.shape[1], "rms_norm: weight {} does not fit x {}", weight.describe(), x.describe());
}

}  // namespace

void rms_norm_forward(const TensorView& x, const TensorView& weight, float epsilon, const TensorView& y, float* rstd, Stream stream) {
  check_rows(x, weight, y, "y");
  const std::int64_t width = x.shape[1];
  const float *xp = x.as<float>(), *wp = weight.as<float>();
  float* yp = y.as<float>();
  parallel_for(stream.pool, x.shape[0], kChunkRows, [&](std::int64_t begin, std::int64_t end) {
    forward_rows(xp + begin * width, wp, epsilon, yp + begin * width, rstd == nullptr ? nullptr : rstd + begin, end - begin, width);
  });
}

void rms_norm_backward(const TensorView& x, const TensorView& weight, const float* rstd, const TensorView& dy, const TensorView& dx, bool accumulate,
                       const TensorView& d_weight, Stream stream) {
  check_rows(x, weight, dy, "dy");
  check_rows(x, weight, dx, "dx");
  WB_CHECK(d_weight.rank == 1 && d_weight.shape[0] == x.shape[1], "rms_norm: d_weight {} does not fit x {}", d_weight.describe(), x.describe());
  const std::int64_t rows = x.shape[0], width = x.shape[1], chunks = (rows + kChunkRows - 1) / kChunkRows;
  const float *xp = x.as<float>(), *wp = weight.as<float>(), *dyp = dy.as<float>();
  float *dxp = dx.as<float>(), *dwp = d_weight.as<float>();
  std::vector<float> partial(static_cast<std::size_t>(chunks * width), 0.0f);
  parallel_for(stream.pool, chunks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin; c < end; ++c) {
      const std::int64_t first = c * kChunkRows, count = std::min(kChunkRows, rows - first);
      backward_rows(xp + first * width, wp, rstd + first, dyp + first * width, dxp + first * width, accumulate, partial.data() + c * width, count, width);
    }
  });
  for (std::int64_t c = 0; c < chunks; ++c)
    for (std::int64_t i = 0; i < width; ++i) dwp[i] += partial[static_cast<std::size_t>(c * width + i)];
}

}  // namespace waybill
