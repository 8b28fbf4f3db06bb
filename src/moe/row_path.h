// SPDX-License-Identifier: Apache-2.0
// How rows travel to their experts and back: the compact path (Exchange) or the dense-map path. One contract, two designs.
#pragma once

#include <vector>

#include "waybill/exchange.h"

namespace waybill::moe {

// What plan() leaves: kept for combine and for backward. `ids` is the dense-map path's own copy of the routes' ids.
struct RowHandle {
  DispatchHandle exchange;
  std::vector<std::int32_t> ids;  // [T, K], dense-map path only

  const ReceiveLayout& layout() const { return exchange.layout; }
  std::size_t bytes() const;  // host memory it holds
};

// All calls are collective over the EP group. The contracts are those of the same names in Exchange.
class RowPath {
 public:
  virtual ~RowPath() = default;
  // pad_capacity >= 0: every expert gets this many slots from this rank, padded with nothing (dense-map path only).
  virtual RowHandle plan(const RouteView& route, std::int64_t pad_capacity, PhaseTimes* times) = 0;
  virtual void dispatch(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) = 0;
  // dispatch in two halves (see Exchange::dispatch_start). A path without halves does all of it here and leaves nothing pending.
  virtual PendingRows dispatch_start(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) {
    dispatch(handle, x, rows, times);
    return {};
  }
  virtual void combine(const RowHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) = 0;
  virtual void return_slot_values(const RowHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) = 0;
  virtual const ExchangeBytes& bytes() const = 0;
  virtual void reset_bytes() = 0;
};

class CompactPath final : public RowPath {
 public:
  CompactPath(const ExchangeConfig& config, const ExpertPlacement& placement, Fabric& ep, ThreadPool* pool) : exchange_(config, placement, ep, pool) {}

  RowHandle plan(const RouteView& route, std::int64_t /*pad_capacity*/, PhaseTimes* times) override { return RowHandle{exchange_.plan(route, times), {}}; }
  void dispatch(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) override { exchange_.dispatch(handle.exchange, x, rows, times); }
  PendingRows dispatch_start(const RowHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) override {
    return exchange_.dispatch_start(handle.exchange, x, rows, times);
  }
  void combine(const RowHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) override {
    exchange_.combine(handle.exchange, z, out, times);
  }
  void return_slot_values(const RowHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times) override {
    exchange_.return_slot_values(handle.exchange, slot_values, d_weights, times);
  }
  const ExchangeBytes& bytes() const override { return exchange_.bytes(); }
  void reset_bytes() override { exchange_.reset_bytes(); }

  Exchange& exchange() { return exchange_; }

 private:
  Exchange exchange_;
};

}  // namespace waybill::moe
