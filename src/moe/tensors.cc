// SPDX-License-Identifier: Apache-2.0
#include "moe/tensors.h"

#include <algorithm>
#include <string>

namespace waybill::moe {
namespace {

void check_tensor(const TensorView& view, bool wanted, std::initializer_list<std::int64_t> shape, std::string_view what, std::string_view name) {
  if (!wanted) {
    WB_CHECK(!view, "{} {} was given ({}), but the layer's configuration has no use for it", what, name, view.describe());
    return;
  }
  const TensorView expected(nullptr, DType::kF32, shape);
  WB_CHECK(view, "{} {} is missing: expected {}", what, name, expected.describe());
  const bool same = view.rank == expected.rank && std::equal(view.shape.begin(), view.shape.begin() + view.rank, expected.shape.begin());
  WB_CHECK(same && view.dtype == DType::kF32 && view.device == Device{}, "{} {}: expected {}, got {}", what, name, expected.describe(), view.describe());
  WB_CHECK(view.is_contiguous(), "{} {} must be contiguous: {}", what, name, view.describe());
  WB_CHECK(view.data != nullptr || view.size() == 0, "{} {} has no memory: {}", what, name, view.describe());
}

}  // namespace

void check_tensors(const MoeConfig& c, std::int64_t L, const MoeTensors& t, std::string_view what) {
  const std::int64_t W = c.row_width();
  check_tensor(t.gate, true, {c.E, c.H}, what, "gate");
  if (what == "parameter" && t.router_bias) check_tensor(t.router_bias, true, {c.E}, what, "router_bias");
  WB_CHECK(what != "parameter" || t.router_bias || c.bias_update_rate == 0, "parameter router_bias is missing: bias_update_rate = {}", c.bias_update_rate);
  check_tensor(t.w1, true, {L, c.inner_width(), W}, what, "w1");
  check_tensor(t.w2, true, {L, W, c.local_F()}, what, "w2");
  check_tensor(t.b1, c.expert_bias, {L, c.inner_width()}, what, "b1");
  check_tensor(t.b2, c.expert_bias, {L, W}, what, "b2");
  const bool shared = c.shared_F > 0;
  check_tensor(t.shared_w1, shared, {shared ? c.shared_inner_width() : 0, c.H}, what, "shared_w1");
  check_tensor(t.shared_w2, shared, {c.H, c.shared_F}, what, "shared_w2");
  check_tensor(t.latent_down, c.latent > 0, {c.latent, c.H}, what, "latent_down");
  check_tensor(t.latent_up, c.latent > 0, {c.H, c.latent}, what, "latent_up");
}

void check_activations(const TensorView& view, std::int64_t T, std::int64_t H, std::string_view name) {
  WB_CHECK(view.rank == 2 && view.shape[1] == H, "{} must be [T, H = {}], got {}", name, H, view.describe());
  WB_CHECK(view.shape[0] == T, "{} has {} rows, expected T = {}", name, view.shape[0], T);
  WB_CHECK(view.dtype == DType::kF32 && view.device == Device{} && view.is_contiguous(), "{} must be contiguous f32 on cpu, got {}", name, view.describe());
}

}  // namespace waybill::moe
