// SPDX-License-Identifier: Apache-2.0
// The dense-map path: what designs before compact routes do. Every rank sends every token, its [T, E] byte map and its full
// probability rows to every rank; each rank picks its experts' columns. Correct for any map, and as costly as it sounds.
#pragma once

#include "moe/row_path.h"
#include "waybill/fabric.h"

namespace waybill::moe {

// Routes that name an expert twice have their weights summed; both slots get the sum's gradient. Sums run over slots in expert
// order, then over ranks in rank order, in fp32; the wire is always fp32.
class DensePath final : public RowPath {
 public:
  DensePath(const ExpertPlacement& placement, Fabric& ep, std::int64_t alignment) : placement_(placement), ep_(ep), alignment_(alignment) {}

  RowHandle plan(const RouteView& route, std::int64_t pad_capacity, PhaseTimes* times) override;
  // A caller's own map instead of routes: probabilities [T, E] fp32, 0 = not routed.
  RowHandle plan_map(const TensorView& dense_map, PhaseTimes* times);
  void dispatch(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) override;
  void combine(const RowHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) override;
  void return_slot_values(const RowHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) override;
  // The gradient of a caller's map [T, E]; 0 where it was 0.
  void return_map_values(const RowHandle& handle, const float* slot_values, const TensorView& d_map, PhaseTimes* times);
  const ExchangeBytes& bytes() const override { return bytes_; }
  void reset_bytes() override { bytes_ = {}; }

 private:
  RowHandle exchange_map(std::int64_t T, const std::uint8_t* map, const float* probabilities, std::int64_t pad_capacity);
  std::vector<float> return_columns(const RowHandle& handle, const float* slot_values);

  ExpertPlacement placement_;
  Fabric& ep_;
  std::int64_t alignment_;
  ExchangeBytes bytes_;
};

}  // namespace waybill::moe
