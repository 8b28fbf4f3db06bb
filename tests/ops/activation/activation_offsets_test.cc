// SPDX-License-Identifier: Apache-2.0
// Element offsets beyond 2^31, at their full values, in address space of which only a few pages are touched.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/gemm/sparse_memory.h"
#include "waybill/activation.h"

namespace waybill {
namespace {

using testing::Sparse;

constexpr std::int64_t kH = 7168, kFirstBeyond = 299594;  // first row of width 7168 that starts at element 2^31 or later

// Row s of a view whose rows are `stride` elements apart.
TensorView far_rows(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  TensorView view = TensorView::of(data, {rows, columns});
  view.stride[0] = stride;
  return view;
}

TEST(ActivationOffsets, F13_RowsBeyond2To31ElementsAreTheRightRows) {
  EXPECT_EQ(((std::int64_t{1} << 31) + kH - 1) / kH, kFirstBeyond);
  const std::int64_t stride = kFirstBeyond * kH, S = 3, F = 20;
  const Sparse h(S * stride * 4), a(S * stride * 4), dh(S * stride * 4);
  if (!h.ok() || !a.ok() || !dh.ok()) GTEST_SKIP() << "needs 77 GiB of address space";
  Tensor small(DType::kF32, {S, 2 * F}), a_small(DType::kF32, {S, F}), dh_small(DType::kF32, {S, 2 * F});
  for (std::int64_t i = 0; i < small.size(); ++i) small.as<float>()[i] = static_cast<float>(i % 17) - 8.0f;
  const float weight[] = {1.0f, 0.5f, 2.0f};
  for (std::int64_t s = 0; s < S; ++s) std::memcpy(h.as<float>() + s * stride, small.as<float>() + s * 2 * F, static_cast<std::size_t>(2 * F) * 4);
  const TensorView h_far = far_rows(h.as<float>(), S, 2 * F, stride), a_far = far_rows(a.as<float>(), S, F, stride),
                   dh_far = far_rows(dh.as<float>(), S, 2 * F, stride);
  std::vector<float> d_far(3), d_small(3);
  activation_forward({}, h_far, weight, a_far);
  activation_forward({}, small, weight, a_small);
  activation_backward({}, h_far, weight, a_far, dh_far, d_far.data());
  activation_backward({}, small, weight, a_small, dh_small, d_small.data());
  EXPECT_EQ(d_far, d_small);
  for (std::int64_t s = 0; s < S; ++s) {
    EXPECT_EQ(std::memcmp(a.as<float>() + s * stride, a_small.as<float>() + s * F, static_cast<std::size_t>(F) * 4), 0) << s;
    EXPECT_EQ(std::memcmp(dh.as<float>() + s * stride, dh_small.as<float>() + s * 2 * F, static_cast<std::size_t>(2 * F) * 4), 0) << s;
  }
}

}  // namespace
}  // namespace waybill
