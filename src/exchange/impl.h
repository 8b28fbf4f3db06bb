// SPDX-License-Identifier: Apache-2.0
// State of an Exchange, shared by its steps (plan, dispatch, combine).
#pragma once

#include <chrono>
#include <vector>

#include "waybill/exchange.h"

namespace waybill {

struct Exchange::Impl {
  Impl(const ExchangeConfig& config, const ExpertPlacement& placement, Fabric& fabric, ThreadPool* pool);

  ExchangeConfig config;
  std::vector<std::int32_t> rank_table, local_table;  // copies of the caller's; placement points at them
  ExpertPlacement placement;
  Fabric& fabric;
  ThreadPool* pool;
  ReceiveBudget budget;
  StatusWord status;
  ExchangeBytes bytes;

  // Grow to the largest step and stay.
  Tensor send_buffer, receive_buffer;
  std::vector<Fabric::Span> send, receive;  // [P]

  std::size_t P() const { return static_cast<std::size_t>(placement.P); }
  std::size_t rank() const { return static_cast<std::size_t>(fabric.rank()); }
  std::byte* send_bytes(std::size_t bytes);
  std::byte* receive_bytes(std::size_t bytes);
  // Moves send -> receive and books the time of the wait.
  void all_to_all(const char* name, Phase phase, PhaseTimes* times);

  // plan.cc
  struct Header;
  DispatchHandle plan(const RouteView& route, PhaseTimes* times);
  std::string local_fault(const RouteView& route, const RoutePlan& plan) const;
  std::vector<Header> exchange_headers(const RoutePlan& plan, const std::string& fault, PhaseTimes* times);
  void throw_faults(const std::vector<Header>& headers, const std::string& fault);
  bool agree_on_budget(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times);
  void exchange_metadata(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times);
  void count_plan(const RouteView& route, const RoutePlan& plan);
  void check_dropless(const RouteView& route, const DispatchHandle& handle, PhaseTimes* times);

  // dispatch.cc, combine.cc
  void dispatch(const DispatchHandle& handle, const TensorView& x, Tensor& rows, PhaseTimes* times);
  void combine(const DispatchHandle& handle, const TensorView& z, const TensorView& out, PhaseTimes* times);
  void return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times);
};

// First element of a row: 64-bit whatever the row and the stride.
inline std::byte* row_pointer(const TensorView& view, std::int64_t row) {
  return static_cast<std::byte*>(view.data) + static_cast<std::size_t>(row * view.stride[0]) * size_bytes(view.dtype);
}

// "x must be ..." unless the view is [rows, columns] on the host with contiguous columns and one of the two float types.
void check_rows(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns);

}  // namespace waybill
