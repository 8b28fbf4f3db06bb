// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine in two halves.
#include <exception>
#include <utility>

#include "exchange/impl.h"

namespace waybill {

PendingRows Exchange::dispatch_start(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times) {
  impl_->check_idle("dispatch");
  const PhaseScope scope(times, Phase::kDispatch);
  PendingRows pending(*impl_, handle, /*is_combine=*/false, {}, {});
  pending.request_ = impl_->dispatch_start(handle, x, rows);
  pending.to_ = rows;
  return pending;
}

PendingRows Exchange::combine_start(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times) {
  impl_->check_idle("combine");
  const PhaseScope scope(times, Phase::kCombine);
  PendingRows pending(*impl_, handle, /*is_combine=*/true, z, out);
  pending.request_ = impl_->combine_start(handle, z, out);
  return pending;
}

PendingRows::PendingRows(Exchange::Impl& exchange, const DispatchHandle& handle, bool is_combine, const TensorView& from, const TensorView& to)
    : exchange_(&exchange), handle_(&handle), is_combine_(is_combine), from_(from), to_(to), exceptions_(std::uncaught_exceptions()) {
  exchange.pending = true;
}

PendingRows::PendingRows(PendingRows&& other) noexcept { *this = std::move(other); }

PendingRows& PendingRows::operator=(PendingRows&& other) noexcept {
  if (this == &other) return *this;
  settle();
  exchange_ = std::exchange(other.exchange_, nullptr);
  handle_ = other.handle_;
  is_combine_ = other.is_combine_;
  from_ = other.from_;
  to_ = other.to_;
  request_ = std::move(other.request_);
  exceptions_ = other.exceptions_;
  return *this;
}

PendingRows::~PendingRows() { settle(); }

void PendingRows::settle() noexcept {
  if (exchange_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) {
    std::exchange(exchange_, nullptr)->pending = false;
    request_.reset();  // withdraws
    return;
  }
  try {
    finish();
  } catch (...) {  // the group has failed; its next call says so
  }
}

void PendingRows::finish(PhaseTimes* times) {
  if (exchange_ == nullptr) return;
  Exchange::Impl& exchange = *std::exchange(exchange_, nullptr);
  exchange.pending = false;
  if (request_ == nullptr) return;
  const Phase phase = is_combine_ ? Phase::kCombine : Phase::kDispatch;
  const PhaseScope scope(times, phase);
  Exchange::Impl::wait_rows(*request_, phase, times);
  request_.reset();
  if (exchange.two_level) {
    is_combine_ ? exchange.node_combine_finish(*handle_, to_, times) : exchange.node_dispatch_finish(*handle_, to_, times);
  } else if (is_combine_) {
    exchange.flat_combine_finish(*handle_, from_, to_);
  }
}

}  // namespace waybill
