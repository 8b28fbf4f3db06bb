// SPDX-License-Identifier: Apache-2.0
// State of an Exchange, shared by its steps (plan, dispatch, combine).
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "exchange/node_plan.h"
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
  NodeMap nodes;
  bool two_level = false;
  StatusWord status;
  ExchangeBytes bytes;

  // Grow to the largest step and stay.
  Tensor send_buffer, receive_buffer;
  Tensor node_buffer;                       // two-level: rows that this rank takes in as gateway, on both ways
  std::vector<Fabric::Span> send, receive;  // [P]
  bool pending = false;                     // a dispatch or combine is on its way

  std::size_t P() const { return static_cast<std::size_t>(placement.P); }
  std::size_t rank() const { return static_cast<std::size_t>(fabric.rank()); }
  static std::byte* buffer_bytes(Tensor& buffer, std::size_t count);
  std::byte* send_bytes(std::size_t count) { return buffer_bytes(send_buffer, count); }
  std::byte* receive_bytes(std::size_t count) { return buffer_bytes(receive_buffer, count); }
  void check_idle(const char* call) const;
  // Start of send -> receive; what leaves the rank is added to `kind`.
  std::unique_ptr<ExchangeRequest> start_rows(const char* name, std::int64_t& kind);
  // Ends one and books the time of the wait.
  static void wait_rows(ExchangeRequest& request, Phase phase, PhaseTimes* times);
  // Moves send -> receive. The caller counts the bytes by kind, this the distance.
  void all_to_all(const char* name, Phase phase, PhaseTimes* times);
  void count_distance();
  void count_gather(std::size_t bytes_per_rank);  // a collective that brings the same bytes to every other rank

  // plan.cc
  struct Header;
  std::vector<std::vector<std::byte>> node_masks;  // two-level: [P] ranks that each row goes on to, by gateway
  DispatchHandle plan(const RouteView& route, PhaseTimes* times);
  std::string local_fault(const RouteView& route, const RoutePlan& plan) const;
  std::vector<Header> exchange_headers(const DispatchHandle& handle, const std::string& fault, PhaseTimes* times);
  void throw_faults(const std::vector<Header>& headers, const std::string& fault);
  bool agree_on_budget(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times);
  void exchange_metadata(DispatchHandle& handle, const std::vector<Header>& headers, PhaseTimes* times);
  void count_plan(const RouteView& route, const DispatchHandle& handle);
  void check_dropless(const RouteView& route, const DispatchHandle& handle, PhaseTimes* times);

  // dispatch.cc, combine.cc: checks, then the flat or the two-level way. A null request: nothing to wait for.
  std::unique_ptr<ExchangeRequest> dispatch_start(const DispatchHandle& handle, const TensorView& x, Tensor& rows);
  std::unique_ptr<ExchangeRequest> combine_start(const DispatchHandle& handle, const TensorView& z, const TensorView& out);
  std::unique_ptr<ExchangeRequest> flat_combine_start(const DispatchHandle& handle, const TensorView& z);
  void flat_combine_finish(const DispatchHandle& handle, const TensorView& z, const TensorView& out);
  bool rounded() const { return config.combine_wire == CombineWire::kBF16 && P() > 1; }  // flat: ranks' partials

  // two_level.cc
  template <class Body>
  void for_sources_of(std::size_t gateway, const Body& body) const;
  std::int64_t rows_through(const ReceiveLayout& layout, std::size_t gateway) const;
  std::unique_ptr<ExchangeRequest> node_dispatch_start(const DispatchHandle& handle, const TensorView& x);
  void node_dispatch_finish(const DispatchHandle& handle, const TensorView& rows, PhaseTimes* times);
  std::unique_ptr<ExchangeRequest> node_combine_start(const DispatchHandle& handle, const TensorView& z);
  void node_combine_finish(const DispatchHandle& handle, const TensorView& out, PhaseTimes* times);

  void return_slot_values(const DispatchHandle& handle, const float* slot_values, float* d_weights, PhaseTimes* times);
};

// Collective: the ranks' configs, placements and nodes are compared; the first difference is refused on every rank, naming both values.
void compare_configs(Fabric& fabric, const ExchangeConfig& config, const ExpertPlacement& placement, const NodeMap& nodes);

// First element of a row: 64-bit whatever the row and the stride.
inline std::byte* row_pointer(const TensorView& view, std::int64_t row) {
  return static_cast<std::byte*>(view.data) + static_cast<std::size_t>(row * view.stride[0]) * size_bytes(view.dtype);
}

// "x must be ..." unless the view is [rows, columns] on the host with contiguous columns and one of the two float types.
void check_rows(const char* name, const TensorView& view, std::int64_t rows, std::int64_t columns);

}  // namespace waybill
